// Text for people.
#pragma once

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

}  // namespace linkcpp
