// What the operator wants of the hub.
#include <algorithm>
#include <ctime>
#include <future>

#include "base/log.h"
#include "base/text.h"
#include "base/units.h"
#include "hub/find_worker.h"
#include "hub/hub.h"
#include "hub/text.h"

namespace linkcpp::hub {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;

constexpr Duration kCallWait = 5s;
constexpr std::int64_t kSecondsPerDay = 24 * 3600;
constexpr std::int64_t kLongest = 36'500 * kSecondsPerDay;  // of a token

// Empty when it was not given.
std::string argument_of(const Arguments& arguments, const char* name) {
    const auto found = arguments.find(name);
    return found == arguments.end() ? std::string() : found->second;
}

json token_json(const JoinToken& token, const Access& access, const net::JoinLine& line) {
    return {{"name", token.name},
            {"for", to_string(token.admits)},
            {"made", time_json(token.made)},
            {"ends", time_json(token.ends)},
            {"members", access.members_of(token.name).size()},
            {"line", line.text()}};
}

}  // namespace

Result<std::string> Hub::operate(Command command, const Arguments& arguments) {
    const auto done = std::make_shared<std::promise<Result<std::string>>>();
    auto result = done->get_future();
    {
        const std::lock_guard lock(calls_mutex_);
        calls_.emplace_back([this, done, command, arguments] { done->set_value(run_command(command, arguments)); });
    }
    wake_.signal();
    if (result.wait_for(kCallWait) != std::future_status::ready) { return fail(ErrorKind::timeout, "the hub is busy"); }
    return result.get();
}

Result<std::string> Hub::run_command(Command command, const Arguments& arguments) {
    const auto argument = [&](const char* name) { return argument_of(arguments, name); };
    switch (command) {
        case Command::clear: return clear(argument("worker"));
        case Command::drain: return drain(argument("worker"), true);
        case Command::undrain: return drain(argument("worker"), false);
        case Command::list_tokens: return list_tokens();
        case Command::make_token: return make_token(arguments);
        case Command::rotate_token: return rotate_token(argument("name"));
        case Command::revoke_token: return revoke_token(argument("name"), argument("members") == "yes");
        case Command::revoke: return revoke(argument("member"), true);
        case Command::unrevoke: return revoke(argument("member"), false);
    }
    return fail(ErrorKind::unsupported, "unknown command");
}

std::string Hub::list_tokens() const {
    json tokens = json::array();
    for (const JoinToken& token : access_.tokens()) {
        json entry = token_json(token, access_, line_of(token));
        entry["ended"] = token.has_ended(std::time(nullptr));
        tokens.push_back(std::move(entry));
    }
    json revoked = json::array();
    for (const auto& [key, member] : access_.members()) {
        if (member.revoked) { revoked.push_back({{"key", key}, {"name", member.name}}); }
    }
    return to_text({{"tokens", tokens}, {"revoked", revoked}});
}

Result<std::string> Hub::make_token(const Arguments& arguments) {
    const auto argument = [&](const char* name) { return argument_of(arguments, name); };
    LINKCPP_TRY(const Admits admits, parse_admits(argument("for")));
    const std::int64_t now = std::time(nullptr);
    const std::string seconds = argument("seconds");
    const std::int64_t lifetime = parse_number<std::int64_t>(seconds).value_or(-1);
    if (lifetime < 0 || lifetime > kLongest) {
        return fail(ErrorKind::invalid,
                    "a token ends after at most {} days, or never (0 seconds), not after '{}' seconds",
                    kLongest / kSecondsPerDay, one_line(seconds.substr(0, kMaxForeignText)));
    }
    LINKCPP_TRY(const JoinToken token, access_.make(argument("name"), admits, lifetime == 0 ? 0 : now + lifetime, now));
    tokens_.add(token.secret);
    LINKCPP_CHECK(save_access());
    log_info("token {} lets in {} from now on", token.name, to_string(token.admits));
    return to_text(token_json(token, access_, line_of(token)));
}

Result<std::string> Hub::rotate_token(const std::string& name) {
    const JoinToken* before = access_.find(name);
    const std::string old = before != nullptr ? before->secret : "";
    LINKCPP_TRY(const JoinToken token, access_.rotate(name, std::time(nullptr)));
    tokens_.remove(old);
    tokens_.add(token.secret);
    LINKCPP_CHECK(save_access());
    log_info("token {} has a new secret; the old one lets nobody in any more", name);
    return to_text(token_json(token, access_, line_of(token)));
}

Result<std::string> Hub::revoke_token(const std::string& name, bool members) {
    std::vector<std::string> keys;
    if (members) { keys = access_.members_of(name); }
    LINKCPP_TRY(const JoinToken token, access_.revoke(name));
    tokens_.remove(token.secret);
    for (const std::string& key : keys) {
        LINKCPP_CHECK(access_.set_revoked(key, true));
        shut_out(key);
    }
    LINKCPP_CHECK(save_access());
    log_info("token {} lets nobody in any more", name);
    return json{{"name", name}, {"revoked_members", keys.size()}}.dump();
}

Result<std::string> Hub::revoke(const std::string& member, bool revoked) {
    LINKCPP_TRY(const std::string key, access_.set_revoked(member, revoked));
    if (revoked) {
        shut_out(key);
    } else {
        log_info("{} ({}) may come in again", access_.members().at(key).name, key.substr(0, kShortId));
    }
    LINKCPP_CHECK(save_access());
    return access_.members().at(key).name;
}

void Hub::shut_out(const std::string& key) {
    log_info("{} ({}) is let in no more", access_.members().at(key).name, key.substr(0, kShortId));
    for (const auto& peer : peers_) {
        if (peer->id != key || peer->gone) { continue; }
        net::refuse(*peer->link, ErrorKind::invalid, "this key was revoked by the hub's operator");
        drop(*peer, {ErrorKind::failed, fmt::format("{}: revoked", peer->link->name())});
        swarm_.said_goodbye(key, steady_now());
    }
    send_coordinators();  // workers let go of a program that is out
}

Result<std::string> Hub::clear(const std::string& worker) {
    LINKCPP_TRY(const std::string id, admission_.clear(worker, std::time(nullptr)));
    swarm_.set_quarantined(id, false, steady_now());
    save_trust();
    const std::string& name = admission_.records().at(id).name;
    log_info("worker {} is out of quarantine; it is probed before it serves", name);
    note_event(id, "out of quarantine");
    return name;
}

Result<std::string> Hub::drain(const std::string& worker, bool drained) {
    LINKCPP_TRY(const std::string id, swarm_.find(worker));
    const std::string name = swarm_.workers().at(id).hello.name;
    const std::string answer = to_text({{"worker", name}, {"id", id}});
    if (!swarm_.set_drained(id, drained, steady_now())) {
        if (drained) { return answer; }  // whoever asks again wants to know when it is empty
        return fail(ErrorKind::invalid, "worker {} is not drained", name);
    }
    log_info("worker {} {}", name, drained ? "gives its slices to others" : "gets slices again");
    note_event(id, drained ? "is being drained" : "gets slices again");
    return answer;
}

}  // namespace linkcpp::hub
