// Text for people.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace linkcpp {

// The text with nothing in it that starts a line, moves a terminal's cursor or turns the direction of writing: names
// from files and peers may hold anything.
inline std::string one_line(std::string_view text) {
    std::string line(text);
    for (char& c : line) {
        if (static_cast<unsigned char>(c) < ' ' || c == 0x7f) { c = '?'; }
    }
    // U+200E, U+200F, U+202A to U+202E, U+2066 to U+2069; U+061C
    const auto turns = [&](std::size_t at) {
        const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(line[at + i]); };
        if (at + 1 < line.size() && byte(0) == 0xd8 && byte(1) == 0x9c) { return 2; }
        if (at + 2 >= line.size() || byte(0) != 0xe2) { return 0; }
        const bool turning = (byte(1) == 0x80 && (byte(2) == 0x8e || byte(2) == 0x8f)) ||
                             (byte(1) == 0x80 && byte(2) >= 0xaa && byte(2) <= 0xae) ||
                             (byte(1) == 0x81 && byte(2) >= 0xa6 && byte(2) <= 0xa9);
        return turning ? 3 : 0;
    };
    for (std::size_t at = 0; at < line.size(); ++at) {
        if (const int n = turns(at); n > 0) { line.replace(at, static_cast<std::size_t>(n), "?"); }
    }
    return line;
}

// "1 layer", "2 layers"
inline std::string counted(std::uint64_t n, std::string_view one) {
    return std::to_string(n) + " " + std::string(one) + (n == 1 ? "" : "s");
}

// Ascending numbers: "0-47", "1, 3, 8-12"
inline std::string ranges(std::span<const std::uint32_t> numbers) {
    std::string text;
    for (std::size_t i = 0; i < numbers.size();) {
        std::size_t last = i;
        while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) { ++last; }
        text += (text.empty() ? "" : ", ") + std::to_string(numbers[i]);
        if (last > i) { text += "-" + std::to_string(numbers[last]); }
        i = last + 1;
    }
    return text;
}

}  // namespace linkcpp
