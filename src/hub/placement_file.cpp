#include "hub/placement_file.h"

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/text.h"
#include "base/units.h"
#include "hub/text.h"

namespace linkcpp::hub {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxBytes = 64u << 20;

// {"0": "0-31,40", …}: layer number → experts
json to_json(const model::MoeModel& model, const plan::Holdings& holdings) {
    json slices = json::object();
    for (std::size_t i = 0; i < holdings.size(); ++i) {
        std::vector<std::uint32_t> experts;
        for (std::uint32_t e = 0; e < holdings[i].size(); ++e) {
            if (holdings[i][e]) { experts.push_back(e); }
        }
        if (experts.empty()) { continue; }
        std::string text = ranges(experts);
        std::erase(text, ' ');
        slices[std::to_string(model.layers[i].layer)] = std::move(text);
    }
    return slices;
}

Result<plan::Holdings> from_json(const model::MoeModel& model, const json& slices) {
    plan::Holdings holdings = plan::nothing(model);
    for (std::size_t i = 0; i < holdings.size(); ++i) {
        const auto entry = slices.find(std::to_string(model.layers[i].layer));
        if (entry == slices.end()) { continue; }
        LINKCPP_TRY(const auto experts, parse_ranges(entry->get<std::string>()));
        for (const std::uint32_t expert : experts) {
            if (expert >= holdings[i].size()) { return fail(ErrorKind::corrupt, "expert {}", expert); }
            holdings[i][expert] = true;
        }
    }
    return holdings;
}

}  // namespace

std::filesystem::path placement_path(const std::filesystem::path& dir, const Digest& model_id, std::uint16_t port) {
    return dir / fmt::format("placement-{}-{}.json", model_id.hex().substr(0, 12), port);
}

Result<std::vector<RememberedWorker>> read_placement(const std::filesystem::path& path, const model::MoeModel& model,
                                                     const Digest& model_id) {
    std::vector<RememberedWorker> workers;
    const auto text = read_file(path, kMaxBytes);
    if (!text) {
        if (text.error().kind == ErrorKind::not_found) { return workers; }
        return std::unexpected(text.error());
    }
    const auto damaged = [&] { return fail(ErrorKind::corrupt, "{}: damaged", path.string()); };
    const json file = json::parse(*text, nullptr, false);
    try {
        if (file.at("model").get<std::string>() != model_id.hex()) { return workers; }
        for (const json& entry : file.at("workers")) {
            auto share = from_json(model, entry.at("slices"));
            if (!share) { return damaged(); }
            workers.push_back({entry.at("worker").get<std::string>(),
                               one_line(entry.at("name").get<std::string>().substr(0, kMaxForeignText)),
                               entry.at("memory_bytes").get<std::uint64_t>(), entry.at("drained").get<bool>(),
                               *std::move(share)});
        }
    } catch (const json::exception&) { return damaged(); }
    return workers;
}

Status write_placement(const std::map<std::string, WorkerRecord>& workers, const std::filesystem::path& path,
                       const model::MoeModel& model, const Digest& model_id) {
    json list = json::array();
    for (const auto& [id, worker] : workers) {
        if (plan::count(worker.share) == 0 && !worker.drained) { continue; }
        list.push_back({{"worker", id},
                        {"name", worker.hello.name},
                        {"memory_bytes", worker.hello.memory_bytes},
                        {"drained", worker.drained},
                        {"slices", to_json(model, worker.share)}});
    }
    const json file{{"model", model_id.hex()}, {"workers", list}};
    return write_file_atomically(path, file.dump(1, ' ', false, json::error_handler_t::replace) + "\n", 0600);
}

}  // namespace linkcpp::hub
