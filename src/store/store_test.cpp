#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "base/platform.h"
#include "base/test_folder.h"
#include "store/slice_store.h"

namespace linkcpp::store {
namespace {

namespace fs = std::filesystem;

class Store : public testing::Test {
  protected:
    std::size_t n_files() const {
        std::size_t n = 0;
        for (const auto& entry : fs::recursive_directory_iterator(dir_)) { n += entry.is_regular_file() ? 1 : 0; }
        return n;
    }
    TestFolder folder_;
    fs::path dir_ = folder_ / "store";
    SliceStore store_ = SliceStore::open(dir_).value();
    Digest hash_ = sha256(as_bytes("a slice"));
};

TEST_F(Store, what_is_put_can_be_got) {
    EXPECT_FALSE(store_.has(hash_));
    Bytes slice(7);
    EXPECT_EQ(store_.read(hash_, slice).error().kind, ErrorKind::not_found);
    ASSERT_TRUE(store_.put(hash_, as_bytes("a slice")));
    EXPECT_TRUE(store_.has(hash_));
    ASSERT_TRUE(store_.read(hash_, slice));
    EXPECT_EQ(as_text(slice), "a slice");
}

TEST_F(Store, a_slice_of_several_pieces_is_read_whole) {
    Bytes bytes(1'000'003);
    for (std::size_t i = 0; i < bytes.size(); ++i) { bytes[i] = static_cast<std::byte>(i * 7 + i / 997); }
    ASSERT_TRUE(store_.put(sha256(bytes), bytes));
    Bytes read(bytes.size());
    ASSERT_TRUE(store_.read(sha256(bytes), read));
    EXPECT_EQ(read, bytes);
}

TEST_F(Store, bytes_with_another_hash_are_refused_and_leave_nothing) {
    EXPECT_EQ(store_.put(hash_, as_bytes("another")).error().kind, ErrorKind::corrupt);
    EXPECT_EQ(n_files(), 0u);
}

TEST_F(Store, a_damaged_file_is_noticed_and_removed) {
    ASSERT_TRUE(store_.put(hash_, as_bytes("a slice")));
    for (const auto& entry : fs::recursive_directory_iterator(dir_)) {
        if (!entry.is_regular_file()) { continue; }
        fs::permissions(entry.path(), fs::perms::owner_all);
        std::ofstream(entry.path()) << "a Slice";
    }
    Bytes slice(7);
    EXPECT_EQ(store_.read(hash_, slice).error().kind, ErrorKind::corrupt);
    EXPECT_FALSE(store_.has(hash_));
}

TEST_F(Store, a_file_cut_short_is_noticed_and_removed) {
    ASSERT_TRUE(store_.put(hash_, as_bytes("a slice")));
    for (const auto& entry : fs::recursive_directory_iterator(dir_)) {
        if (!entry.is_regular_file()) { continue; }
        fs::permissions(entry.path(), fs::perms::owner_all);
        fs::resize_file(entry.path(), 0);
    }
    Bytes slice(7);
    EXPECT_EQ(store_.read(hash_, slice).error().kind, ErrorKind::corrupt);
    EXPECT_FALSE(store_.has(hash_));
}

}  // namespace
}  // namespace linkcpp::store
