// Numbers as people write them. `64G` and `64GiB` are 2^30 bytes each, `64GB` is 10^9.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/error.h"

namespace linkcpp {

// All of `text` as a number: no space, and nothing behind it.
template <class Number>
std::optional<Number> parse_number(std::string_view text) {
    Number number{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{} || end != text.data() + text.size()) { return std::nullopt; }
    return number;
}

// "4G", "512MiB", "1.5GB", "4096"; a number alone is bytes. Errors: invalid.
Result<std::uint64_t> parse_bytes(std::string_view text);

// "0.001", "1/1000", "0.1%": from 0 to 1. Errors: invalid.
Result<double> parse_share(std::string_view text);

// "90s", "30m", "24h", "7d" as seconds; a number alone is seconds. Errors: invalid.
Result<std::uint64_t> parse_seconds(std::string_view text);

// "1.57 GiB": three significant digits, binary units.
std::string format_bytes(std::uint64_t bytes);

// "0-63", "3", "0-3,8,10-11" as a sorted list without duplicates. Errors: invalid (also a range of over 65,536).
Result<std::vector<std::uint32_t>> parse_ranges(std::string_view text);

}  // namespace linkcpp
