#include <filesystem>
#include <fstream>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "base/test_folder.h"
#include "model/test_model.h"
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

Bytes some_bytes(std::size_t n, unsigned seed) {
    Bytes bytes(n);
    for (std::size_t i = 0; i < n; ++i) { bytes[i] = static_cast<std::byte>((i * 131 + i / 251) ^ (seed * 77)); }
    return bytes;
}

TEST_F(Store, a_slice_that_comes_in_parts_is_gone_on_with_by_the_next_process) {
    const Bytes bytes = some_bytes(300'000, 1);
    const Digest hash = sha256(bytes);
    {
        PartialFile file = store_.begin(hash, bytes.size()).value();
        EXPECT_EQ(file.n_bytes(), 0u);
        ASSERT_TRUE(file.add(ByteView(bytes).first(100'000)));
        EXPECT_EQ(store_.begin(hash, bytes.size()).error().kind, ErrorKind::overloaded);  // one at a time
    }
    EXPECT_FALSE(store_.has(hash));
    ASSERT_EQ(store_.partials().size(), 1u);
    EXPECT_EQ(store_.partials()[0].bytes, 100'000u);
    PartialFile file = store_.begin(hash, bytes.size()).value();
    ASSERT_EQ(file.n_bytes(), 100'000u);
    EXPECT_TRUE(store_.partials()[0].in_use);
    ASSERT_TRUE(file.add(ByteView(bytes).subspan(100'000)));
    EXPECT_EQ(file.hash().value(), hash);
    ASSERT_TRUE(store_.keep(std::move(file), hash));
    Bytes read(bytes.size());
    ASSERT_TRUE(store_.read(hash, read));
    EXPECT_EQ(read, bytes);
    EXPECT_TRUE(store_.partials().empty());
}

TEST_F(Store, what_has_come_may_be_more_than_there_should_be) {
    {
        PartialFile file = store_.begin(hash_, 100).value();
        ASSERT_TRUE(file.add(some_bytes(50, 1)));
    }
    EXPECT_EQ(store_.begin(hash_, 7)->n_bytes(), 0u);
}

TEST_F(Store, zeros_take_no_space_and_are_zeros) {
    Bytes bytes(1u << 20);
    bytes.insert(bytes.end(), 3, std::byte{9});
    PartialFile file = store_.begin(sha256(bytes), bytes.size()).value();
    for (std::size_t at = 0; at < bytes.size(); at += 64u << 10) {
        ASSERT_TRUE(file.add(ByteView(bytes).subspan(at, std::min<std::size_t>(64u << 10, bytes.size() - at))));
    }
    EXPECT_EQ(file.hash().value(), sha256(bytes));
    ASSERT_TRUE(store_.keep(std::move(file), sha256(bytes)));
    Bytes read(bytes.size());
    ASSERT_TRUE(store_.read(sha256(bytes), read));
    EXPECT_EQ(read, bytes);
    struct stat info{};
    ASSERT_EQ(::stat(store_.list()[0].path.c_str(), &info), 0);
    EXPECT_LT(info.st_blocks * 512, 64 << 10);
}

void make_older(const SliceStore& store, const Digest& hash, int seconds) {
    for (const auto& entry : store.list()) {
        if (entry.hash != hash) { continue; }
        const timespec then{entry.used - seconds, 0};
        const timespec times[2] = {then, then};
        ASSERT_EQ(::utimensat(AT_FDCWD, entry.path.c_str(), times, 0), 0);
    }
}

TEST_F(Store, with_a_limit_those_go_first_that_were_not_used_for_longest) {
    const SliceStore store = SliceStore::open(dir_, 3500).value();
    std::vector<Bytes> slices;
    std::vector<Digest> hashes;
    for (unsigned i = 0; i < 5; ++i) {
        slices.push_back(some_bytes(1000, i));
        hashes.push_back(sha256(slices.back()));
    }
    for (int i = 0; i < 3; ++i) {
        ASSERT_TRUE(store.put(hashes[i], slices[i]));
        make_older(store, hashes[i], 1000 * (3 - i));
    }
    Bytes read(1000);
    ASSERT_TRUE(store.read(hashes[0], read));  // used now
    ASSERT_TRUE(store.put(hashes[3], slices[3]));
    EXPECT_TRUE(store.has(hashes[0]));
    EXPECT_FALSE(store.has(hashes[1]));
    EXPECT_TRUE(store.has(hashes[2]));
    store.protect({hashes[0], hashes[2], hashes[3]});
    const Status full = store.put(hashes[4], slices[4]);
    ASSERT_FALSE(full);
    EXPECT_NE(full.error().message.find("--store-limit"), std::string::npos);
    EXPECT_TRUE(store.partials().empty());
    EXPECT_FALSE(store.put(sha256(some_bytes(4000, 9)), some_bytes(4000, 9)));  // larger than the limit
    store.protect({});
    EXPECT_TRUE(store.put(hashes[4], slices[4]));
    EXPECT_FALSE(store.has(hashes[2]));
}

TEST_F(Store, every_slice_can_be_verified_and_what_is_no_slice_is_left_alone) {
    ASSERT_TRUE(store_.put(hash_, as_bytes("a slice")));
    ASSERT_TRUE(store_.put(sha256(as_bytes("another")), as_bytes("another")));
    std::ofstream(dir_ / "README") << "mine";
    fs::create_directories(dir_ / "ab");
    std::ofstream(dir_ / "ab" / "notes.txt") << "mine, too";
    fs::create_symlink("/etc/passwd", dir_ / "ab" / ("ab" + std::string(62, '0')));
    ASSERT_EQ(store_.list().size(), 2u);
    for (const auto& entry : store_.list()) { EXPECT_EQ(store_.verify(entry).value(), true); }
    const auto damaged = store_.list()[0];
    fs::permissions(damaged.path, fs::perms::owner_all);
    std::ofstream(damaged.path) << "A slice";
    EXPECT_EQ(store_.verify(damaged).value(), false);
    EXPECT_FALSE(store_.has(damaged.hash));
    EXPECT_EQ(store_.list().size(), 1u);
    EXPECT_TRUE(fs::exists(dir_ / "ab" / "notes.txt"));
}

TEST_F(Store, models_are_remembered_by_their_ids) {
    TestFolder folder;
    const auto file = model::GgufFile::open(folder.write("m.gguf", model::testing::TinyModel{}.bytes())).value();
    const model::Manifest manifest = model::make_manifest(file).value();
    store_.remember(manifest);
    store_.remember(manifest);
    ASSERT_EQ(store_.models().size(), 1u);
    EXPECT_EQ(store_.models()[0].id(), manifest.id());
    // Another name, other bytes: nobody's.
    fs::copy_file(store_.manifest_path(manifest.id()), store_.manifest_path(Digest()));
    std::ofstream(dir_ / "manifests" / "x.json") << "{}";
    EXPECT_EQ(store_.models().size(), 1u);
}

}  // namespace
}  // namespace linkcpp::store
