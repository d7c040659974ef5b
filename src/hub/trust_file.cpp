#include "hub/trust_file.h"

#include <nlohmann/json.hpp>

#include "base/file.h"

namespace linkcpp::hub {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxBytes = 16u << 20;

}  // namespace

Result<std::map<std::string, TrustRecord>> read_trust(const std::filesystem::path& path) {
    const auto text = read_file(path, kMaxBytes);
    if (!text) {
        if (text.error().kind == ErrorKind::not_found) { return {}; }
        return std::unexpected(text.error());
    }
    std::map<std::string, TrustRecord> records;
    const auto damaged = [&] {
        return fail(ErrorKind::corrupt, "{}: it does not say who is in quarantine; mend it, or remove it to trust all",
                    path.string());
    };
    const json list = json::parse(*text, nullptr, false);
    if (!list.is_array()) { return damaged(); }
    try {
        for (const json& entry : list) {
            TrustRecord& record = records[entry.at("worker").get<std::string>()];
            record.trust = entry.at("quarantined").get<bool>() ? Trust::quarantined : Trust::unproven;
            record.name = entry.at("name").get<std::string>();
            record.why = entry.at("why").get<std::string>();
            record.since = entry.at("since").get<std::int64_t>();
            record.served_since = entry.at("served_since").get<std::int64_t>();
            record.in_doubt_since = entry.at("in_doubt_since").get<std::int64_t>();
        }
    } catch (const json::exception&) { return damaged(); }
    return records;
}

Status write_trust(const std::map<std::string, TrustRecord>& records, const std::filesystem::path& path) {
    json list = json::array();
    for (const auto& [id, record] : records) {
        const bool quarantined = record.trust == Trust::quarantined;
        if (!quarantined && record.served_since == 0) { continue; }
        list.push_back({{"worker", id},
                        {"name", record.name},
                        {"quarantined", quarantined},
                        {"why", record.why},
                        {"since", record.since},
                        {"served_since", record.served_since},
                        {"in_doubt_since", record.in_doubt_since}});
    }
    return write_file_atomically(path, list.dump(2, ' ', false, json::error_handler_t::replace) + "\n", 0600);
}

}  // namespace linkcpp::hub
