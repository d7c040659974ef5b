#include "model/moe.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <ranges>

#include "model/architecture.h"
#include "model/slicer.h"

namespace linkcpp::model {
namespace {

struct RoleName {
    Role role;
    std::string_view name;        // for people
    std::string_view projection;  // "ffn_<projection>_exps.<suffix>"
    std::string_view suffix;
};
// In the order in which a slice has them.
constexpr RoleName kRoles[] = {
    {Role::gate_up, "gate_up", "gate_up", "weight"},
    {Role::gate, "gate", "gate", "weight"},
    {Role::up, "up", "up", "weight"},
    {Role::down, "down", "down", "weight"},
    {Role::gate_up_bias, "gate_up bias", "gate_up", "bias"},
    {Role::gate_bias, "gate bias", "gate", "bias"},
    {Role::up_bias, "up bias", "up", "bias"},
    {Role::down_bias, "down bias", "down", "bias"},
    {Role::gate_scale, "gate scale", "gate", "scale"},
    {Role::up_scale, "up scale", "up", "scale"},
    {Role::down_scale, "down scale", "down", "scale"},
};
const RoleName& name_of(Role role) {
    return *std::ranges::find(kRoles, role, &RoleName::role);
}

constexpr std::string_view kActivationNames[] = {
    "unknown",        "swiglu", "geglu", "reglu", "swiglu_oai", "swiglu_clamp",
    "swiglu_limited", "situ",   "silu",  "gelu",  "relu",       "relu_squared",
};
static_assert(std::size(kActivationNames) == kMaxActivation + 1);

// A block's sets of experts, by what stands in their tensors' names.
constexpr std::string_view kSets[] = {"exps", "chexps"};

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

// Finds what this program cannot distribute.
Status check_has_sets(const GgufFile& file, std::string_view where) {
    bool found = false;
    for (const TensorInfo& tensor : file.tensors()) {
        const auto block = parse_block_name(tensor.name);
        if (block && is_single_expert(block->rest)) {
            return fail(ErrorKind::unsupported,
                        "{}: '{}': expected the experts of a layer in one tensor, got one tensor for each; convert the "
                        "model again with a current llama.cpp",
                        where, tensor.name);
        }
        found = found || parse_expert_tensor_name(tensor.name).has_value();
    }
    if (found) { return {}; }
    return fail(ErrorKind::invalid, "{}: expected a Mixture-of-Experts model, got {}; run it with llama.cpp alone",
                where,
                file.architecture().empty()
                    ? "a file that is no model (without an architecture)"
                    : fmt::format("one without routed experts (architecture '{}')", file.architecture()));
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

// The file holds `n_in_file` experts of `layer`'s.
Result<ExpertTensor> describe(const MoeLayer& layer, const TensorInfo& tensor, Role role, std::uint32_t n_in_file,
                              std::string_view where) {
    const std::size_t dimension = expert_dimension(role);
    std::array<std::int64_t, 3> ne{1, 1, 1};
    bool fits = n_in_file > 0 && tensor.ne[dimension] == n_in_file && tensor.ne[3] == 1;
    for (std::size_t i = 0; i < ne.size(); ++i) {
        if (i < dimension) { ne[i] = tensor.ne[i]; }
        if (i > dimension) { fits = fits && tensor.ne[i] == 1; }
    }
    if (!fits) {
        return fail(ErrorKind::corrupt, "{}: '{}': expected {} experts, got shape {{{}}}", where, tensor.name,
                    n_in_file, fmt::join(tensor.ne, ", "));
    }
    ne[dimension] = layer.n_expert;
    return ExpertTensor{
        .role = role, .name = tensor.name, .type = tensor.type, .ne = ne, .slab_bytes = tensor.n_bytes / n_in_file};
}

// Q8_1 and Q8_K are quantised, too, but for activations only: nothing multiplies by them, or makes numbers of them.
bool is_weight_type(ggml_type type) {
    if (type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16) { return true; }
    return ggml_is_quantized(type) && ggml_get_type_traits(type)->to_float != nullptr;
}

// "layer 7: what: expected X, got Y"
template <class A, class B>
std::unexpected<Error> mismatch(const MoeLayer& layer, std::string_view what, const A& expected, const B& got) {
    return fail(ErrorKind::corrupt, "layer {}: {}: expected {}, got {}", layer_name(layer.layer), what, expected, got);
}

std::string shape(const std::array<std::int64_t, 3>& ne) {
    return fmt::format("{{{}}}", fmt::join(ne, ", "));
}

Status check_tensor(const MoeLayer& layer, const ExpertTensor& tensor) {
    if (tensor.name != expert_tensor_name(layer.layer, tensor.role)) {
        return mismatch(layer, "name of a tensor", expert_tensor_name(layer.layer, tensor.role), tensor.name);
    }
    const std::array<std::int64_t, 3> ne = shape_of(layer, tensor.role);
    if (tensor.ne != ne) { return mismatch(layer, tensor.name, shape(ne), shape(tensor.ne)); }
    if (!is_weight(tensor.role) && tensor.type != GGML_TYPE_F32) {
        return mismatch(layer, tensor.name, "f32", static_cast<int>(tensor.type));
    }
    const auto n_bytes = slab_bytes_of(layer, tensor.role, tensor.type);
    if (!n_bytes || !is_weight_type(tensor.type)) {
        return mismatch(layer, tensor.name, "a type for weights with rows of whole blocks",
                        static_cast<int>(tensor.type));
    }
    if (tensor.slab_bytes != *n_bytes) { return mismatch(layer, tensor.name, *n_bytes, tensor.slab_bytes); }
    return {};
}

// Whether the weight that a bias or scale belongs to is there: the weights come first.
bool has_weight_of(const MoeLayer& layer, Role role) {
    const auto has = [&](Role weight) { return layer.find(weight) != nullptr; };
    switch (role) {
        case Role::gate_bias:
        case Role::gate_scale: return has(Role::gate);
        case Role::up_bias: return has(Role::up);
        case Role::gate_up_bias: return has(Role::gate_up);
        default: return true;
    }
}

// In a slice's order, each at most once, and each with what it needs.
bool fit_together(const MoeLayer& layer) {
    auto place = std::begin(kRoles);
    for (const ExpertTensor& tensor : layer.tensors) {
        place = std::find_if(place, std::end(kRoles), [&](const RoleName& name) { return name.role == tensor.role; });
        if (place == std::end(kRoles)) { return false; }
        ++place;
    }
    const auto has = [&](Role role) { return layer.find(role) != nullptr; };
    return has(Role::down) && has(Role::up) != has(Role::gate_up) && (!has(Role::gate) || has(Role::up)) &&
           std::ranges::all_of(layer.tensors, [&](const ExpertTensor& t) { return has_weight_of(layer, t.role); });
}

Status check_activation(const MoeLayer& layer) {
    const Activation kind = layer.activation.kind;
    if (static_cast<std::uint8_t>(kind) > kMaxActivation) {
        return mismatch(layer, "activation", fmt::format("0 to {}", kMaxActivation), static_cast<int>(kind));
    }
    const bool gated = layer.find(Role::gate) != nullptr || layer.find(Role::gate_up) != nullptr;
    if (kind != Activation::unknown && is_gated(kind) != gated) {
        return mismatch(layer, "activation", gated ? "one with a gate" : "one without a gate", to_string(kind));
    }
    if (!is_computable(layer.activation)) {
        return mismatch(layer, "parameters of its activation", "numbers from 0",
                        fmt::format("{}", fmt::join(layer.activation.parameters, ", ")));
    }
    return {};
}

Status check_layer(const MoeModel& model, const MoeLayer& layer) {
    if (layer.layer % kMaxLayers >= model.n_layer || layer.layer >= std::size(kSets) * kMaxLayers) {
        return mismatch(layer, "number", fmt::format("less than {}", model.n_layer), layer.layer);
    }
    if (layer.n_expert < 1 || layer.n_expert > kMaxExperts) {
        return mismatch(layer, "experts", fmt::format("1 to {}", kMaxExperts), layer.n_expert);
    }
    if (layer.n_expert_used < 1 || layer.n_expert_used > layer.n_expert) {
        return mismatch(layer, "experts used", fmt::format("1 to {}", layer.n_expert), layer.n_expert_used);
    }
    if (layer.n_embd < 1 || layer.n_embd > kMaxEmbd) {
        return mismatch(layer, "n_embd", fmt::format("1 to {}", kMaxEmbd), layer.n_embd);
    }
    if (layer.n_ff < 1 || layer.n_ff > kMaxFf) {
        return mismatch(layer, "n_ff", fmt::format("1 to {}", kMaxFf), layer.n_ff);
    }
    if (!fit_together(layer)) {
        return mismatch(
            layer, "tensors", "gate, up, down; gate_up, down; or up, down; and their biases and scales",
            fmt::format("'{}'", fmt::join(layer.tensors | std::views::transform(&ExpertTensor::name), "', '")));
    }
    LINKCPP_CHECK(check_activation(layer));
    for (const ExpertTensor& tensor : layer.tensors) { LINKCPP_CHECK(check_tensor(layer, tensor)); }
    return {};
}

// One of the first set's dimensions, as a number that check_layer() can judge.
std::uint32_t dimension(std::int64_t n, std::uint32_t limit) {
    return static_cast<std::uint32_t>(std::clamp<std::int64_t>(n, 0, std::int64_t{limit} + 1));
}

// The numbers of a layer that its tensors say. Experts: as many as the file holds.
Status read_shape(const GgufFile& file, const MoeModel& model, MoeLayer& layer) {
    const auto find = [&](Role role) { return file.find(expert_tensor_name(layer.layer, role)); };
    const TensorInfo* down = find(Role::down);
    const TensorInfo* first = find(Role::up) != nullptr ? find(Role::up) : find(Role::gate_up);
    if (first == nullptr) { first = find(Role::gate); }
    layer.n_ff = down != nullptr ? dimension(down->ne[0], kMaxFf) : 0;
    layer.n_embd = first != nullptr ? dimension(first->ne[0], kMaxEmbd) : model.n_embd;
    layer.n_expert = dimension((down != nullptr ? down : first)->ne[2], kMaxExperts);
    LINKCPP_TRY(layer.n_expert_used, read_n_expert_used(file, model, layer.layer % kMaxLayers));
    return {};
}

// `n_expert`: of the whole layer, where the file holds a part of it.
Result<MoeLayer> read_layer(const GgufFile& file, const MoeModel& model, std::uint32_t layer_number,
                            std::optional<std::uint32_t> n_expert) {
    MoeLayer layer;
    layer.layer = layer_number;
    const auto has = [&](Role role) { return file.find(expert_tensor_name(layer_number, role)) != nullptr; };
    if (!std::ranges::any_of(kRoles, [&](const RoleName& name) { return is_weight(name.role) && has(name.role); })) {
        return layer;
    }
    LINKCPP_CHECK(read_shape(file, model, layer));
    const std::uint32_t n_in_file = layer.n_expert;
    layer.n_expert = n_expert.value_or(n_in_file);
    if (layer_number >= kSecondSet) { layer.n_expert_used = std::min(layer.n_expert_used, layer.n_expert); }
    for (const RoleName& name : kRoles) {
        const TensorInfo* tensor = file.find(expert_tensor_name(layer_number, name.role));
        if (tensor == nullptr || !is_used(model.architecture, name.role) || !has_weight_of(layer, name.role)) {
            continue;
        }
        LINKCPP_TRY(ExpertTensor described,
                    describe(layer, *tensor, name.role, n_in_file, file.path(tensor->split).string()));
        layer.tensors.push_back(std::move(described));
    }
    const bool merged = layer.find(Role::gate_up) != nullptr;
    layer.activation = activation_of(file, layer_number, merged || layer.find(Role::gate) != nullptr, merged);
    layer.weights_first = weights_come_first(model.architecture);
    return layer;
}

// At most `limit` bytes of a text, no character of UTF-8 cut through.
std::string cut_text(std::string text, std::size_t limit) {
    if (text.size() <= limit) { return text; }
    while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xc0) == 0x80) { --limit; }
    text.resize(limit);
    return text;
}

// `part`: how many experts the layer of a file of slices has in the whole model.
Result<MoeModel> read_model(const GgufFile& file, std::optional<std::uint32_t> part) {
    const std::string where = file.path().string();
    LINKCPP_CHECK(check_has_sets(file, where));
    MoeModel model;
    model.architecture = file.architecture();
    model.name = cut_text(file.text("general.name").value_or(""), kMaxNameBytes / 4);
    LINKCPP_TRY(model.n_layer, read_count(file, model.architecture + ".block_count", kMaxLayers));
    LINKCPP_TRY(model.n_embd, read_count(file, model.architecture + ".embedding_length", kMaxEmbd));
    LINKCPP_TRY(const std::uint32_t n_expert, read_count(file, model.architecture + ".expert_count", kMaxExperts));
    for (const TensorInfo& tensor : file.tensors()) {
        const auto name = parse_expert_tensor_name(tensor.name);
        if (name && name->layer % kMaxLayers >= model.n_layer) {
            return fail(ErrorKind::corrupt, "{}: '{}': expected a layer below {}, the model's block_count", where,
                        tensor.name, model.n_layer);
        }
    }
    for (std::uint32_t set = 0; set < std::size(kSets); ++set) {
        for (std::uint32_t i = 0; i < model.n_layer; ++i) {
            LINKCPP_TRY(MoeLayer layer, read_layer(file, model, set * kMaxLayers + i, part));
            if (layer.tensors.empty()) { continue; }
            if (set == 0 && layer.n_expert != n_expert) {
                return fail(ErrorKind::corrupt, "{}: '{}': expected {} experts, the model's expert_count, got {}",
                            where, layer.tensors.front().name, n_expert, layer.n_expert);
            }
            model.layers.push_back(std::move(layer));
        }
    }
    if (Status status = check(model); !status) { return fail_with(where, std::move(status).error()); }
    return model;
}

}  // namespace

std::string_view to_string(Role role) {
    return name_of(role).name;
}

bool is_computable(const ActivationOf& activation) {
    const auto fits = [](float parameter) { return std::isfinite(parameter) && parameter >= 0; };
    return std::ranges::all_of(activation.parameters, fits) &&
           (activation.kind != Activation::situ || activation.parameters[0] > 0);
}

std::string_view to_string(Activation activation) {
    const auto index = static_cast<std::size_t>(activation);
    return index < std::size(kActivationNames) ? kActivationNames[index] : "invalid";
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

Result<MoeModel> read_moe_part(const GgufFile& file, std::uint32_t n_expert) {
    return read_model(file, n_expert);
}

Status check(const MoeModel& model) {
    if (model.architecture.empty() || model.architecture.size() > kMaxNameBytes) {
        return fail(ErrorKind::corrupt, "architecture: expected 1 to {} bytes, got {}", kMaxNameBytes,
                    model.architecture.size());
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

std::array<std::int64_t, 3> shape_of(const MoeLayer& layer, Role role) {
    const std::int64_t n_embd = layer.n_embd;
    const std::int64_t n_ff = layer.n_ff;
    const std::int64_t n_expert = layer.n_expert;
    switch (role) {
        case Role::gate:
        case Role::up: return {n_embd, n_ff, n_expert};
        case Role::down: return {n_ff, n_embd, n_expert};
        case Role::gate_up: return {n_embd, 2 * n_ff, n_expert};
        case Role::gate_bias:
        case Role::up_bias: return {n_ff, n_expert, 1};
        case Role::down_bias: return {n_embd, n_expert, 1};
        case Role::gate_up_bias: return {2 * n_ff, n_expert, 1};
        case Role::gate_scale:
        case Role::up_scale:
        case Role::down_scale: return {n_expert, 1, 1};
    }
    return {};
}

std::optional<std::uint64_t> slab_bytes_of(const MoeLayer& layer, Role role, ggml_type type) {
    std::array<std::int64_t, 3> ne = shape_of(layer, role);
    ne[expert_dimension(role)] = 1;
    return tensor_bytes(static_cast<std::int32_t>(type), {ne[0], ne[1], ne[2], 1});
}

std::string variant_of(const MoeLayer& layer) {
    const auto has = [&](auto is) { return std::ranges::any_of(layer.tensors, is, &ExpertTensor::role); };
    std::string text = layer.find(Role::gate_up) != nullptr ? "gate and up merged, "
                       : layer.find(Role::gate) != nullptr  ? "gate and up, "
                                                            : "no gate, ";
    text += to_string(layer.activation.kind);
    const auto [first, second] = layer.activation.parameters;
    if (first != 0) { text += second != 0 ? fmt::format("({:g}, {:g})", first, second) : fmt::format("({:g})", first); }
    if (has([](Role role) { return !is_weight(role) && role < Role::gate_scale; })) { text += ", biases"; }
    if (has([](Role role) { return role >= Role::gate_scale; })) { text += ", scales"; }
    if (layer.weights_first) { text += ", weights first"; }
    return text;
}

Widths widths_of(const MoeLayer& layer, std::optional<Role> product) {
    if (!product) { return {layer.n_embd, layer.n_embd}; }
    if (!is_weight(*product) || layer.find(*product) == nullptr) { return {}; }
    const std::array<std::int64_t, 3> ne = shape_of(layer, *product);
    return {static_cast<std::uint32_t>(ne[0]), static_cast<std::uint32_t>(ne[1])};
}

std::optional<ExpertTensorName> parse_expert_tensor_name(std::string_view name) {
    const auto block = parse_block_name(name);
    if (!block || block->layer >= kMaxLayers || !block->rest.starts_with("ffn_")) { return std::nullopt; }
    const std::string_view rest = block->rest.substr(4);
    const std::size_t dot = rest.rfind('.');
    const std::size_t line = rest.substr(0, dot).rfind('_');
    if (dot == std::string_view::npos || line == std::string_view::npos) { return std::nullopt; }
    const auto set = std::ranges::find(kSets, rest.substr(line + 1, dot - line - 1));
    const auto role = std::ranges::find_if(kRoles, [&](const RoleName& of) {
        return of.projection == rest.substr(0, line) && of.suffix == rest.substr(dot + 1);
    });
    if (set == std::end(kSets) || role == std::end(kRoles)) { return std::nullopt; }
    return ExpertTensorName{static_cast<std::uint32_t>(set - std::begin(kSets)) * kMaxLayers + block->layer,
                            role->role};
}

std::string expert_tensor_name(std::uint32_t layer, Role role) {
    const RoleName& name = name_of(role);
    return fmt::format("blk.{}.ffn_{}_{}.{}", layer % kMaxLayers, name.projection,
                       kSets[std::min<std::size_t>(layer / kMaxLayers, std::size(kSets) - 1)], name.suffix);
}

std::string layer_name(std::uint32_t layer) {
    return fmt::format("{}{}", layer % kMaxLayers, layer >= kSecondSet ? ", second set" : "");
}

}  // namespace linkcpp::model
