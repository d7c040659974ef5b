// What is Mixture-of-Experts about a model: its layers with routed experts, their tensors and shapes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ggml.h>

#include "base/error.h"
#include "model/gguf_file.h"

namespace linkcpp::model {

// The part a tensor plays in an expert's FFN. Numbers reach manifests and frames: never reused.
enum class Role : std::uint8_t {
    // Weights. A product by one of them is a MUL_MAT_ID.
    gate = 1,     // {n_embd, n_ff, n_expert}      "ffn_gate_exps.weight"
    up = 2,       // {n_embd, n_ff, n_expert}      "ffn_up_exps.weight"
    down = 3,     // {n_ff, n_embd, n_expert}      "ffn_down_exps.weight"
    gate_up = 4,  // {n_embd, 2 n_ff, n_expert}    "ffn_gate_up_exps.weight": gate's rows, then up's
    // Added to the product, f32.
    gate_bias = 5,     // {n_ff, n_expert}         "ffn_gate_exps.bias"
    up_bias = 6,       // {n_ff, n_expert}
    down_bias = 7,     // {n_embd, n_expert}
    gate_up_bias = 8,  // {2 n_ff, n_expert}
    // Multiply the product, before its bias, f32.
    gate_scale = 9,   // {n_expert}                "ffn_gate_exps.scale"
    up_scale = 10,    // {n_expert}, of gate_up where gate and up are merged
    down_scale = 11,  // {n_expert}
};
inline constexpr std::uint32_t kMaxRole = 11;
std::string_view to_string(Role role);
constexpr bool is_weight(Role role) {
    return role <= Role::gate_up;
}
// The dimension of the role's tensors along which experts lie: the last one.
constexpr std::size_t expert_dimension(Role role) {
    return role <= Role::gate_up ? 2 : role <= Role::gate_up_bias ? 1 : 0;
}

// How gate and up become the input of down. Numbers reach manifests: never reused.
enum class Activation : std::uint8_t {
    unknown = 0,         // nobody has described it: products are computed one at a time, what is between them elsewhere
    swiglu = 1,          // silu(gate) * up
    geglu = 2,           // gelu(gate) * up
    reglu = 3,           // relu(gate) * up
    swiglu_oai = 4,      // x = min(gate, limit); x * sigmoid(alpha * x) * (1 + clamp(up, ±limit)): {alpha, limit}
    swiglu_clamp = 5,    // silu(min(gate, limit)) * clamp(up, ±limit): {limit}
    swiglu_limited = 6,  // min(silu(gate), limit) * clamp(up, ±limit): {limit}
    situ = 7,            // beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta):
                         // {beta, linear_beta}; linear_beta 0: up as it is
    silu = 8,            // of up alone, as all that follow
    gelu = 9,
    relu = 10,
    relu_squared = 11,
};
inline constexpr std::uint8_t kMaxActivation = 11;
std::string_view to_string(Activation activation);
constexpr bool is_gated(Activation activation) {
    return activation >= Activation::swiglu && activation <= Activation::situ;
}

// Activation, and what its formula calls by name, in that order; 0 where it has fewer.
struct ActivationOf {
    Activation kind = Activation::swiglu;
    std::array<float, 2> parameters{};

    bool operator==(const ActivationOf&) const = default;
};
// Its parameters make sense in its formula.
bool is_computable(const ActivationOf& activation);

struct ExpertTensor {
    Role role = Role::gate;
    std::string name;  // as in the file: "blk.7.ffn_gate_exps.weight"
    ggml_type type = GGML_TYPE_F32;
    std::array<std::int64_t, 3> ne{};  // the role's shape, 1 where it has fewer dimensions
    std::uint64_t slab_bytes = 0;      // bytes of one expert: one step along the last dimension

    // The same with so many experts.
    std::array<std::int64_t, 3> shape_with(std::int64_t n_expert) const {
        std::array<std::int64_t, 3> shape = ne;
        shape[expert_dimension(role)] = n_expert;
        return shape;
    }

    bool operator==(const ExpertTensor&) const = default;
};

// One layer's set of routed experts. A slice is the concatenation of one expert's slabs in the order of `tensors`:
// weights (gate_up, gate, up, down), biases, scales, of each those that the layer has.
struct MoeLayer {
    std::uint32_t layer = 0;  // "blk.<layer>"; a block's second set ("chexps") is layer + kSecondSet
    std::uint32_t n_expert = 0;
    std::uint32_t n_expert_used = 0;
    std::uint32_t n_embd = 0;  // of the experts' rows: less than the model's where experts work on a latent
    std::uint32_t n_ff = 0;
    ActivationOf activation;
    bool weights_first = false;  // the router's weights multiply the experts' input, not their output
    std::vector<ExpertTensor> tensors;

    std::uint64_t slice_bytes() const;
    // Null when this layer has no tensor of that role.
    const ExpertTensor* find(Role role) const;
    bool operator==(const MoeLayer&) const = default;
};

struct MoeModel {
    std::string architecture;
    std::string name;           // general.name, may be empty
    std::uint32_t n_layer = 0;  // all layers
    std::uint32_t n_embd = 0;
    std::vector<MoeLayer> layers;  // those with routed experts, ascending

    std::uint64_t expert_bytes() const;
    std::uint64_t n_slices() const;
    // Null when that layer has no routed experts.
    const MoeLayer* find(std::uint32_t layer) const;
    bool operator==(const MoeModel&) const = default;
};

// Limits that hold for every model accepted from a file or a peer: they bound every later multiplication.
inline constexpr std::uint32_t kMaxLayers = 1024;
inline constexpr std::uint32_t kSecondSet = kMaxLayers;
inline constexpr std::uint32_t kMaxExperts = 4096;
inline constexpr std::uint32_t kMaxEmbd = 1u << 17;
inline constexpr std::uint32_t kMaxFf = 1u << 17;
inline constexpr std::uint64_t kMaxSlices = 1u << 18;
inline constexpr std::size_t kMaxNameBytes = 1024;  // read_moe() cuts a longer name

// Errors: invalid (no routed experts, a part of a model), unsupported (one tensor for each expert), corrupt (shapes
// that do not fit each other).
Result<MoeModel> read_moe(const GgufFile& file);

// The one layer of a file written by write_slices(), described as in the whole model: it has `n_expert` experts there.
// Errors: those of read_moe().
Result<MoeModel> read_moe_part(const GgufFile& file, std::uint32_t n_expert);

// Checks shapes, types and limits of a description that came from elsewhere. Errors: corrupt.
Status check(const MoeModel& model);

// The shape of a role's tensor in that layer.
std::array<std::int64_t, 3> shape_of(const MoeLayer& layer, Role role);
// Bytes of one expert's part of it; nothing where the type has no such rows.
std::optional<std::uint64_t> slab_bytes_of(const MoeLayer& layer, Role role, ggml_type type);

// What kind of block the layer's experts are, for people: "gate and up merged, swiglu, scales".
std::string variant_of(const MoeLayer& layer);

// How wide the rows are that go into an expert and come out: of its whole FFN, or of the product by one weight alone.
// {0, 0} where the layer has no such weight.
struct Widths {
    std::uint32_t n_in = 0;
    std::uint32_t n_out = 0;
};
Widths widths_of(const MoeLayer& layer, std::optional<Role> product = {});

// "blk.7.ffn_gate_exps.weight" → layer 7, role gate; "blk.7.ffn_gate_chexps.weight" → layer 7 + kSecondSet; nothing for
// any other name.
struct ExpertTensorName {
    std::uint32_t layer;
    Role role;
};
std::optional<ExpertTensorName> parse_expert_tensor_name(std::string_view name);
std::string expert_tensor_name(std::uint32_t layer, Role role);
// For people: "7", or "7, second set".
std::string layer_name(std::uint32_t layer);

}  // namespace linkcpp::model
