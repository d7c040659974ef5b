#include "net/join_line.h"

#include <algorithm>

namespace linkcpp::net {
namespace {

constexpr std::string_view kScheme = "linkcpp://";
constexpr std::size_t kMaxToken = 128;

bool is_token_character(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_';
}

}  // namespace

std::string JoinLine::text() const {
    return fmt::format("{}{}/{}/{}", kScheme, hub.text(), fingerprint.hex(), token);
}

std::string JoinLine::redacted() const {
    return fmt::format("{}{}/{}/…", kScheme, hub.text(), fingerprint.hex().substr(0, 12));
}

Result<JoinLine> parse_join_line(std::string_view text) {
    const auto bad = [](std::string_view why) {
        return fail(ErrorKind::invalid,
                    "join line: {}; expected linkcpp://HOST:PORT/FINGERPRINT/TOKEN as `linkcpp serve` prints it", why);
    };
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r' || text.back() == ' ')) { text.remove_suffix(1); }
    if (!text.starts_with(kScheme)) { return bad("it does not start with linkcpp://"); }
    text.remove_prefix(kScheme.size());
    const std::size_t first = text.find('/');
    const std::size_t second = first == std::string_view::npos ? first : text.find('/', first + 1);
    if (second == std::string_view::npos) { return bad("a part is missing"); }
    auto hub = parse_address(text.substr(0, first));
    if (!hub) { return bad(hub.error().message); }
    if (hub->port == 0) { return bad("the port is missing"); }
    const auto fingerprint = Digest::from_hex(text.substr(first + 1, second - first - 1));
    if (!fingerprint) { return bad("the fingerprint does not have 64 hexadecimal digits"); }
    const std::string_view token = text.substr(second + 1);
    if (token.empty() || token.size() > kMaxToken || !std::ranges::all_of(token, is_token_character)) {
        return bad("the token is empty or has characters that no token has");
    }
    return JoinLine{*std::move(hub), *fingerprint, std::string(token)};
}

}  // namespace linkcpp::net
