#include "expert/ffn.h"

#include <cmath>
#include <optional>

namespace linkcpp::expert {
namespace {

using model::Activation;
using model::Role;

ggml_tensor* find(const FfnTensors& tensors, Role role) {
    const auto found = tensors.find(role);
    return found == tensors.end() ? nullptr : found->second;
}

struct Projection {
    Role weight;
    std::optional<Role> scale;
    Role bias;
};
constexpr Projection kGate{Role::gate, Role::gate_scale, Role::gate_bias};
constexpr Projection kUp{Role::up, Role::up_scale, Role::up_bias};
constexpr Projection kGateUp{Role::gate_up, Role::up_scale, Role::gate_up_bias};
constexpr Projection kDown{Role::down, Role::down_scale, Role::down_bias};

// A product with its scale and bias.
ggml_tensor* project(ggml_context* context, const FfnTensors& tensors, const Projection& projection, ggml_tensor* rows,
                     ggml_tensor* ids) {
    ggml_tensor* result = build_product(context, tensors, projection.weight, rows, ids);
    if (ggml_tensor* scale = projection.scale ? find(tensors, *projection.scale) : nullptr) {
        const std::int64_t n_expert = scale->ne[0];
        ggml_tensor* each = ggml_reshape_3d(context, scale, 1, n_expert, 1);
        each = ggml_repeat_4d(context, each, 1, n_expert, rows->ne[2], 1);
        result = ggml_mul(context, result, ggml_get_rows(context, each, ids));
    }
    if (ggml_tensor* bias = find(tensors, projection.bias)) { result = ggml_add_id(context, result, bias, ids); }
    return result;
}

ggml_tensor* activate(ggml_context* context, const model::ActivationOf& activation, ggml_tensor* gate,
                      ggml_tensor* up) {
    const auto [first, second] = activation.parameters;
    switch (activation.kind) {
        case Activation::unknown: return nullptr;
        case Activation::swiglu: return ggml_swiglu_split(context, gate, up);
        case Activation::geglu: return ggml_geglu_split(context, gate, up);
        case Activation::reglu: return ggml_reglu_split(context, gate, up);
        case Activation::swiglu_oai: return ggml_swiglu_oai(context, gate, up, first, second);
        case Activation::swiglu_clamp: return ggml_swiglu_clamp(context, gate, up, first);
        case Activation::swiglu_limited: {
            ggml_tensor* clamped = ggml_clamp(context, up, -first, first);
            ggml_tensor* activated = ggml_clamp(context, ggml_silu(context, gate), -INFINITY, first);
            return ggml_mul(context, activated, clamped);
        }
        case Activation::situ: {
            const auto bounded = [&](ggml_tensor* x, float bound) {
                return ggml_scale(context, ggml_tanh(context, ggml_scale(context, x, 1.0f / bound)), bound);
            };
            ggml_tensor* activated = ggml_mul(context, bounded(gate, first), ggml_sigmoid(context, gate));
            return ggml_mul(context, activated, second > 0 ? bounded(up, second) : up);
        }
        case Activation::silu: return ggml_silu(context, up);
        case Activation::gelu: return ggml_gelu(context, up);
        case Activation::relu: return ggml_relu(context, up);
        case Activation::relu_squared: return ggml_sqr(context, ggml_relu(context, up));
    }
    return nullptr;
}

}  // namespace

ggml_tensor* build_product(ggml_context* context, const FfnTensors& tensors, Role role, ggml_tensor* rows,
                           ggml_tensor* ids) {
    return ggml_mul_mat_id(context, find(tensors, role), rows, ids);
}

ggml_tensor* build_ffn(ggml_context* context, const model::MoeLayer& layer, const FfnTensors& tensors,
                       ggml_tensor* rows, ggml_tensor* ids) {
    if (layer.activation.kind == Activation::unknown) { return nullptr; }
    ggml_tensor* gate = nullptr;
    ggml_tensor* up = nullptr;
    if (layer.find(Role::gate_up) != nullptr) {
        ggml_tensor* both = project(context, tensors, kGateUp, rows, ids);
        const std::int64_t n_ff = both->ne[0] / 2;
        const auto half = [&](std::size_t offset) {
            return ggml_view_3d(context, both, n_ff, both->ne[1], both->ne[2], both->nb[1], both->nb[2], offset);
        };
        gate = half(0);
        up = half(static_cast<std::size_t>(n_ff) * both->nb[0]);
    } else {
        up = project(context, tensors, kUp, rows, ids);
        if (layer.find(Role::gate) != nullptr) { gate = project(context, tensors, kGate, rows, ids); }
    }
    return project(context, tensors, kDown, activate(context, layer.activation, gate, up), ids);
}

}  // namespace linkcpp::expert
