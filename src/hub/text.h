// How the hub writes times and foreign text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

namespace linkcpp::hub {

// Of a text that a peer has sent, what people are shown.
inline constexpr std::size_t kMaxForeignText = 120;

// Seconds since 1970 as "2026-11-30T10:24:21Z".
std::string time_text(std::int64_t seconds);
// The same; null for 0, which is never.
nlohmann::json time_json(std::int64_t seconds);

// On one line; what is no UTF-8 is replaced.
std::string to_text(const nlohmann::json& value);

}  // namespace linkcpp::hub
