#include <algorithm>
#include <cctype>
#include <memory>
#include <optional>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "base/units.h"
#include "commands.h"
#include "model/gguf_file.h"
#include "model/synth.h"

namespace linkcpp::cli {
namespace {

using model::SynthOptions;

struct SynthArguments {
    std::string out;
    std::string preset;
    std::optional<std::string> architecture;
    std::optional<std::uint32_t> n_layer, n_expert, n_expert_used, n_embd, n_ff;
    std::optional<std::uint64_t> seed;
    std::string types;
    bool header_only = false;
    bool sparse = false;
    bool experts_only = false;
};

std::string lower(std::string_view text) {
    std::string result(text);
    std::ranges::transform(result, result.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return result;
}

Result<ggml_type> parse_type(const std::string& name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const auto type = static_cast<ggml_type>(i);
        if (ggml_blck_size(type) > 0 && lower(ggml_type_name(type)) == lower(name)) { return type; }
    }
    return fail(ErrorKind::invalid, "--types: expected names of ggml's types (q4_K, q6_K, q8_0, f16), got '{}'", name);
}

// One type for all projections, or three for gate, up and down.
Status set_types(const std::string& text, SynthOptions& synth) {
    const std::vector<std::string> names = CLI::detail::split(text, ',');
    if (names.size() != 1 && names.size() != 3) {
        return fail(ErrorKind::invalid, "--types: expected one type, or three (gate,up,down), got {}", names.size());
    }
    LINKCPP_TRY(synth.gate_type, parse_type(names.front()));
    LINKCPP_TRY(synth.up_type, parse_type(names[names.size() / 2]));
    LINKCPP_TRY(synth.down_type, parse_type(names.back()));
    synth.down_more_bits_type.reset();
    return {};
}

Result<SynthOptions> to_synth(const SynthArguments& options) {
    SynthOptions synth;
    if (!options.preset.empty()) { LINKCPP_TRY(synth, model::synth_preset(options.preset)); }
    synth.architecture = options.architecture.value_or(synth.architecture);
    synth.n_layer = options.n_layer.value_or(synth.n_layer);
    synth.n_expert = options.n_expert.value_or(synth.n_expert);
    synth.n_expert_used = options.n_expert_used.value_or(synth.n_expert_used);
    synth.n_embd = options.n_embd.value_or(synth.n_embd);
    synth.n_ff = options.n_ff.value_or(synth.n_ff);
    synth.seed = options.seed.value_or(synth.seed);
    synth.header_only |= options.header_only;
    synth.sparse |= options.sparse;
    synth.experts_only |= options.experts_only;
    if (!options.types.empty()) { LINKCPP_CHECK(set_types(options.types, synth)); }
    return synth;
}

Status synth(const SynthArguments& options) {
    LINKCPP_TRY(const SynthOptions synth, to_synth(options));
    LINKCPP_CHECK(model::write_synthetic_model(synth, options.out));
    LINKCPP_TRY(const auto file, model::GgufFile::open(options.out));
    fmt::print("{}: {}{}\n", options.out, format_bytes(file.file_bytes()),
               synth.header_only ? ", all of it holes but the header" : "");
    return {};
}

}  // namespace

void add_synth(CLI::App& app) {
    auto options = std::make_shared<SynthArguments>();
    CLI::App* command = app.add_subcommand("synth", "Makes a model of random weights, of any shape and quantisation");
    command->add_option("OUT", options->out, "The GGUF to write")->required();
    command->add_option("--preset", options->preset,
                        "bench, qwen3.5-122b-a10b or qwen3.5-122b-a10b-layer; options below change it");
    command->add_option("--arch", options->architecture, "qwen3moe (default), qwen35moe or olmoe");
    command->add_option("--layers", options->n_layer, "Layers");
    command->add_option("--experts", options->n_expert, "Experts of a layer");
    command->add_option("--used", options->n_expert_used, "Experts used for each token");
    command->add_option("--embd", options->n_embd, "n_embd");
    command->add_option("--ff", options->n_ff, "n_ff of one expert");
    command->add_option("--types", options->types, "Type of the experts, or of gate,up,down (default: q4_K)");
    command->add_option("--seed", options->seed, "Another number, other weights");
    auto* header_only = command->add_flag("--header-only", options->header_only,
                                          "Leave the weights out: a sparse file of full apparent size");
    command
        ->add_flag("--sparse", options->sparse,
                   "Leave most of the weights out, so that a large model fits a small disk: of each expert there is a "
                   "page, and the routers choose")
        ->excludes(header_only);
    command->add_flag("--experts-only", options->experts_only,
                      "Only the routed experts' tensors, which llama.cpp cannot run");
    command->footer(
        "llama.cpp runs the result; the text it writes means nothing.\n"
        "Example: linkcpp synth bench.gguf --preset bench --types q8_0");
    run_or_exit(command, [options] { return synth(*options); });
}

}  // namespace linkcpp::cli
