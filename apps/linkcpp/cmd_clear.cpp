#include <memory>

#include <nlohmann/json.hpp>

#include "base/text.h"
#include "commands.h"
#include "hub_operator.h"
#include "print_json.h"

namespace linkcpp::cli {
namespace {

struct ClearArguments {
    std::string worker;
    std::string hub;
    bool json = false;
};

Status clear(const ClearArguments& options) {
    LINKCPP_TRY(const HubOperator who, find_operator(options.hub));
    LINKCPP_TRY(const std::string name, who.client->remove("/quarantine", {{"worker", options.worker}}));
    if (options.json) {
        print_json(nlohmann::json{{"cleared", name}});
    } else {
        fmt::print("{} is out of quarantine; it is probed before it serves again\n", one_line(name));
    }
    return {};
}

}  // namespace

void add_clear(CLI::App& app) {
    auto options = std::make_shared<ClearArguments>();
    CLI::App* command =
        app.add_subcommand("clear", "Takes a worker out of quarantine: it is probed, and serves again if it passes");
    add_worker_argument(command, options->worker);
    add_operator_options(command, options->hub, options->json);
    command->footer(
        "Runs where the hub does, as the same user: a join line does not allow it.\n"
        "Example: linkcpp clear laptop");
    run_or_exit(command, [options] { return clear(*options); });
}

}  // namespace linkcpp::cli
