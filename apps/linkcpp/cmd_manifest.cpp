#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/units.h"
#include "commands.h"
#include "model/manifest.h"

namespace linkcpp::cli {
namespace {

struct ManifestArguments {
    std::string model;
    std::string out;
    bool json = false;
};

Status manifest(const ManifestArguments& options) {
    LINKCPP_TRY(const auto file, model::GgufFile::open(options.model));
    LINKCPP_TRY(const model::Manifest manifest, model::load_or_make_manifest(file));
    if (!options.out.empty()) { LINKCPP_CHECK(write_file_atomically(options.out, manifest.to_json())); }
    const model::MoeModel& moe = manifest.model;
    if (options.json) {
        const nlohmann::json report = {
            {"id", manifest.id().hex()}, {"n_slices", moe.n_slices()}, {"expert_bytes", moe.expert_bytes()}};
        fmt::print("{}\n", report.dump(2));
    } else {
        fmt::print("{}\n  {} slices, {}\n", manifest.id().hex(), moe.n_slices(), format_bytes(moe.expert_bytes()));
    }
    return {};
}

}  // namespace

void add_manifest(CLI::App& app) {
    auto options = std::make_shared<ManifestArguments>();
    CLI::App* command = app.add_subcommand("manifest", "Hashes a model's experts and prints the model's id");
    command->add_option("MODEL", options->model, "A GGUF model, or any one of its splits")->required();
    command->add_option("-o,--out", options->out, "Also write the manifest to this file");
    command->add_flag("--json", options->json, "Machine-readable");
    command->footer(
        "The result is kept in the cache folder until the file changes.\nExample: linkcpp manifest model.gguf");
    run_or_exit(command, [options] { return manifest(*options); });
}

}  // namespace linkcpp::cli
