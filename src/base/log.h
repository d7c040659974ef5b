// One line a message on standard error: "HH:MM:SS.mmm level name: text". Never a secret.
//
// The level comes from LINKCPP_LOG (trace, debug, info, warn, error, off), "info" otherwise. Thread-safe.
#pragma once

#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace linkcpp {

enum class LogLevel { debug, info, warn, error };

// Who speaks: "linkcpp" until a program says otherwise ("worker alice"). Call before other threads start.
void set_log_name(std::string_view name);

void log_line(LogLevel level, std::string_view text);

template <class... Args>
void log_debug(fmt::format_string<Args...> format, Args&&... args) {
    log_line(LogLevel::debug, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
    log_line(LogLevel::info, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_warn(fmt::format_string<Args...> format, Args&&... args) {
    log_line(LogLevel::warn, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) {
    log_line(LogLevel::error, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace linkcpp
