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

// The part a tensor plays in an expert's FFN. Numbers reach manifests: never reused.
enum class Role : std::uint8_t {
    gate = 1,     // {n_embd, n_ff, n_expert}      "ffn_gate_exps.weight"
    up = 2,       // {n_embd, n_ff, n_expert}      "ffn_up_exps.weight"
    down = 3,     // {n_ff, n_embd, n_expert}      "ffn_down_exps.weight"
    gate_up = 4,  // {n_embd, 2 n_ff, n_expert}    "ffn_gate_up_exps.weight": gate's rows, then up's
};
std::string_view to_string(Role role);

// How gate and up become the input of down. Numbers reach manifests and frames: never reused.
enum class Activation : std::uint8_t {
    swiglu = 1,  // silu(gate) * up
};
std::string_view to_string(Activation activation);

struct ExpertTensor {
    Role role = Role::gate;
    std::string name;  // as in the file: "blk.7.ffn_gate_exps.weight"
    ggml_type type = GGML_TYPE_F32;
    std::array<std::int64_t, 3> ne{};  // {columns, rows, n_expert}
    std::uint64_t slab_bytes = 0;      // bytes of one expert: one step along ne[2]

    bool operator==(const ExpertTensor&) const = default;
};

// One layer with routed experts. A slice is the concatenation of one expert's slabs in the order of `tensors`
// (gate, up, down or gate_up, down).
struct MoeLayer {
    std::uint32_t layer = 0;  // "blk.<layer>"
    std::uint32_t n_expert = 0;
    std::uint32_t n_expert_used = 0;
    std::uint32_t n_embd = 0;
    std::uint32_t n_ff = 0;
    Activation activation = Activation::swiglu;
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
inline constexpr std::uint32_t kMaxExperts = 4096;
inline constexpr std::uint32_t kMaxEmbd = 1u << 17;
inline constexpr std::uint32_t kMaxFf = 1u << 17;
inline constexpr std::uint64_t kMaxSlices = 1u << 18;
inline constexpr std::size_t kMaxNameBytes = 1024;  // read_moe() cuts a longer name

// Errors: invalid (no routed experts, a part of a model), unsupported (an expert block of another kind; says which),
// corrupt (shapes that do not fit each other).
Result<MoeModel> read_moe(const GgufFile& file);

// The one layer of a file written by write_slices(), described as in the whole model: `n_expert` and ne[2] are the
// whole layer's. The file's tensors hold `n_in_file` experts. Errors: those of read_moe().
Result<MoeModel> read_moe_part(const GgufFile& file, std::uint32_t n_in_file);

// Checks shapes, types and limits of a description that came from elsewhere. Errors: corrupt.
Status check(const MoeModel& model);

// "blk.7.ffn_gate_exps.weight" → layer 7, role gate; nothing for any other name.
struct ExpertTensorName {
    std::uint32_t layer;
    Role role;
};
std::optional<ExpertTensorName> parse_expert_tensor_name(std::string_view name);
std::string expert_tensor_name(std::uint32_t layer, Role role);

// Whether the expert block of that architecture is one that can be computed here: SwiGLU, the weights applied after
// down.
bool is_supported_architecture(std::string_view architecture);

}  // namespace linkcpp::model
