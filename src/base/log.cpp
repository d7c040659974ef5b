#include "base/log.h"

#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include "base/text.h"

namespace linkcpp {
namespace {

std::shared_ptr<spdlog::logger> make_logger(std::string name) {
    auto logger =
        std::make_shared<spdlog::logger>(std::move(name), std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    logger->set_pattern("%H:%M:%S.%e %^%l%$ %n: %v");
    const char* level = std::getenv("LINKCPP_LOG");
    const auto wanted = level != nullptr ? spdlog::level::from_str(level) : spdlog::level::info;
    // spdlog takes every word that it does not know for "off".
    const bool unknown = wanted == spdlog::level::off && std::string_view(level) != "off";
    logger->set_level(unknown ? spdlog::level::info : wanted);
    if (unknown) {
        logger->warn("LINKCPP_LOG: expected debug, info, warn, error or off, got '{}'; info is used", one_line(level));
    }
    return logger;
}

// spdlog's own registry would be shared with a host program that uses spdlog too; this one is ours alone.
std::shared_ptr<spdlog::logger>& logger() {
    // Never destroyed: other threads may log while static objects are.
    static auto& instance = *new std::shared_ptr<spdlog::logger>(make_logger("linkcpp"));
    return instance;
}

spdlog::level::level_enum to_spdlog(LogLevel level) {
    switch (level) {
        case LogLevel::debug: return spdlog::level::debug;
        case LogLevel::info: return spdlog::level::info;
        case LogLevel::warn: return spdlog::level::warn;
        case LogLevel::error: return spdlog::level::err;
    }
    return spdlog::level::err;
}

}  // namespace

void set_log_name(std::string_view name) {
    logger() = make_logger(std::string(name));
}

void log_line(LogLevel level, std::string_view text) {
    logger()->log(to_spdlog(level), one_line(text));
}

}  // namespace linkcpp
