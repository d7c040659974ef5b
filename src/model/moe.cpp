#include "model/moe.h"

#include <algorithm>
#include <charconv>
#include <ranges>

#include "model/slicer.h"

namespace linkcpp::model {
namespace {

// Architectures whose routed experts go through build_moe_ffn() of llama.cpp's src/llama-graph.cpp with LLM_FFN_SILU
// and have a gate: silu(gate) * up, the router's weights applied to down's output. From src/models/*.cpp of v0.4.0,
// names from src/llama-arch.cpp. Left out, for another block: gpt-oss and minimax-m3 (SWIGLU_OAI), gemma4 and grok
// (GEGLU), nomic-bert-moe (GELU), smallthinker (REGLU), nemotron_h_moe (RELU²), kimi-k3 (SiTU), llama4 (weights before
// the experts), deepseek4 and dflash (clamped), grovemoe (a second set of experts).
constexpr std::string_view kSwigluArchitectures[] = {
    "afmoe",       "arctic",    "bailingmoe",    "bailingmoe2", "bailingmoe3", "cohere2moe",    "dbrx",
    "deepseek",    "deepseek2", "deepseek2-ocr", "deepseek32",  "dots1",       "dots3note",     "ernie4_5-moe",
    "exaone-moe",  "glm-dsa",   "glm4moe",       "granite",     "granite_swa", "granitehybrid", "granitemoe",
    "hunyuan-moe", "hy_v3",     "jamba",         "kimi-linear", "laguna",      "lfm2moe",       "llada-moe",
    "llama",       "mellum",    "mimo2",         "minimax-01",  "minimax-m2",  "mistral3",      "mistral4",
    "olmoe",       "phimoe",    "qwen2moe",      "qwen35moe",   "qwen3moe",    "qwen3next",     "qwen3vlmoe",
    "qwen4exp",    "rnd1",      "step35",
};

constexpr std::string_view kRoleNames[] = {"gate", "up", "down", "gate_up"};

std::string_view suffix_of(Role role) {
    switch (role) {
        case Role::gate: return "ffn_gate_exps.weight";
        case Role::up: return "ffn_up_exps.weight";
        case Role::down: return "ffn_down_exps.weight";
        case Role::gate_up: return "ffn_gate_up_exps.weight";
    }
    return "";
}

// "blk.7.rest" → 7 and "rest".
struct BlockName {
    std::uint32_t layer;
    std::string_view rest;
};
std::optional<BlockName> parse_block_name(std::string_view name) {
    if (!name.starts_with("blk.")) { return std::nullopt; }
    name.remove_prefix(4);
    BlockName block{};
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), block.layer);
    const auto digits = static_cast<std::size_t>(end - name.data());
    if (error != std::errc{} || digits == name.size() || name[digits] != '.') { return std::nullopt; }
    if (digits > 1 && name.front() == '0') { return std::nullopt; }
    block.rest = name.substr(digits + 1);
    return block;
}

// "ffn_gate.3.weight": one tensor for each expert, as converters wrote until 2024.
bool is_single_expert(std::string_view rest) {
    for (const std::string_view start : {"ffn_gate.", "ffn_up.", "ffn_down."}) {
        if (rest.starts_with(start) && rest.size() > start.size() && rest[start.size()] >= '0' &&
            rest[start.size()] <= '9') {
            return true;
        }
    }
    return false;
}

bool is_expert(std::string_view rest) {
    return is_single_expert(rest) || (rest.contains("_exps") && rest != "ffn_norm_exps.weight");
}

// Finds what this program cannot compute. The layers of a supported model then hold nothing but the four roles.
Status check_block_kind(const GgufFile& file, std::string_view where) {
    const std::string architecture = file.architecture();
    const auto in_block = [](const TensorInfo& tensor) {
        const auto block = parse_block_name(tensor.name);
        return block && is_expert(block->rest);
    };
    if (std::ranges::none_of(file.tensors(), in_block)) {
        return fail(ErrorKind::invalid,
                    "{}: expected a Mixture-of-Experts model, got one without routed experts (architecture '{}'); run "
                    "it with llama.cpp alone",
                    where, architecture);
    }
    if (!is_supported_architecture(architecture)) {
        return fail(ErrorKind::unsupported,
                    "{}: architecture '{}': expected one whose experts are SwiGLU with the router's weights applied "
                    "after down; these experts cannot be distributed yet",
                    where, architecture);
    }
    for (const TensorInfo& tensor : file.tensors()) {
        const auto block = parse_block_name(tensor.name);
        if (!block || !is_expert(block->rest)) { continue; }
        if (is_single_expert(block->rest)) {
            return fail(ErrorKind::unsupported,
                        "{}: '{}': expected the experts of a layer in one tensor, got one tensor for each; convert the "
                        "model again with a current llama.cpp",
                        where, tensor.name);
        }
        if (!parse_expert_tensor_name(tensor.name)) {
            return fail(ErrorKind::unsupported,
                        "{}: '{}': expected experts of gate, up and down alone, got a bias, scale or other tensor; "
                        "such experts cannot be distributed yet",
                        where, tensor.name);
        }
    }
    const auto clamps = file.reals(architecture + ".swiglu_clamp_exp");
    if (clamps && std::ranges::any_of(*clamps, [](double limit) { return limit != 0; })) {
        return fail(
            ErrorKind::unsupported,
            "{}: {}.swiglu_clamp_exp: expected plain SwiGLU, got clamped; such experts cannot be distributed yet",
            where, architecture);
    }
    return {};
}

Result<std::uint32_t> read_count(const GgufFile& file, const std::string& key, std::uint32_t limit) {
    const auto value = file.number(key);
    if (!value || *value == 0 || *value > limit) {
        return fail(ErrorKind::corrupt, "{}: {}: expected a number from 1 to {}, got {}", file.path().string(), key,
                    limit, value ? std::to_string(*value) : "none");
    }
    return static_cast<std::uint32_t>(*value);
}

// One number for all layers, or one for each.
Result<std::uint32_t> read_n_expert_used(const GgufFile& file, const MoeModel& model, std::uint32_t layer) {
    const std::string key = model.architecture + ".expert_used_count";
    const auto values = file.numbers(key);
    if (!values || (values->size() != 1 && values->size() != model.n_layer) || values->empty()) {
        return fail(ErrorKind::corrupt, "{}: {}: expected one number, or {}, got {}", file.path().string(), key,
                    model.n_layer, values ? values->size() : 0);
    }
    const std::uint64_t value = values->size() == 1 ? values->front() : (*values)[layer];
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(value, kMaxExperts + 1));  // checked with the shapes
}

Result<ExpertTensor> describe(const TensorInfo& tensor, Role role, std::uint32_t n_in_file, std::uint32_t n_expert,
                              std::string_view where) {
    if (tensor.ne[2] != n_in_file || tensor.ne[3] != 1) {
        return fail(ErrorKind::corrupt, "{}: '{}': expected {} experts, got shape {{{}}}", where, tensor.name,
                    n_in_file, fmt::join(tensor.ne, ", "));
    }
    return ExpertTensor{.role = role,
                        .name = tensor.name,
                        .type = tensor.type,
                        .ne = {tensor.ne[0], tensor.ne[1], n_expert},
                        .slab_bytes = tensor.n_bytes / n_in_file};
}

bool is_weight_type(ggml_type type) {
    return ggml_is_quantized(type) || type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

// "layer 7: what: expected X, got Y"
template <class A, class B>
std::unexpected<Error> mismatch(const MoeLayer& layer, std::string_view what, const A& expected, const B& got) {
    return fail(ErrorKind::corrupt, "layer {}: {}: expected {}, got {}", layer.layer, what, expected, got);
}

std::string shape(const std::array<std::int64_t, 3>& ne) {
    return fmt::format("{{{}}}", fmt::join(ne, ", "));
}

Status check_tensor(const MoeLayer& layer, const ExpertTensor& tensor) {
    if (tensor.name != expert_tensor_name(layer.layer, tensor.role)) {
        return mismatch(layer, "name of a tensor", expert_tensor_name(layer.layer, tensor.role), tensor.name);
    }
    const std::int64_t n_embd = layer.n_embd;
    const std::int64_t n_ff = layer.n_ff;
    std::array<std::int64_t, 3> ne{n_embd, n_ff, layer.n_expert};
    if (tensor.role == Role::down) { ne = {n_ff, n_embd, layer.n_expert}; }
    if (tensor.role == Role::gate_up) { ne = {n_embd, 2 * n_ff, layer.n_expert}; }
    if (tensor.ne != ne) { return mismatch(layer, tensor.name, shape(ne), shape(tensor.ne)); }
    const auto n_bytes = tensor_bytes(tensor.type, {ne[0], ne[1], 1, 1});
    if (!n_bytes || !is_weight_type(tensor.type)) {
        return mismatch(layer, tensor.name, "a type for weights with rows of whole blocks",
                        static_cast<int>(tensor.type));
    }
    if (tensor.slab_bytes != *n_bytes) { return mismatch(layer, tensor.name, *n_bytes, tensor.slab_bytes); }
    return {};
}

Status check_layer(const MoeModel& model, const MoeLayer& layer) {
    if (layer.layer >= model.n_layer) {
        return mismatch(layer, "number", fmt::format("less than {}", model.n_layer), layer.layer);
    }
    if (layer.n_expert < 1 || layer.n_expert > kMaxExperts) {
        return mismatch(layer, "experts", fmt::format("1 to {}", kMaxExperts), layer.n_expert);
    }
    if (layer.n_expert_used < 1 || layer.n_expert_used > layer.n_expert) {
        return mismatch(layer, "experts used", fmt::format("1 to {}", layer.n_expert), layer.n_expert_used);
    }
    if (layer.n_embd != model.n_embd) { return mismatch(layer, "n_embd", model.n_embd, layer.n_embd); }
    if (layer.n_ff < 1 || layer.n_ff > kMaxFf) {
        return mismatch(layer, "n_ff", fmt::format("1 to {}", kMaxFf), layer.n_ff);
    }
    if (layer.activation != Activation::swiglu) { return mismatch(layer, "activation", "swiglu", "another"); }

    std::vector<Role> roles;
    roles.reserve(layer.tensors.size());
    for (const ExpertTensor& tensor : layer.tensors) { roles.push_back(tensor.role); }
    if (roles != std::vector{Role::gate, Role::up, Role::down} && roles != std::vector{Role::gate_up, Role::down}) {
        return mismatch(
            layer, "tensors", "gate, up, down or gate_up, down",
            fmt::format("'{}'", fmt::join(layer.tensors | std::views::transform(&ExpertTensor::name), "', '")));
    }
    for (const ExpertTensor& tensor : layer.tensors) { LINKCPP_CHECK(check_tensor(layer, tensor)); }
    return {};
}

Result<MoeLayer> read_layer(const GgufFile& file, const MoeModel& model, std::uint32_t layer_number,
                            std::uint32_t n_expert, std::uint32_t n_in_file) {
    MoeLayer layer;
    layer.layer = layer_number;
    layer.n_expert = n_expert;
    layer.n_embd = model.n_embd;
    LINKCPP_TRY(layer.n_expert_used, read_n_expert_used(file, model, layer_number));
    for (const Role role : {Role::gate_up, Role::gate, Role::up, Role::down}) {
        const TensorInfo* tensor = file.find(expert_tensor_name(layer_number, role));
        if (tensor == nullptr) { continue; }
        LINKCPP_TRY(ExpertTensor described,
                    describe(*tensor, role, n_in_file, n_expert, file.path(tensor->split).string()));
        if (role == Role::down) {
            layer.n_ff = static_cast<std::uint32_t>(std::min<std::int64_t>(described.ne[0], kMaxFf + 1));
        }
        layer.tensors.push_back(std::move(described));
    }
    return layer;
}

// At most `limit` bytes of a text, no character of UTF-8 cut through.
std::string cut_text(std::string text, std::size_t limit) {
    if (text.size() <= limit) { return text; }
    while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xc0) == 0x80) { --limit; }
    text.resize(limit);
    return text;
}

Result<MoeModel> read_model(const GgufFile& file, std::optional<std::uint32_t> n_in_file) {
    const std::string where = file.path().string();
    LINKCPP_CHECK(check_block_kind(file, where));
    MoeModel model;
    model.architecture = file.architecture();
    model.name = cut_text(file.text("general.name").value_or(""), kMaxNameBytes / 4);
    LINKCPP_TRY(model.n_layer, read_count(file, model.architecture + ".block_count", kMaxLayers));
    LINKCPP_TRY(model.n_embd, read_count(file, model.architecture + ".embedding_length", kMaxEmbd));
    LINKCPP_TRY(const std::uint32_t n_expert, read_count(file, model.architecture + ".expert_count", kMaxExperts));
    for (const TensorInfo& tensor : file.tensors()) {
        const auto name = parse_expert_tensor_name(tensor.name);
        if (name && name->layer >= model.n_layer) {
            return fail(ErrorKind::corrupt, "{}: '{}': expected a layer below {}, the model's block_count", where,
                        tensor.name, model.n_layer);
        }
    }
    for (std::uint32_t i = 0; i < model.n_layer; ++i) {
        LINKCPP_TRY(MoeLayer layer, read_layer(file, model, i, n_expert, n_in_file.value_or(n_expert)));
        if (!layer.tensors.empty()) { model.layers.push_back(std::move(layer)); }
    }
    if (Status status = check(model); !status) { return fail_with(where, std::move(status).error()); }
    return model;
}

}  // namespace

std::string_view to_string(Role role) {
    const auto index = static_cast<std::size_t>(role) - 1;
    return index < std::size(kRoleNames) ? kRoleNames[index] : "unknown";
}

std::string_view to_string(Activation activation) {
    return activation == Activation::swiglu ? "swiglu" : "unknown";
}

std::uint64_t MoeLayer::slice_bytes() const {
    std::uint64_t sum = 0;
    for (const ExpertTensor& tensor : tensors) { sum += tensor.slab_bytes; }
    return sum;
}

const ExpertTensor* MoeLayer::find(Role role) const {
    const auto found = std::ranges::find(tensors, role, &ExpertTensor::role);
    return found == tensors.end() ? nullptr : &*found;
}

std::uint64_t MoeModel::expert_bytes() const {
    std::uint64_t sum = 0;
    for (const MoeLayer& layer : layers) { sum += layer.n_expert * layer.slice_bytes(); }
    return sum;
}

std::uint64_t MoeModel::n_slices() const {
    std::uint64_t sum = 0;
    for (const MoeLayer& layer : layers) { sum += layer.n_expert; }
    return sum;
}

const MoeLayer* MoeModel::find(std::uint32_t layer) const {
    const auto found = std::ranges::find(layers, layer, &MoeLayer::layer);
    return found == layers.end() ? nullptr : &*found;
}

Result<MoeModel> read_moe(const GgufFile& file) {
    if (file.number(kSliceLayerKey)) {
        return fail(ErrorKind::invalid,
                    "{}: expected a whole model, got some experts of layer {}; give the file they were cut from",
                    file.path().string(), *file.number(kSliceLayerKey));
    }
    return read_model(file, std::nullopt);
}

Result<MoeModel> read_moe_part(const GgufFile& file, std::uint32_t n_in_file) {
    return read_model(file, n_in_file);
}

Status check(const MoeModel& model) {
    if (!is_supported_architecture(model.architecture)) {
        return fail(ErrorKind::corrupt, "architecture: expected one with SwiGLU experts, got '{}'", model.architecture);
    }
    if (model.name.size() > kMaxNameBytes) {
        return fail(ErrorKind::corrupt, "name: expected at most {} bytes, got {}", kMaxNameBytes, model.name.size());
    }
    if (model.n_layer < 1 || model.n_layer > kMaxLayers || model.n_embd < 1 || model.n_embd > kMaxEmbd) {
        return fail(ErrorKind::corrupt, "model: expected 1 to {} layers and n_embd from 1 to {}, got {} and {}",
                    kMaxLayers, kMaxEmbd, model.n_layer, model.n_embd);
    }
    if (model.layers.empty()) {
        return fail(ErrorKind::corrupt, "model: expected layers with routed experts, got none");
    }
    const MoeLayer* previous = nullptr;
    for (const MoeLayer& layer : model.layers) {
        if (previous != nullptr && previous->layer >= layer.layer) {
            return mismatch(layer, "number", fmt::format("more than {}", previous->layer), layer.layer);
        }
        LINKCPP_CHECK(check_layer(model, layer));
        previous = &layer;
    }
    if (model.n_slices() > kMaxSlices) {
        return fail(ErrorKind::corrupt, "model: expected at most {} experts in all layers, got {}", kMaxSlices,
                    model.n_slices());
    }
    return {};
}

std::optional<ExpertTensorName> parse_expert_tensor_name(std::string_view name) {
    const auto block = parse_block_name(name);
    if (!block) { return std::nullopt; }
    for (const Role role : {Role::gate, Role::up, Role::down, Role::gate_up}) {
        if (block->rest == suffix_of(role)) { return ExpertTensorName{block->layer, role}; }
    }
    return std::nullopt;
}

std::string expert_tensor_name(std::uint32_t layer, Role role) {
    return fmt::format("blk.{}.{}", layer, suffix_of(role));
}

bool is_supported_architecture(std::string_view architecture) {
    return std::ranges::find(kSwigluArchitectures, architecture) != std::end(kSwigluArchitectures);
}

}  // namespace linkcpp::model
