#include <algorithm>
#include <map>
#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "base/units.h"
#include "commands.h"
#include "model/architecture.h"
#include "model/moe.h"
#include "model/slicer.h"
#include "print_json.h"

namespace linkcpp::cli {
namespace {

using model::GgufFile;
using model::MoeLayer;
using model::MoeModel;
using Json = nlohmann::json;

struct InspectArguments {
    std::string model;
    bool json = false;
};

struct Facts {
    MoeModel moe;
    std::string content;  // what of the model is in the file
    std::uint64_t file_bytes = 0;
    std::uint64_t complete_bytes = 0;  // what the tensor tables ask for
    std::size_t n_files = 0;
    std::uint64_t backbone_bytes = 0;
    std::map<std::string, int> variants;  // of the expert block, and how many layers have it
    bool fuses = true;
    // Of each projection: how many layers have which type.
    std::map<model::Role, std::map<std::string, int>> types;
};

std::string content_of(const GgufFile& file) {
    if (file.flag(model::kHeaderOnlyKey).value_or(false)) { return "header only"; }
    if (file.flag(model::kBackboneKey).value_or(false)) { return "backbone"; }
    return "model";
}

Result<Facts> read_facts(const GgufFile& file) {
    Facts facts;
    LINKCPP_TRY(facts.moe, model::read_moe(file));
    facts.content = content_of(file);
    facts.file_bytes = file.file_bytes();
    facts.n_files = file.n_splits();
    for (std::size_t i = 0; i < file.n_splits(); ++i) { facts.backbone_bytes += file.data_offset(i); }
    facts.complete_bytes = facts.backbone_bytes;
    for (const model::TensorInfo& tensor : file.tensors()) {
        facts.complete_bytes += tensor.n_bytes;
        const auto expert = model::parse_expert_tensor_name(tensor.name);
        if (!expert || !model::is_weight(expert->role)) { facts.backbone_bytes += tensor.n_bytes; }
    }
    for (const MoeLayer& layer : facts.moe.layers) {
        ++facts.variants[model::variant_of(layer)];
        facts.fuses = facts.fuses && layer.activation.kind != model::Activation::unknown;
        for (const model::ExpertTensor& tensor : layer.tensors) {
            ++facts.types[tensor.role][ggml_type_name(tensor.type)];
        }
    }
    return facts;
}

bool is_cut_short(const Facts& facts) {
    return facts.file_bytes < facts.complete_bytes;
}

double expert_share(const Facts& facts) {
    const auto experts = static_cast<double>(facts.moe.expert_bytes());
    return experts / (experts + static_cast<double>(facts.backbone_bytes));
}

Json to_json(const Facts& facts) {
    Json types;
    for (const auto& [role, counts] : facts.types) { types[std::string(to_string(role))] = counts; }
    Json layers = Json::array();
    for (const MoeLayer& layer : facts.moe.layers) {
        layers.push_back({{"layer", layer.layer},
                          {"n_expert", layer.n_expert},
                          {"n_expert_used", layer.n_expert_used},
                          {"n_embd", layer.n_embd},
                          {"n_ff", layer.n_ff},
                          {"variant", model::variant_of(layer)},
                          {"slice_bytes", layer.slice_bytes()},
                          {"bytes", layer.n_expert * layer.slice_bytes()}});
    }
    return {{"architecture", facts.moe.architecture},
            {"name", facts.moe.name},
            {"content", facts.content},
            {"cut_short", is_cut_short(facts)},
            {"n_files", facts.n_files},
            {"file_bytes", facts.file_bytes},
            {"n_layer", facts.moe.n_layer},
            {"n_embd", facts.moe.n_embd},
            {"n_slices", facts.moe.n_slices()},
            {"expert_bytes", facts.moe.expert_bytes()},
            {"backbone_bytes", facts.backbone_bytes},
            {"expert_share", expert_share(facts)},
            {"fuses", facts.fuses},
            {"known_architecture", model::is_known_architecture(facts.moe.architecture)},
            {"variants", facts.variants},
            {"types", std::move(types)},
            {"layers", std::move(layers)}};
}

// "3" when all layers agree, "3 to 5" otherwise.
template <class Value>
std::string range_over(const MoeModel& moe, Value value, std::string (*format)(std::uint64_t)) {
    const auto [least, most] = std::ranges::minmax(moe.layers, {}, value);
    const std::string low = format(std::invoke(value, least));
    const std::string high = format(std::invoke(value, most));
    return low == high ? low : low + " to " + high;
}

std::string plain(std::uint64_t n) {
    return std::to_string(n);
}

// "gate q4_K, up q4_K, down q4_K (24 layers) and q6_K (24 layers)"
std::string type_text(const Facts& facts) {
    std::string text;
    for (const auto& [role, counts] : facts.types) {
        text += fmt::format("{}{}", text.empty() ? "" : ", ", to_string(role));
        std::string_view between = " ";
        for (const auto& [type, n] : counts) {
            text += between;
            text += counts.size() == 1 ? type : fmt::format("{} ({})", type, counted(n, "layer"));
            between = " and ";
        }
    }
    return text;
}

// "gate and up, swiglu", or each kind with its number of layers.
std::string variant_text(const Facts& facts) {
    std::string text;
    for (const auto& [variant, n] : facts.variants) {
        text += fmt::format("{}{}{}", text.empty() ? "" : "; ", variant,
                            facts.variants.size() == 1 ? "" : fmt::format(" ({})", counted(n, "layer")));
    }
    return text;
}

std::string fuse_text(const Facts& facts) {
    if (!facts.fuses) {
        return "no: its activation is not known, so products are computed one at a time (right, slow)";
    }
    if (model::is_known_architecture(facts.moe.architecture)) { return "yes: one round trip a layer"; }
    return "if its block is what most have: this release does not know its architecture; see linkcpp status while it "
           "runs";
}

void print(const Facts& facts) {
    const MoeModel& moe = facts.moe;
    const auto line = [](std::string_view what, const std::string& text) { fmt::print("  {:<14}{}\n", what, text); };
    const auto share = [&](std::uint64_t bytes, double part) {
        return fmt::format("{:<12}{:4.1f} %", format_bytes(bytes), 100 * part);
    };
    fmt::print("{}\n", moe.name.empty() ? "(a model without a name)" : moe.name);
    if (facts.content == "backbone") { line("content", "backbone: all but the routed experts, which are holes"); }
    if (facts.content == "header only") { line("content", "header only: no weights"); }
    if (is_cut_short(facts)) {
        line("content", fmt::format("cut short: {} bytes of {}", facts.file_bytes, facts.complete_bytes));
    }
    line("architecture", moe.architecture);
    line("file", fmt::format("{}{}", format_bytes(facts.file_bytes),
                             facts.n_files == 1 ? "" : fmt::format(" in {} splits", facts.n_files)));
    const auto n_second =
        std::ranges::count_if(moe.layers, [](const MoeLayer& layer) { return layer.layer >= model::kSecondSet; });
    line("layers", fmt::format("{}, {} of them with routed experts{}", moe.n_layer,
                               moe.layers.size() - static_cast<std::size_t>(n_second),
                               n_second > 0 ? fmt::format(", {} with a second set", n_second) : ""));
    line("experts", fmt::format("{} a layer, {} used for each token", range_over(moe, &MoeLayer::n_expert, plain),
                                range_over(moe, &MoeLayer::n_expert_used, plain)));
    line("shape", fmt::format("n_embd {}, n_ff {}", moe.n_embd, range_over(moe, &MoeLayer::n_ff, plain)));
    line("block", variant_text(facts));
    line("fuses", fuse_text(facts));
    line("types", type_text(facts));
    line("one slice", range_over(moe, &MoeLayer::slice_bytes, format_bytes));
    line("one layer",
         range_over(moe, [](const MoeLayer& layer) { return layer.n_expert * layer.slice_bytes(); }, format_bytes));
    line("all experts", share(moe.expert_bytes(), expert_share(facts)));
    line("backbone", share(facts.backbone_bytes, 1 - expert_share(facts)));
}

// A file that `linkcpp slice` wrote.
Status inspect_slices(const InspectArguments& options) {
    LINKCPP_TRY(const model::SliceFile part, model::open_slices(options.model));
    const MoeLayer& layer = part.layer;
    if (options.json) {
        const Json json = {{"content", "slices"},     {"architecture", part.file.architecture()},
                           {"layer", layer.layer},    {"n_expert", layer.n_expert},
                           {"experts", part.experts}, {"slice_bytes", layer.slice_bytes()}};
        print_json(json);
    } else {
        fmt::print("{} of the {} experts of layer {} ({}), {} each: {}\n", part.experts.size(), layer.n_expert,
                   layer.layer, part.file.architecture(), format_bytes(layer.slice_bytes()),
                   fmt::join(part.experts, ", "));
    }
    return {};
}

Status inspect(const InspectArguments& options) {
    LINKCPP_TRY(const GgufFile file, GgufFile::open(options.model, true));
    if (file.number(model::kSliceLayerKey)) { return inspect_slices(options); }
    LINKCPP_TRY(const Facts facts, read_facts(file));
    if (options.json) {
        print_json(to_json(facts));
    } else {
        print(facts);
    }
    return {};
}

}  // namespace

void add_inspect(CLI::App& app) {
    auto options = std::make_shared<InspectArguments>();
    CLI::App* command = app.add_subcommand("inspect", "Says what a model's experts and its backbone are");
    command->add_option("MODEL", options->model, "A GGUF model, any one of its splits, or its first megabytes")
        ->required();
    command->add_flag("--json", options->json, "Print JSON");
    command->footer("Example: linkcpp inspect model.gguf");
    run_or_exit(command, [options] { return inspect(*options); });
}

}  // namespace linkcpp::cli
