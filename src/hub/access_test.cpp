#include "hub/access.h"
#include "base/test_folder.h"

#include <filesystem>

#include <gtest/gtest.h>

#include "base/file.h"

namespace linkcpp::hub {
namespace {

namespace fb = wire::fb;

constexpr std::int64_t kNow = 1'800'000'000;

class AccessTest : public testing::Test {
  protected:
    Status admit(const std::string& key, std::string_view token, fb::Role role = fb::Role::worker,
                 std::int64_t now = kNow) {
        return access_.admit(key, token, role, "name-" + key, now);
    }

    TestFolder folder_;
    std::filesystem::path path_ = folder_ / "access.json";
    Access access_ = Access::load(path_, kNow).value();
    std::string secret_ = access_.find(Access::kDefault)->secret;
};

TEST_F(AccessTest, a_token_lets_in_whom_it_is_for_and_nobody_else) {
    EXPECT_FALSE(admit("a", ""));
    EXPECT_FALSE(admit("a", "wrong"));
    EXPECT_TRUE(access_.members().empty());
    EXPECT_TRUE(admit("a", secret_));
    const Status program = admit("p", secret_, fb::Role::coordinator);
    ASSERT_FALSE(program);
    EXPECT_NE(program.error().message.find("token new --for programs"), std::string::npos) << program.error().message;
    const JoinToken programs = access_.make("programs", Admits::programs, 0, kNow).value();
    EXPECT_TRUE(admit("p", programs.secret, fb::Role::coordinator));
    EXPECT_FALSE(admit("b", programs.secret));
    const JoinToken all = access_.make("all", Admits::all, 0, kNow).value();
    EXPECT_TRUE(admit("b", all.secret));
    EXPECT_TRUE(admit("q", all.secret, fb::Role::coordinator));
}

TEST_F(AccessTest, a_member_comes_in_by_its_key_whatever_becomes_of_the_token) {
    ASSERT_TRUE(admit("a", secret_));
    const std::string fresh = access_.rotate(Access::kDefault, kNow)->secret;
    EXPECT_NE(fresh, secret_);
    EXPECT_TRUE(admit("a", secret_));
    EXPECT_TRUE(admit("a", ""));
    EXPECT_FALSE(admit("b", secret_)) << "the old secret lets nobody in any more";
    EXPECT_TRUE(admit("b", fresh));
    ASSERT_TRUE(access_.revoke(Access::kDefault));
    EXPECT_FALSE(admit("c", fresh));
    EXPECT_TRUE(admit("a", "anything"));
    EXPECT_FALSE(admit("a", "", fb::Role::coordinator)) << "as what it is known, and not as more";
}

TEST_F(AccessTest, a_revoked_key_is_out_even_with_a_good_token) {
    ASSERT_TRUE(admit("aaaaaa1", secret_));
    ASSERT_TRUE(admit("bbbbbb1", secret_));
    EXPECT_EQ(access_.set_revoked("aaaaaa", true).value(), "aaaaaa1");
    EXPECT_FALSE(admit("aaaaaa1", secret_));
    EXPECT_TRUE(admit("bbbbbb1", ""));
    EXPECT_EQ(access_.set_revoked("aaaaaa1", true).error().kind, ErrorKind::not_found) << "it is out already";
    EXPECT_EQ(access_.members_of(Access::kDefault), std::vector<std::string>{"bbbbbb1"});
    EXPECT_EQ(access_.set_revoked("name-aaaaaa1", false).value(), "aaaaaa1");
    EXPECT_TRUE(admit("aaaaaa1", secret_));
}

TEST_F(AccessTest, a_token_ends_by_itself) {
    const JoinToken guest = access_.make("guest", Admits::workers, kNow + 60, kNow).value();
    EXPECT_TRUE(admit("a", guest.secret, fb::Role::worker, kNow + 59));
    EXPECT_NE(admit("b", guest.secret, fb::Role::worker, kNow + 60).error().message.find("has ended"),
              std::string::npos);
    EXPECT_TRUE(admit("a", guest.secret, fb::Role::worker, kNow + 1000)) << "a member";
    EXPECT_FALSE(access_.rotate("guest", kNow + 1000)) << "it would print a line that is dead already";
}

TEST_F(AccessTest, all_of_it_is_known_to_the_next_hub) {
    ASSERT_TRUE(admit("a", secret_));
    ASSERT_TRUE(admit("b", secret_));
    ASSERT_TRUE(access_.set_revoked("name-b", true));
    const JoinToken guest = access_.make("guest", Admits::all, kNow + 60, kNow).value();
    EXPECT_TRUE(access_.take_changed());
    EXPECT_FALSE(access_.take_changed());
    ASSERT_TRUE(access_.save(path_));
    EXPECT_EQ(std::filesystem::status(path_).permissions(),
              std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
    Access next = Access::load(path_, kNow).value();
    EXPECT_EQ(next.find(Access::kDefault)->secret, secret_);
    EXPECT_TRUE(next.admit("a", "", fb::Role::worker, "a", kNow));
    EXPECT_FALSE(next.admit("b", secret_, fb::Role::worker, "b", kNow));
    EXPECT_TRUE(next.admit("p", guest.secret, fb::Role::coordinator, "p", kNow));
    EXPECT_FALSE(next.admit("q", guest.secret, fb::Role::coordinator, "q", kNow + 60));
    EXPECT_TRUE(next.take_changed());
    EXPECT_TRUE(next.admit("p", "", fb::Role::coordinator, "p", kNow));
    EXPECT_FALSE(next.take_changed()) << "nothing new";
}

TEST_F(AccessTest, a_file_that_does_not_say_who_may_come_in_is_an_error) {
    for (const char* text :
         {"", "{", "[]", R"({"tokens": []})", R"({"tokens": [{}], "members": []})",
          R"({"tokens": [{"name":"x","secret":"y","for":"dogs","made":1,"ends":0}], "members": []})"}) {
        ASSERT_TRUE(write_file_atomically(path_, text));
        EXPECT_FALSE(Access::load(path_, kNow)) << text;
    }
}

TEST_F(AccessTest, names_are_names) {
    for (const char* name : {"", "a b", "a/b", "a\nb", "\xff"}) {
        EXPECT_FALSE(access_.make(name, Admits::workers, 0, kNow)) << name;
    }
    EXPECT_FALSE(access_.make(std::string(65, 'a'), Admits::workers, 0, kNow));
    EXPECT_FALSE(access_.make(Access::kDefault, Admits::workers, 0, kNow)) << "it is taken";
    ASSERT_TRUE(access_.make("again", Admits::workers, 0, kNow));
    ASSERT_TRUE(admit("a", access_.find("again")->secret));
    EXPECT_EQ(access_.members_of("again").size(), 1u);
    ASSERT_TRUE(access_.revoke("again"));
    ASSERT_TRUE(access_.make("again", Admits::workers, 0, kNow));
    EXPECT_TRUE(access_.members_of("again").empty()) << "the first of that name has let them in";
    EXPECT_EQ(access_.rotate("none", kNow).error().kind, ErrorKind::not_found);
    EXPECT_EQ(access_.revoke("none").error().kind, ErrorKind::not_found);
    EXPECT_FALSE(parse_admits("dogs"));
}

TEST_F(AccessTest, of_programs_those_seen_last_are_remembered) {
    const JoinToken all = access_.make("all", Admits::all, 0, kNow).value();
    ASSERT_TRUE(admit("worker", all.secret));
    ASSERT_TRUE(admit("thief", all.secret, fb::Role::coordinator));
    ASSERT_TRUE(access_.set_revoked("thief", true));
    for (int i = 0; i < 1100; ++i) {
        ASSERT_TRUE(admit("program-" + std::to_string(i), all.secret, fb::Role::coordinator, kNow + 1 + i));
    }
    EXPECT_EQ(access_.members().size(), 1002u);
    EXPECT_FALSE(admit("thief", all.secret, fb::Role::coordinator)) << "that it was revoked is not forgotten";
    EXPECT_TRUE(access_.members().contains("worker"));
    EXPECT_FALSE(access_.members().contains("program-0"));
    EXPECT_TRUE(access_.members().contains("program-1099"));
}

}  // namespace
}  // namespace linkcpp::hub
