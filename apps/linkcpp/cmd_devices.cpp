#include <memory>

#include <nlohmann/json.hpp>

#include "base/units.h"
#include "commands.h"
#include "expert/device.h"

namespace linkcpp::cli {
namespace {

Status list_devices(bool json) {
    expert::load_backends();
    const std::vector<expert::Device> devices = expert::devices();
    const auto chosen = expert::choose_device(devices);
    const auto is_chosen = [&](const expert::Device& device) { return chosen && chosen->handle == device.handle; };
    if (json) {
        nlohmann::json list = nlohmann::json::array();
        for (const expert::Device& device : devices) {
            list.push_back({{"name", device.name},
                            {"description", device.description},
                            {"backend", device.backend},
                            {"free_bytes", device.free_bytes},
                            {"total_bytes", device.total_bytes},
                            {"default", is_chosen(device)}});
        }
        fmt::print("{}\n", list.dump(2));
        return {};
    }
    fmt::print("{:<10} {:<8} {:>9} {:>9}  {}\n", "NAME", "BACKEND", "FREE", "TOTAL", "DESCRIPTION");
    for (const expert::Device& device : devices) {
        fmt::print("{:<10} {:<8} {:>9} {:>9}  {}{}\n", device.name, device.backend, format_bytes(device.free_bytes),
                   format_bytes(device.total_bytes), device.description, is_chosen(device) ? "  (default)" : "");
    }
    return {};
}

}  // namespace

void add_devices(CLI::App& app) {
    auto json = std::make_shared<bool>(false);
    CLI::App* command =
        app.add_subcommand("devices", "Lists the devices that a worker on this machine could compute on");
    command->add_flag("--json", *json, "Machine-readable");
    command->footer("Example: linkcpp devices");
    run_or_exit(command, [json] { return list_devices(*json); });
}

}  // namespace linkcpp::cli
