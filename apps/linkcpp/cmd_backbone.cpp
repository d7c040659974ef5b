#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "base/units.h"
#include "commands.h"
#include "model/slicer.h"

namespace linkcpp::cli {
namespace {

struct BackboneArguments {
    std::string model;
    std::string out;
};

Status backbone(const BackboneArguments& options) {
    LINKCPP_TRY(const auto file, model::GgufFile::open(options.model));
    LINKCPP_TRY(const model::BackboneSize size, model::write_backbone(file, options.out));
    fmt::print("{}: {} on disk ({} with the holes where the experts were)\n", options.out, format_bytes(size.bytes),
               format_bytes(size.apparent_bytes));
    return {};
}

}  // namespace

void add_backbone(CLI::App& app) {
    auto options = std::make_shared<BackboneArguments>();
    CLI::App* command =
        app.add_subcommand("backbone", "Writes the model that llama-server loads: all but the routed experts");
    command->add_option("MODEL", options->model, "A GGUF model, or any one of its splits")->required();
    command->add_option("-o,--out", options->out, "The GGUF to write, one sparse file")->required();
    command->footer(
        "Copies of the file stay small with cp --sparse=always or rsync --sparse.\n"
        "Example: linkcpp backbone model.gguf -o backbone.gguf");
    run_or_exit(command, [options] { return backbone(*options); });
}

}  // namespace linkcpp::cli
