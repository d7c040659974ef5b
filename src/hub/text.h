// How the hub writes times, and what it keeps of foreign text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "wire/control.h"

namespace linkcpp::hub {

// Of a text that a peer has sent, what people are shown.
inline constexpr std::size_t kMaxForeignText = 120;

// Seconds since 1970 as "2026-11-30T10:24:21Z".
std::string time_text(std::int64_t seconds);
// The same; null for 0, which is never.
nlohmann::json time_json(std::int64_t seconds);

// Figures are kept as long as their peer is there: only so much of their lists and texts, as none has more to say.
wire::fb::StatsT cut(wire::fb::StatsT stats);

// On one line; what is no UTF-8 is replaced.
std::string to_text(const nlohmann::json& value);

}  // namespace linkcpp::hub
