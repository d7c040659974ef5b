// Who is let in. Join tokens are secrets that are passed on; each says whom it lets in, workers or programs or both,
// and may end by itself. Who has come in with one is a member: from then on its own key is its credential, whatever
// becomes of the token, until the key itself is revoked. Kept in one file of the state folder, which its user alone can
// read.
//
// No I/O but load() and save(); one thread. Times are those of the wall, in seconds since 1970.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "wire/control.h"

namespace linkcpp::hub {

enum class Admits : std::uint8_t { workers = 1, programs = 2, all = 3 };
std::string_view to_string(Admits admits);
// Errors: invalid.
Result<Admits> parse_admits(std::string_view text);

struct JoinToken {
    std::string name;
    std::string secret;
    Admits admits = Admits::workers;
    std::int64_t made = 0;
    std::int64_t ends = 0;  // 0: never
    bool has_ended(std::int64_t now) const { return ends != 0 && now >= ends; }
};

struct Member {
    std::string name;  // for people
    wire::fb::Role role = wire::fb::Role::none;
    std::string token;  // the name of what it came in with
    std::int64_t since = 0;
    std::int64_t seen = 0;
    bool revoked = false;
};

class Access {
  public:
    // The name of the token that a hub makes for itself and prints.
    static constexpr const char* kDefault = "workers";
    // What a member's `token` is that came in with the hub's own secret; no token can be called so.
    static constexpr const char* kOwn = "(own)";

    // Without a file: one token, the default. Errors: corrupt, failed: a hub that does not know whom it let in must not
    // start.
    static Result<Access> load(const std::filesystem::path& path, std::int64_t now);
    Status save(const std::filesystem::path& path) const;

    // Whether somebody with that key and token may come in as `role`; makes it a member. Errors: invalid, for people.
    Status admit(const std::string& key, std::string_view token, wire::fb::Role role, const std::string& name,
                 std::int64_t now);

    // A token under a name that is free. Errors: invalid (the name is taken, or no name).
    Result<JoinToken> make(const std::string& name, Admits admits, std::int64_t ends, std::int64_t now);
    // Another secret under the same name. Errors: not_found.
    Result<JoinToken> rotate(std::string_view name, std::int64_t now);
    // It lets nobody in any more. Errors: not_found.
    Result<JoinToken> revoke(std::string_view name);
    // Members that came in with that token.
    std::vector<std::string> members_of(std::string_view token) const;
    // That key is refused from now on, or may come in with a token again. By name, id, or beginning of an id. The id.
    // Errors: not_found, invalid (fits several).
    Result<std::string> set_revoked(std::string_view member, bool revoked);

    // A secret that this process alone knows, and what it starts: lets in whoever has it.
    void set_own_secret(std::string secret) { own_secret_ = std::move(secret); }
    const std::vector<JoinToken>& tokens() const { return tokens_; }
    const JoinToken* find(std::string_view name) const;
    const std::map<std::string, Member>& members() const { return members_; }  // by key
    // Whether something has changed since the last call that the next hub should know.
    bool take_changed() { return std::exchange(changed_, false); }

  private:
    // Errors: not_found.
    Result<std::vector<JoinToken>::iterator> locate(std::string_view name);

    std::vector<JoinToken> tokens_;
    std::map<std::string, Member> members_;
    std::string own_secret_;
    bool changed_ = false;
};

}  // namespace linkcpp::hub
