#include <memory>

#include <nlohmann/json.hpp>

#include "base/text.h"
#include "commands.h"
#include "hub_file.h"
#include "store/https_client.h"

namespace linkcpp::cli {
namespace {

struct ClearArguments {
    std::string worker;
    std::string hub;
    bool json = false;
};

Status clear(const ClearArguments& options) {
    LINKCPP_CHECK(hide_join_line(options.hub));
    LINKCPP_TRY(const net::JoinLine hub, find_hub(options.hub));
    LINKCPP_TRY(const std::string token, find_operator_token(hub));
    store::HttpsClient client({hub.hub.host, hub.https_port}, hub.fingerprint, token);
    LINKCPP_TRY(const std::string name, client.remove("/quarantine", {{"worker", options.worker}}));
    if (options.json) {
        fmt::print("{}\n",
                   nlohmann::json{{"cleared", name}}.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
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
    command
        ->add_option("WORKER", options->worker,
                     "Its name, its id, or at least six digits of its beginning (`linkcpp status`)")
        ->required();
    command->add_option("--hub", options->hub,
                        "The hub's join line, or @FILE (default: $LINKCPP_HUB, or the hub on this machine)");
    command->add_flag("--json", options->json, "Machine-readable");
    command->footer(
        "Runs where the hub does, as the same user: a join line does not allow it.\n"
        "Example: linkcpp clear laptop");
    run_or_exit(command, [options] { return clear(*options); });
}

}  // namespace linkcpp::cli
