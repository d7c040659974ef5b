#include "hub/access.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "base/file.h"
#include "base/platform.h"
#include "base/text.h"
#include "hub/find_worker.h"
#include "net/join_line.h"

namespace linkcpp::hub {
namespace {

namespace fb = wire::fb;
using nlohmann::json;

constexpr std::size_t kMaxBytes = 64u << 20;
constexpr std::size_t kSecretBytes = 16;
constexpr std::size_t kMaxName = 64;
constexpr std::size_t kMaxTokens = 1000;
// Programs make a key for each start: those that were seen last are remembered, so that they can come back.
constexpr std::size_t kMaxPrograms = 1000;
constexpr std::size_t kMaxMembers = 10'000;

bool admits(Admits token, fb::Role role) {
    const auto wanted = role == fb::Role::worker ? Admits::workers : Admits::programs;
    return (static_cast<unsigned>(token) & static_cast<unsigned>(wanted)) != 0;
}

bool is_name(std::string_view name) {
    return !name.empty() && name.size() <= kMaxName && std::ranges::all_of(name, [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
               c == '.';
    });
}

}  // namespace

std::string_view to_string(Admits admits) {
    switch (admits) {
        case Admits::workers: return "workers";
        case Admits::programs: return "programs";
        case Admits::all: return "all";
    }
    return "unknown";
}

Result<Admits> parse_admits(std::string_view text) {
    for (const Admits each : {Admits::workers, Admits::programs, Admits::all}) {
        if (text == to_string(each)) { return each; }
    }
    return fail(ErrorKind::invalid, "expected workers, programs or all, got '{}'", one_line(text));
}

Result<Access> Access::load(const std::filesystem::path& path, std::int64_t now) {
    Access access;
    const auto text = read_file(path, kMaxBytes);
    if (!text && text.error().kind != ErrorKind::not_found) { return std::unexpected(text.error()); }
    if (!text) {
        LINKCPP_CHECK(access.make(kDefault, Admits::workers, 0, now));
        LINKCPP_CHECK(access.save(path));
        return access;
    }
    try {
        const json file = json::parse(*text);
        for (const json& entry : file.at("tokens")) {
            auto admits = parse_admits(entry.at("for").get<std::string>());
            if (!admits) { return fail_with(path.string(), admits.error()); }
            auto secret = entry.at("secret").get<std::string>();
            if (!net::is_token(secret) || secret.size() < kSecretBytes) {
                return fail(ErrorKind::corrupt, "{}: a token's secret is too short, or has characters that none has",
                            path.string());
            }
            access.tokens_.push_back({entry.at("name").get<std::string>(), std::move(secret), *admits,
                                      entry.at("made").get<std::int64_t>(), entry.at("ends").get<std::int64_t>()});
        }
        for (const json& entry : file.at("members")) {
            const bool is_worker = entry.at("role").get<std::string>() == "worker";
            access.members_[entry.at("key").get<std::string>()] = {
                entry.at("name").get<std::string>(),  is_worker ? fb::Role::worker : fb::Role::coordinator,
                entry.at("token").get<std::string>(), entry.at("since").get<std::int64_t>(),
                entry.at("seen").get<std::int64_t>(), entry.at("revoked").get<bool>()};
        }
    } catch (const json::exception&) {
        return fail(ErrorKind::corrupt,
                    "{}: it does not say who may come in; mend it, or remove it: then all need a new join line",
                    path.string());
    }
    return access;
}

Status Access::save(const std::filesystem::path& path) const {
    json tokens = json::array();
    for (const JoinToken& token : tokens_) {
        tokens.push_back({{"name", token.name},
                          {"secret", token.secret},
                          {"for", to_string(token.admits)},
                          {"made", token.made},
                          {"ends", token.ends}});
    }
    json members = json::array();
    for (const auto& [key, member] : members_) {
        members.push_back({{"key", key},
                           {"name", member.name},
                           {"role", member.role == fb::Role::worker ? "worker" : "program"},
                           {"token", member.token},
                           {"since", member.since},
                           {"seen", member.seen},
                           {"revoked", member.revoked}});
    }
    const json file{{"tokens", tokens}, {"members", members}};
    return write_file_atomically(path, file.dump(1, ' ', false, json::error_handler_t::replace) + "\n", 0600);
}

Status Access::admit(const std::string& key, std::string_view token, fb::Role role, const std::string& name,
                     std::int64_t now) {
    const auto known = members_.find(key);
    if (known != members_.end() && known->second.revoked) {
        return fail(ErrorKind::invalid, "this key was revoked by the hub's operator");
    }
    // All are looked at, so that the time does not say which is near.
    const JoinToken* found = nullptr;
    for (const JoinToken& each : tokens_) {
        if (equal_in_constant_time(as_bytes(each.secret), as_bytes(token))) { found = &each; }
    }
    const bool own = !own_secret_.empty() && equal_in_constant_time(as_bytes(own_secret_), as_bytes(token));
    const bool is_member = known != members_.end() && known->second.role == role;
    const bool by_token = found != nullptr && !found->has_ended(now) && admits(found->admits, role);
    if (!own && !is_member && !by_token) {
        if (found == nullptr) { return fail(ErrorKind::invalid, "the token is not valid; ask for a new join line"); }
        if (found->has_ended(now)) { return fail(ErrorKind::invalid, "the token has ended; ask for a new join line"); }
        const bool worker = role == fb::Role::worker;
        return fail(
            ErrorKind::invalid,
            "this join line lets in {0}, not {1}; `linkcpp token new --for {1}`, where the hub runs, prints one "
            "that does",
            worker ? "programs" : "workers", worker ? "workers" : "programs");
    }
    if (known == members_.end() && members_.size() >= kMaxMembers) {
        return fail(ErrorKind::overloaded, "{} members are known already", members_.size());
    }
    Member& member = members_[key];
    const Member before = member;
    if (member.role != role) { member.since = now; }
    member.name = name.empty() ? key.substr(0, kShortId) : name;
    member.role = role;
    member.seen = now;
    if (own || by_token) { member.token = own ? kOwn : found->name; }
    changed_ = changed_ || member.role != before.role || member.name != before.name || member.token != before.token;
    // That a key was revoked is never forgotten.
    const auto is_program = [](const auto& entry) {
        return entry.second.role == fb::Role::coordinator && !entry.second.revoked;
    };
    if (std::ranges::count_if(members_, is_program) > static_cast<std::ptrdiff_t>(kMaxPrograms)) {
        const auto oldest = std::ranges::min_element(members_, {}, [&](const auto& entry) {
            return is_program(entry) && entry.first != key ? entry.second.seen : now + 1;
        });
        members_.erase(oldest);
    }
    return {};
}

const JoinToken* Access::find(std::string_view name) const {
    const auto found = std::ranges::find(tokens_, name, &JoinToken::name);
    return found == tokens_.end() ? nullptr : &*found;
}

Result<std::vector<JoinToken>::iterator> Access::locate(std::string_view name) {
    const auto found = std::ranges::find(tokens_, name, &JoinToken::name);
    if (found == tokens_.end()) {
        return fail(ErrorKind::not_found, "no token '{}'; `linkcpp token list` shows them", one_line(name));
    }
    return found;
}

Result<JoinToken> Access::make(const std::string& name, Admits admits, std::int64_t ends, std::int64_t now) {
    if (!is_name(name)) {
        return fail(ErrorKind::invalid, "a token's name has letters, digits, '-', '_' and '.', {} at most, got '{}'",
                    kMaxName, one_line(name.substr(0, kMaxName)));
    }
    if (find(name) != nullptr) {
        return fail(ErrorKind::invalid, "there is a token '{}'; choose another name, or rotate it", name);
    }
    if (tokens_.size() >= kMaxTokens) { return fail(ErrorKind::overloaded, "there are {} tokens", tokens_.size()); }
    tokens_.push_back({name, random_hex(kSecretBytes), admits, now, ends});
    changed_ = true;
    return tokens_.back();
}

Result<JoinToken> Access::rotate(std::string_view name, std::int64_t now) {
    LINKCPP_TRY(const auto found, locate(name));
    if (found->has_ended(now)) {
        return fail(ErrorKind::invalid, "token '{}' has ended; revoke it and make a new one", one_line(name));
    }
    found->secret = random_hex(kSecretBytes);
    found->made = now;
    changed_ = true;
    return *found;
}

Result<JoinToken> Access::revoke(std::string_view name) {
    LINKCPP_TRY(const auto found, locate(name));
    JoinToken token = std::move(*found);
    tokens_.erase(found);
    for (auto& [key, member] : members_) {
        if (member.token == token.name) { member.token.clear(); }  // another of that name has not let them in
    }
    changed_ = true;
    return token;
}

std::vector<std::string> Access::members_of(std::string_view token) const {
    std::vector<std::string> keys;
    for (const auto& [key, member] : members_) {
        if (member.token == token && !member.revoked) { keys.push_back(key); }
    }
    return keys;
}

Result<std::string> Access::set_revoked(std::string_view member, bool revoked) {
    LINKCPP_TRY(const std::string key,
                find_worker(
                    member, members_,
                    [revoked](const Member& each) { return each.revoked != revoked ? each.name : std::string(); },
                    "worker or program", revoked ? "is let in" : "was revoked"));
    members_[key].revoked = revoked;
    changed_ = true;
    return key;
}

}  // namespace linkcpp::hub
