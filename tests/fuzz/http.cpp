// What requests to the hub carry: names and numbers of the operator's commands, hashes of slices. Lines of the input
// are the values, in turn.
#include <cstdlib>

#include "base/sha256.h"
#include "base/text.h"
#include "hub/access.h"

using namespace linkcpp;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static constexpr std::int64_t kNow = 1'800'000'000;
    std::string_view rest(reinterpret_cast<const char*>(data), size);
    const auto next = [&] {
        const std::size_t end = std::min(rest.find('\n'), rest.size());
        std::string value(rest.substr(0, end));
        rest.remove_prefix(std::min(end + 1, rest.size()));
        return value;
    };
    hub::Access access;
    while (!rest.empty()) {
        const std::string command = next();
        const std::string value = next();
        if (command == "new") {
            if (const auto admits = hub::parse_admits(next())) {
                const std::int64_t seconds = std::strtoll(next().c_str(), nullptr, 10);
                (void)access.make(value, *admits, seconds, kNow);
            }
        } else if (command == "rotate") {
            (void)access.rotate(value, kNow);
        } else if (command == "revoke") {
            (void)access.revoke(value);
        } else if (command == "member") {
            (void)access.set_revoked(value, next() == "out");
        } else if (command == "admit") {
            const bool worker = next() == "worker";
            const auto role = worker ? wire::fb::Role::worker : wire::fb::Role::coordinator;
            if (access.admit(value, next(), role, next(), kNow) && access.members().empty()) { __builtin_trap(); }
        } else if (const auto hash = Digest::from_hex(value)) {
            if (Digest::from_hex(hash->hex()) != hash) { __builtin_trap(); }
        }
        if (one_line(value).find('\n') != std::string::npos) { __builtin_trap(); }
    }
    for (const hub::JoinToken& token : access.tokens()) { (void)access.members_of(token.name); }
    return 0;
}
