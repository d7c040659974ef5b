#include "base/bytes.h"

#include <openssl/crypto.h>

namespace linkcpp {
namespace {

int hex_value(char c) {
    if (c >= '0' && c <= '9') { return c - '0'; }
    if (c >= 'a' && c <= 'f') { return c - 'a' + 10; }
    if (c >= 'A' && c <= 'F') { return c - 'A' + 10; }
    return -1;
}

}  // namespace

std::string to_hex(ByteView bytes) {
    static constexpr std::string_view kDigits = "0123456789abcdef";
    std::string text;
    text.reserve(bytes.size() * 2);
    for (std::byte b : bytes) {
        text += kDigits[std::to_integer<std::size_t>(b) >> 4];
        text += kDigits[std::to_integer<std::size_t>(b) & 15];
    }
    return text;
}

std::optional<Bytes> from_hex(std::string_view text) {
    if (text.size() % 2 != 0) { return std::nullopt; }
    Bytes bytes;
    bytes.reserve(text.size() / 2);
    for (std::size_t i = 0; i < text.size(); i += 2) {
        const int high = hex_value(text[i]);
        const int low = hex_value(text[i + 1]);
        if (high < 0 || low < 0) { return std::nullopt; }
        bytes.push_back(static_cast<std::byte>(high * 16 + low));
    }
    return bytes;
}

bool equal_in_constant_time(ByteView a, ByteView b) {
    return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace linkcpp
