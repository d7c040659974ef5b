#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "base/text.h"
#include "base/units.h"
#include "commands.h"
#include "model/slicer.h"

namespace linkcpp::cli {
namespace {

struct SliceArguments {
    std::string model;
    std::uint32_t layer = 0;
    std::string experts;
    std::string out;
};

Status slice(const SliceArguments& options) {
    LINKCPP_TRY(const auto experts, parse_ranges(options.experts));
    LINKCPP_TRY(const auto file, model::GgufFile::open(options.model));
    LINKCPP_CHECK(model::write_slices(file, options.layer, experts, options.out));
    LINKCPP_TRY(const auto part, model::open_slices(options.out));
    fmt::print("{}: {} of layer {}, {}\n", options.out, counted(experts.size(), "expert"),
               model::layer_name(options.layer), format_bytes(part.file.file_bytes()));
    return {};
}

}  // namespace

void add_slice(CLI::App& app) {
    auto options = std::make_shared<SliceArguments>();
    CLI::App* command = app.add_subcommand("slice", "Cuts some experts of one layer out of a model, byte for byte");
    command->add_option("MODEL", options->model, "A GGUF model, or any one of its splits")->required();
    command
        ->add_option(
            "--layer", options->layer,
            fmt::format("The layer, counted from 0; a block's second set of experts: {} higher", model::kSecondSet))
        ->required();
    command->add_option("--experts", options->experts, "The experts: 0-63 or 0-3,8")->required();
    command->add_option("-o,--out", options->out, "The GGUF to write")->required();
    command->footer("Example: linkcpp slice model.gguf --layer 0 --experts 0-63 -o part.gguf");
    run_or_exit(command, [options] { return slice(*options); });
}

}  // namespace linkcpp::cli
