// Bytes: hexadecimal text, and little-endian numbers at unaligned places.
#pragma once

#include <bit>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace linkcpp {

static_assert(std::endian::native == std::endian::little, "GGUF files and frames are read in place");

using Bytes = std::vector<std::byte>;
using ByteView = std::span<const std::byte>;

template <class T>
    requires std::is_arithmetic_v<T>
T load_le(const std::byte* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T>
    requires std::is_arithmetic_v<T>
void store_le(std::byte* to, T value) {
    std::memcpy(to, &value, sizeof value);
}

inline ByteView as_bytes(std::string_view text) {
    return std::as_bytes(std::span(text.data(), text.size()));
}

inline std::string_view as_text(ByteView bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Lower-case hexadecimal.
std::string to_hex(ByteView bytes);

// Nothing when the text has an odd length or another character than 0-9, a-f, A-F.
std::optional<Bytes> from_hex(std::string_view text);

// Compares in a time that depends on the lengths alone: for tokens and other secrets.
bool equal_in_constant_time(ByteView a, ByteView b);

}  // namespace linkcpp
