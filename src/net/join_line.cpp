#include "net/join_line.h"

#include <algorithm>

namespace linkcpp::net {
namespace {

constexpr std::string_view kScheme = "linkcpp://";
constexpr std::string_view kHttps = "?https=";
constexpr std::size_t kMaxToken = 128;

bool is_token_character(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_';
}

}  // namespace

std::string JoinLine::text() const {
    const std::string https = https_port == hub.port + 1 ? "" : fmt::format("{}{}", kHttps, https_port);
    return fmt::format("{}{}/{}/{}{}", kScheme, hub.text(), fingerprint.hex(), token, https);
}

std::string JoinLine::redacted() const {
    return fmt::format("{}{}/{}/…", kScheme, hub.text(), fingerprint.hex().substr(0, 12));
}

bool is_token(std::string_view text) {
    return !text.empty() && text.size() <= kMaxToken && std::ranges::all_of(text, is_token_character);
}

Result<JoinLine> parse_join_line(std::string_view text) {
    const auto bad = [](std::string_view why) {
        return fail(ErrorKind::invalid,
                    "join line: {}; expected linkcpp://HOST:PORT/FINGERPRINT/TOKEN as `linkcpp serve` prints it", why);
    };
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r' || text.back() == ' ')) {
        text.remove_suffix(1);
    }
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
    std::string_view token = text.substr(second + 1);
    auto https_port = static_cast<std::uint16_t>(hub->port + 1);
    if (const std::size_t https = token.find(kHttps); https != std::string_view::npos) {
        const auto address = parse_address(fmt::format("x:{}", token.substr(https + kHttps.size())));
        if (!address || address->port == 0) { return bad("the HTTPS port is not a number"); }
        https_port = address->port;
        token = token.substr(0, https);
    }
    if (!is_token(token)) { return bad("the token is empty or has characters that no token has"); }
    return JoinLine{*std::move(hub), *fingerprint, std::string(token), https_port};
}

}  // namespace linkcpp::net
