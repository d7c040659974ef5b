// Text for people.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace linkcpp {

// The text with nothing in it that starts a line or moves a terminal's cursor: names from files and peers may hold
// anything.
inline std::string one_line(std::string_view text) {
    std::string line(text);
    for (char& c : line) {
        if (static_cast<unsigned char>(c) < ' ' || c == 0x7f) { c = '?'; }
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
