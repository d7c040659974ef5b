#include "hub/text.h"

#include <array>
#include <ctime>
#include <vector>

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

wire::fb::StatsT cut(wire::fb::StatsT stats) {
    constexpr std::size_t kId = 64;
    constexpr std::size_t kWorkers = 4096;
    constexpr std::size_t kLayers = 1024;
    constexpr std::size_t kNodes = 512;
    constexpr std::size_t kNames = 32;
    const auto cut_list = [](auto& entries, std::size_t n, auto text, std::size_t n_bytes) {
        std::erase(entries, nullptr);
        if (entries.size() > n) { entries.resize(n); }
        for (auto& entry : entries) {
            std::string& cut = (*entry).*text;
            cut = cut.substr(0, n_bytes);
        }
        entries.shrink_to_fit();
    };
    cut_list(stats.unknown, kLayers, &wire::fb::UnknownLayerT::nodes, kNodes);
    cut_list(stats.audits, kWorkers, &wire::fb::AuditsT::worker, kId);
    cut_list(stats.links, kWorkers, &wire::fb::LinkStateT::worker, kId);
    cut_list(stats.turned_away, kNames, &wire::fb::TurnedAwayT::name, kMaxForeignText);
    return stats;
}

std::string to_text(const nlohmann::json& value) {
    return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace linkcpp::hub
