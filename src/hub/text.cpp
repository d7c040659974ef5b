#include "hub/text.h"

#include <array>
#include <ctime>

namespace linkcpp::hub {

std::string time_text(std::int64_t seconds) {
    const auto time = static_cast<std::time_t>(seconds);
    std::tm parts{};
    ::gmtime_r(&time, &parts);
    std::array<char, 32> text{};
    std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
    return text.data();
}

nlohmann::json time_json(std::int64_t seconds) {
    return seconds == 0 ? nlohmann::json(nullptr) : nlohmann::json(time_text(seconds));
}

std::string to_text(const nlohmann::json& value) {
    return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace linkcpp::hub
