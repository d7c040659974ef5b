// linkcpp: one Mixture-of-Experts model, served by whatever hardware shows up.

#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "commands.h"

namespace linkcpp::cli {

void run_or_exit(CLI::App* command, std::function<Status()> work) {
    command->callback([work = std::move(work)] {
        if (const Status status = work(); !status) {
            fmt::print(stderr, "linkcpp: error: {}\n", status.error().message);
            throw CLI::RuntimeError(1);
        }
    });
}

namespace {

int run(int argc, char** argv) {
    CLI::App app(
        "Serves one Mixture-of-Experts model from many machines: llama.cpp runs unmodified, routed experts live on "
        "workers.",
        "linkcpp");
    app.set_version_flag("--version", LINKCPP_VERSION);
    app.require_subcommand(1);
    app.footer("Start with: linkcpp serve -m model.gguf --local-workers 2");
    add_serve(app);
    add_join(app);
    add_exec(app);
    add_status(app);
    add_devices(app);
    add_inspect(app);
    add_manifest(app);
    add_slice(app);
    add_backbone(app);
    add_synth(app);

    // Under the name linkcpp-expert-worker the program is `linkcpp join`.
    std::vector<std::string> arguments(argv + 1, argv + argc);
    if (argc > 0 && std::filesystem::path(argv[0]).filename() == "linkcpp-expert-worker") {
        arguments.insert(arguments.begin(), "join");
    }
    std::reverse(arguments.begin(), arguments.end());  // CLI11 wants the last one first
    try {
        app.parse(arguments);
    } catch (const CLI::ParseError& error) { return app.exit(error); }
    return 0;
}

}  // namespace
}  // namespace linkcpp::cli

int main(int argc, char** argv) {
    try {
        return linkcpp::cli::run(argc, argv);
    } catch (const std::exception& error) {
        fmt::print(stderr, "linkcpp: error: {}\n", error.what());
        return 1;
    }
}
