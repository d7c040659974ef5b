#include "model/architecture.h"

#include <algorithm>
#include <iterator>

namespace linkcpp::model {
namespace {

// Names from src/llama-arch.cpp of llama.cpp v0.4.0; activations, scales and biases from the calls of build_moe_ffn()
// in src/models/*.cpp. A model file may hold scales or biases that its architecture's graph does not use.
enum class Extra { none, scales, biases };
struct Entry {
    std::string_view architecture;
    Activation with_gate = Activation::swiglu;
    Activation without_gate = Activation::silu;
    Extra extra = Extra::none;
};
constexpr Entry kEntries[] = {
    {.architecture = "afmoe"},
    {.architecture = "arctic"},
    {.architecture = "bailingmoe"},
    {.architecture = "bailingmoe2"},
    {.architecture = "bailingmoe3"},
    {.architecture = "cohere2moe", .extra = Extra::scales},
    {.architecture = "dbrx"},
    {.architecture = "deepseek"},
    {.architecture = "deepseek2"},
    {.architecture = "deepseek2-ocr"},
    {.architecture = "deepseek32", .extra = Extra::scales},
    {.architecture = "deepseek4"},
    {.architecture = "dflash"},
    {.architecture = "dots1"},
    {.architecture = "dots3note", .extra = Extra::scales},
    {.architecture = "ernie4_5-moe"},
    {.architecture = "exaone-moe"},
    {"gemma4", Activation::geglu, Activation::gelu, Extra::scales},
    {.architecture = "glm-dsa", .extra = Extra::scales},
    {.architecture = "glm4moe"},
    {"gpt-oss", Activation::swiglu_oai, Activation::unknown, Extra::biases},
    {.architecture = "granite"},
    {.architecture = "granite_swa"},
    {.architecture = "granitehybrid"},
    {.architecture = "granitemoe"},
    {"grok", Activation::geglu, Activation::gelu},
    {.architecture = "grovemoe"},
    {.architecture = "hunyuan-moe"},
    {.architecture = "hy_v3", .extra = Extra::scales},
    {.architecture = "jamba"},
    {"kimi-k3", Activation::situ, Activation::unknown},
    {.architecture = "kimi-linear"},
    {.architecture = "laguna"},
    {.architecture = "lfm2moe"},
    {.architecture = "llada-moe"},
    {.architecture = "llama", .extra = Extra::scales},
    {.architecture = "llama4"},
    {.architecture = "mellum", .extra = Extra::scales},
    {.architecture = "mimo2"},
    {.architecture = "minicpm"},
    {.architecture = "minimax-01"},
    {.architecture = "minimax-m2"},
    {"minimax-m3", Activation::swiglu_oai, Activation::unknown},
    {.architecture = "mistral3", .extra = Extra::scales},
    {.architecture = "mistral4"},
    {"nemotron_h", Activation::unknown, Activation::relu_squared, Extra::scales},
    {"nemotron_h_moe", Activation::unknown, Activation::relu_squared, Extra::scales},
    {"nomic-bert-moe", Activation::geglu, Activation::gelu},
    {.architecture = "olmoe"},
    {.architecture = "paddleocr"},
    {.architecture = "phimoe"},
    {.architecture = "qwen2moe"},
    {.architecture = "qwen35moe", .extra = Extra::scales},
    {.architecture = "qwen3moe", .extra = Extra::scales},
    {.architecture = "qwen3next", .extra = Extra::scales},
    {.architecture = "qwen3vlmoe"},
    {.architecture = "qwen4exp", .extra = Extra::scales},
    {.architecture = "rnd1"},
    {"smallthinker", Activation::reglu, Activation::relu},
    {.architecture = "step35"},
};
const Entry* find(std::string_view architecture) {
    const auto entry = std::ranges::find(kEntries, architecture, &Entry::architecture);
    return entry == std::end(kEntries) ? nullptr : &*entry;
}

// Fixed in llama.cpp's graph.
constexpr float kOaiAlpha = 1.702f;
constexpr float kOaiLimit = 7.0f;
constexpr float kNoLimit = 1e-6f;  // limits up to this one are none

float real(const GgufFile& file, const std::string& key, float otherwise) {
    return static_cast<float>(file.real(key).value_or(otherwise));
}

// One number for all layers, or one for each; 0 where there is none.
float limit_of(const GgufFile& file, const std::string& architecture, std::uint32_t layer) {
    const auto values = file.reals(architecture + ".swiglu_clamp_exp");
    if (!values || values->empty()) { return 0; }
    if (values->size() == 1) { return static_cast<float>(values->front()); }
    return layer < values->size() ? static_cast<float>((*values)[layer]) : 0;
}

ActivationOf described_activation(const GgufFile& file, std::uint32_t layer, bool gated, bool merged) {
    const std::string architecture = file.architecture();
    const Entry known = find(architecture) != nullptr ? *find(architecture) : Entry{};
    const Activation kind = gated ? known.with_gate : known.without_gate;
    if (kind == Activation::swiglu_oai) { return {kind, {kOaiAlpha, kOaiLimit}}; }
    if (kind == Activation::situ) {
        return {kind,
                {real(file, architecture + ".activation.situ_beta", 1),
                 real(file, architecture + ".activation.situ_linear_beta", 0)}};
    }
    if (kind != Activation::swiglu) { return {kind, {}}; }
    const float limit = limit_of(file, architecture, layer % kMaxLayers);
    if (merged || limit <= kNoLimit) { return {Activation::swiglu, {}}; }
    const bool before =
        architecture == "deepseek4" ||
        (architecture == "dflash" && file.number(architecture + ".hyper_connection.count").value_or(0) > 0);
    return {before ? Activation::swiglu_clamp : Activation::swiglu_limited, {limit, 0}};
}

}  // namespace

ActivationOf activation_of(const GgufFile& file, std::uint32_t layer, bool gated, bool merged) {
    const ActivationOf described = described_activation(file, layer, gated, merged);
    return is_computable(described) ? described : ActivationOf{Activation::unknown, {}};
}

bool is_used(std::string_view architecture, Role role) {
    const Entry* known = find(architecture);
    if (is_weight(role) || known == nullptr) { return true; }
    return known->extra == (role >= Role::gate_scale ? Extra::scales : Extra::biases);
}

bool is_known_architecture(std::string_view architecture) {
    return find(architecture) != nullptr;
}

bool weights_come_first(std::string_view architecture) {
    return architecture == "llama4";
}

}  // namespace linkcpp::model
