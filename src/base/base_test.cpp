#include <filesystem>

#include <gtest/gtest.h>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/platform.h"
#include "base/raw_buffer.h"
#include "base/refusals.h"
#include "base/sha256.h"
#include "base/test_folder.h"
#include "base/units.h"

namespace linkcpp {
namespace {

TEST(Bytes, hex_round_trips_and_refuses_other_text) {
    const auto bytes = from_hex("00ff7Fa0");
    ASSERT_TRUE(bytes);
    EXPECT_EQ(to_hex(*bytes), "00ff7fa0");
    EXPECT_FALSE(from_hex("0"));
    EXPECT_FALSE(from_hex("0g"));
}

TEST(Bytes, constant_time_comparison_compares) {
    EXPECT_TRUE(equal_in_constant_time(as_bytes("secret"), as_bytes("secret")));
    EXPECT_FALSE(equal_in_constant_time(as_bytes("secret"), as_bytes("secreT")));
    EXPECT_FALSE(equal_in_constant_time(as_bytes("secret"), as_bytes("secret ")));
}

TEST(Units, reads_times) {
    EXPECT_EQ(parse_seconds("90s").value(), 90u);
    EXPECT_EQ(parse_seconds("24h").value(), 86400u);
    EXPECT_EQ(parse_seconds("7d").value(), 7u * 86400);
    for (const char* text : {"", "h", "-1h", "0", "1w", "1.5h", "99999999999999999999", "40000d", "1h "}) {
        EXPECT_FALSE(parse_seconds(text)) << text;
    }
}

TEST(Sha256, gives_the_digests_of_fips_180) {
    EXPECT_EQ(sha256(as_bytes("abc")).hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(sha256({}).hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(Sha256, starts_anew_after_finish) {
    Sha256 hash;
    hash.add(as_bytes("ab"));
    hash.add(as_bytes("c"));
    EXPECT_EQ(hash.finish(), sha256(as_bytes("abc")));
    hash.add(as_bytes("abc"));
    EXPECT_EQ(hash.finish(), sha256(as_bytes("abc")));
}

TEST(Units, sizes_follow_the_documented_words) {
    EXPECT_EQ(parse_bytes("64G").value(), 64ull << 30);
    EXPECT_EQ(parse_bytes("64GiB").value(), 64ull << 30);
    EXPECT_EQ(parse_bytes("64GB").value(), 64'000'000'000ull);
    EXPECT_EQ(parse_bytes("1.5 MiB").value(), 3ull << 19);
    EXPECT_EQ(parse_bytes("4096").value(), 4096u);
    for (const char* bad : {"", "G", "4X", "-1G", "1e30G", "nan", "4 G B"}) {
        EXPECT_EQ(parse_bytes(bad).error().kind, ErrorKind::invalid) << bad;
    }
}

TEST(Units, shares_are_from_0_to_1) {
    EXPECT_EQ(parse_share("0").value(), 0);
    EXPECT_EQ(parse_share("1").value(), 1);
    EXPECT_EQ(parse_share("0.001").value(), 0.001);
    EXPECT_EQ(parse_share("1/1000").value(), 0.001);
    EXPECT_EQ(parse_share("0.1%").value(), 0.001);
    for (const char* bad : {"", "2", "-0.1", "1/0", "0/0", "1/", "/2", "5/2", "101%", "1%%", "nan", "0.1 ", "a"}) {
        EXPECT_EQ(parse_share(bad).error().kind, ErrorKind::invalid) << bad;
    }
}

TEST(Units, ranges_are_sorted_and_unique) {
    EXPECT_EQ(parse_ranges("8,0-3,2").value(), (std::vector<std::uint32_t>{0, 1, 2, 3, 8}));
    for (const char* bad : {"", "a", "3-1", "1-", "-", "1,,2", "0-4294967295"}) {
        EXPECT_EQ(parse_ranges(bad).error().kind, ErrorKind::invalid) << bad;
    }
}

class Files : public testing::Test {
  protected:
    std::size_t n_files() const {
        return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(dir_), {}));
    }
    TestFolder folder_;
    std::filesystem::path dir_ = folder_.path();
};

TEST_F(Files, atomic_file_leaves_nothing_without_commit) {
    {
        auto file = AtomicFile::create(dir_ / "a");
        ASSERT_TRUE(file);
        ASSERT_TRUE(write_at(file->fd(), as_bytes("half"), 0, "a"));
    }
    EXPECT_EQ(n_files(), 0u);
}

TEST_F(Files, a_lock_is_held_by_one_at_a_time) {
    auto first = try_lock(dir_ / "lock");
    ASSERT_TRUE(first && *first);
    const auto second = try_lock(dir_ / "lock");
    ASSERT_TRUE(second);
    EXPECT_FALSE(*second);
    first->reset();
    EXPECT_TRUE(*try_lock(dir_ / "lock"));
    EXPECT_FALSE(try_lock(dir_ / "none" / "lock"));
}

TEST_F(Files, atomic_file_appears_whole) {
    ASSERT_TRUE(write_file_atomically(dir_ / "a", "text"));
    EXPECT_EQ(read_file(dir_ / "a").value(), "text");
    EXPECT_EQ(n_files(), 1u);
}

TEST_F(Files, too_large_and_missing_ones_are_told_apart) {
    ASSERT_TRUE(write_file_atomically(dir_ / "a", "text"));
    EXPECT_EQ(read_file(dir_ / "a", 3).error().kind, ErrorKind::invalid);
    EXPECT_EQ(read_file(dir_ / "b").error().kind, ErrorKind::not_found);
}

TEST(Clock, poll_time_is_rounded_up) {
    using namespace std::chrono_literals;
    EXPECT_EQ(to_poll_ms(0ns), 0);
    EXPECT_EQ(to_poll_ms(1ns), 1);
    EXPECT_EQ(to_poll_ms(1500us), 2);
}

TEST(RawBuffer, keeps_its_content_when_it_grows_shrinks_and_moves) {
    RawBytes buffer;
    EXPECT_TRUE(buffer.empty());
    buffer.append(as_bytes("hello "));
    buffer.append(as_bytes("world"));
    buffer.append({});
    EXPECT_EQ(as_text(buffer), "hello world");
    buffer.resize(100'000);
    EXPECT_EQ(as_text(ByteView(buffer).first(11)), "hello world");
    buffer.resize(11);
    buffer.drop_front(6);
    EXPECT_EQ(as_text(buffer), "world");
    RawBytes other = std::move(buffer);
    EXPECT_EQ(as_text(other), "world");
    // What a move leaves is part of the contract. NOLINTBEGIN(bugprone-use-after-move,clang-analyzer-cplusplus.Move)
    EXPECT_TRUE(buffer.empty());
    buffer.append(as_bytes("again"));
    EXPECT_EQ(as_text(buffer), "again");
    // NOLINTEND(bugprone-use-after-move,clang-analyzer-cplusplus.Move)
    other.drop_front(99);
    EXPECT_TRUE(other.empty());
    other.release();
    EXPECT_EQ(other.capacity(), 0u);
}

TEST(Refusals, says_the_first_of_each_name_and_then_seldom_how_many_more_there_were) {
    Refusals refusals;
    const TimePoint start{};
    EXPECT_EQ(refusals.text_to_say("strangers", "one", start), "one");
    EXPECT_EQ(refusals.text_to_say("others", "two", start), "two");
    for (int i = 0; i < 1000; ++i) {
        EXPECT_EQ(refusals.text_to_say("strangers", "more", start + std::chrono::milliseconds(9 * i)), std::nullopt);
    }
    EXPECT_EQ(refusals.text_to_say("strangers", "later", start + Refusals::kSayEvery),
              "later (1000 more like this were not said)");
    EXPECT_EQ(refusals.text_to_say("strangers", "last", start + 2 * Refusals::kSayEvery), "last");
    refusals.count("strangers");
    refusals.count("strangers");
    EXPECT_EQ(refusals.counts().at("strangers"), 2u);
}

}  // namespace
}  // namespace linkcpp
