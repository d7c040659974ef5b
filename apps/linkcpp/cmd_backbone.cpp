#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "base/units.h"
#include "commands.h"
#include "hub_file.h"
#include "model/slicer.h"
#include "print_json.h"
#include "store/fetch_backbone.h"

namespace linkcpp::cli {
namespace {

struct BackboneArguments {
    std::string model;
    std::string hub;
    std::string out;
    bool json = false;
};

Result<model::BackboneSize> cut(const std::string& model, const std::string& out) {
    LINKCPP_TRY(const auto file, model::GgufFile::open(model));
    return model::write_backbone(file, out);
}

Result<model::BackboneSize> fetch(const std::string& line, const std::string& out) {
    LINKCPP_CHECK(hide_join_line(line));
    LINKCPP_TRY(const net::JoinLine hub, find_hub(line));
    // It hashes gigabytes before it answers for the first time.
    store::HttpsClient client({hub.hub.host, hub.https_port}, hub.fingerprint, hub.token,
                              {.connect = std::chrono::seconds(10), .stall = std::chrono::minutes(5)});
    return store::fetch_backbone(client, out);
}

Status backbone(const BackboneArguments& options) {
    LINKCPP_TRY(const model::BackboneSize size,
                options.model.empty() ? fetch(options.hub, options.out) : cut(options.model, options.out));
    if (options.json) {
        print_json(
            nlohmann::json{{"path", options.out}, {"bytes", size.bytes}, {"apparent_bytes", size.apparent_bytes}});
    } else {
        fmt::print("{}: {} on disk ({} with the holes where the experts were)\n", options.out, format_bytes(size.bytes),
                   format_bytes(size.apparent_bytes));
    }
    return {};
}

}  // namespace

void add_backbone(CLI::App& app) {
    auto options = std::make_shared<BackboneArguments>();
    CLI::App* command =
        app.add_subcommand("backbone", "Writes the model that llama-server loads: all but the routed experts");
    auto* model = command->add_option("MODEL", options->model,
                                      "A GGUF model, or any one of its splits; without it a hub's is fetched");
    command
        ->add_option("--hub", options->hub,
                     "The hub's join line, or @FILE (default: $LINKCPP_HUB, or the hub on this machine)")
        ->excludes(model);
    command->add_option("-o,--out", options->out, "The GGUF to write, one sparse file")->required();
    command->add_flag("--json", options->json, "Machine-readable");
    command->footer(
        "Copies of the file stay small with cp --sparse=always or rsync --sparse. A fetch that is broken off goes on\n"
        "where it was.\n"
        "Example: linkcpp backbone model.gguf -o backbone.gguf\n"
        "Example: linkcpp backbone --hub 'linkcpp://192.168.1.5:7070/FINGERPRINT/TOKEN' -o backbone.gguf");
    run_or_exit(command, [options] { return backbone(*options); });
}

}  // namespace linkcpp::cli
