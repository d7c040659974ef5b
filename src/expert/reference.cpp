#include "expert/reference.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <ggml.h>

namespace linkcpp::expert {
namespace {

using model::Activation;
using model::Role;

double sigmoid(double x) {
    return 1.0 / (1.0 + std::exp(-x));
}
double silu(double x) {
    return x * sigmoid(x);
}
// The approximation by tanh, as ggml's.
double gelu(double x) {
    return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * x * (1.0 + 0.044715 * x * x)));
}
double relu(double x) {
    return std::max(x, 0.0);
}
double bounded(double x, double bound) {
    return bound * std::tanh(x / bound);
}

double activate(const model::ActivationOf& activation, double gate, double up) {
    const double first = activation.parameters[0];
    const double second = activation.parameters[1];
    switch (activation.kind) {
        case Activation::unknown: return 0;
        case Activation::swiglu: return silu(gate) * up;
        case Activation::geglu: return gelu(gate) * up;
        case Activation::reglu: return relu(gate) * up;
        case Activation::swiglu_oai: {
            const double x = std::min(gate, second);
            return x * sigmoid(first * x) * (1.0 + std::clamp(up, -second, second));
        }
        case Activation::swiglu_clamp: return silu(std::min(gate, first)) * std::clamp(up, -first, first);
        case Activation::swiglu_limited: return std::min(silu(gate), first) * std::clamp(up, -first, first);
        case Activation::situ: return bounded(gate, first) * sigmoid(gate) * (second > 0 ? bounded(up, second) : up);
        case Activation::silu: return silu(up);
        case Activation::gelu: return gelu(up);
        case Activation::relu: return relu(up);
        case Activation::relu_squared: return relu(up) * relu(up);
    }
    return 0;
}

}  // namespace

Result<std::vector<float>> dequantise(const model::ExpertTensor& tensor, ByteView slab) {
    const auto [a, b, c] = tensor.shape_with(1);
    const auto n = static_cast<std::size_t>(a * b * c);
    std::vector<float> values(n);
    if (tensor.type == GGML_TYPE_F32) {
        std::memcpy(values.data(), slab.data(), n * sizeof(float));
        return values;
    }
    const ggml_type_traits* traits = ggml_get_type_traits(tensor.type);
    if (traits == nullptr || traits->to_float == nullptr) {
        return fail(ErrorKind::unsupported, "{}: type {} cannot be dequantised", tensor.name,
                    ggml_type_name(tensor.type));
    }
    traits->to_float(slab.data(), values.data(), static_cast<std::int64_t>(n));
    return values;
}

Result<ReferenceExpert> ReferenceExpert::make(const model::MoeLayer& layer, ByteView slice) {
    if (slice.size() != layer.slice_bytes()) {
        return fail(ErrorKind::corrupt, "slice of layer {}: expected {} bytes, got {}", layer.layer,
                    layer.slice_bytes(), slice.size());
    }
    ReferenceExpert expert;
    expert.activation_ = layer.activation;
    std::size_t offset = 0;
    for (const model::ExpertTensor& tensor : layer.tensors) {
        LINKCPP_TRY(expert.values_[tensor.role], dequantise(tensor, slice.subspan(offset, tensor.slab_bytes)));
        offset += tensor.slab_bytes;
    }
    return expert;
}

std::vector<double> ReferenceExpert::project(Role weight, Role scale, Role bias, std::span<const double> rows) const {
    const std::vector<float>& matrix = values_.at(weight);
    const auto scales = values_.find(scale);
    const auto biases = values_.find(bias);
    std::vector<double> out(matrix.size() / rows.size());
    for (std::size_t r = 0; r < out.size(); ++r) {
        const std::span<const float> row = std::span(matrix).subspan(r * rows.size(), rows.size());
        double sum = 0;
        for (std::size_t c = 0; c < rows.size(); ++c) { sum += static_cast<double>(row[c]) * rows[c]; }
        if (scales != values_.end()) { sum *= scales->second.front(); }
        if (biases != values_.end()) { sum += biases->second[r]; }
        out[r] = sum;
    }
    return out;
}

std::vector<double> ReferenceExpert::activated(std::span<const double> h) const {
    std::vector<double> gate;
    std::vector<double> up;
    if (values_.contains(Role::gate_up)) {
        gate = project(Role::gate_up, Role::up_scale, Role::gate_up_bias, h);
        const auto half = gate.begin() + static_cast<std::ptrdiff_t>(gate.size() / 2);
        up.assign(half, gate.end());
        gate.erase(half, gate.end());
    } else {
        up = project(Role::up, Role::up_scale, Role::up_bias, h);
        if (values_.contains(Role::gate)) { gate = project(Role::gate, Role::gate_scale, Role::gate_bias, h); }
    }
    for (std::size_t i = 0; i < up.size(); ++i) { up[i] = activate(activation_, gate.empty() ? 0 : gate[i], up[i]); }
    return up;
}

void ReferenceExpert::compute(std::span<const double> h, std::span<double> out) const {
    std::ranges::copy(project(Role::down, Role::down_scale, Role::down_bias, activated(h)), out.begin());
}

}  // namespace linkcpp::expert
