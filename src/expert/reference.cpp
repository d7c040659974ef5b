#include "expert/reference.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <numeric>

#include <ggml.h>

#include "base/platform.h"

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

// In several sums, so that no addition waits for the one before it.
double dot(std::span<const float> a, std::span<const double> b) {
    std::array<double, 8> sums{};
    std::size_t i = 0;
    for (; i + sums.size() <= a.size(); i += sums.size()) {
        for (std::size_t k = 0; k < sums.size(); ++k) { sums[k] += static_cast<double>(a[i + k]) * b[i + k]; }
    }
    for (; i < a.size(); ++i) { sums[0] += static_cast<double>(a[i]) * b[i]; }
    return std::accumulate(sums.begin(), sums.end(), 0.0);
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

Result<RawFloats> dequantise(const model::ExpertTensor& tensor, ByteView slab) {
    const auto [a, b, c] = tensor.shape_with(1);
    const auto n = static_cast<std::size_t>(a * b * c);
    RawFloats values;
    values.resize(n);
    // Millions of numbers, of which each expert needs some of its own: small pages would cost more than the numbers do.
    prefer_large_pages(values.data(), n * sizeof(float));
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

std::vector<double> ReferenceExpert::multiply(Role weight, std::span<const double> row, Rounding rounding) const {
    const RawFloats& matrix = values_.at(weight);
    std::vector<double> rounded(row.begin(), row.end());
    std::vector<float> weights;
    if (rounding != Rounding::none) {
        const std::vector<float> stored(row.begin(), row.end());  // as a kernel finds them
        round_row(rounding, stored, rounded);
    }
    std::vector<double> out(matrix.size() / row.size());
    for (std::size_t r = 0; r < out.size(); ++r) {
        std::span<const float> values = std::span<const float>(matrix).subspan(r * row.size(), row.size());
        if (rounding != Rounding::none && !is_block(rounding)) {
            weights.assign(values.begin(), values.end());
            round_weights(rounding, weights);
            values = weights;
        }
        out[r] = dot(values, rounded);
    }
    return out;
}

std::vector<double> ReferenceExpert::project(Role weight, Role scale, Role bias, std::span<const double> row,
                                             Rounding rounding) const {
    const auto scales = values_.find(scale);
    const auto biases = values_.find(bias);
    std::vector<double> out = multiply(weight, row, rounding);
    for (std::size_t r = 0; r < out.size(); ++r) {
        if (scales != values_.end()) { out[r] *= static_cast<double>(scales->second.data()[0]); }
        if (biases != values_.end()) { out[r] += static_cast<double>(biases->second.data()[r]); }
    }
    return out;
}

std::vector<double> ReferenceExpert::inner(std::span<const double> h, Rounding rounding) const {
    std::vector<double> gate;
    std::vector<double> up;
    if (values_.contains(Role::gate_up)) {
        gate = project(Role::gate_up, Role::up_scale, Role::gate_up_bias, h, rounding);
        const auto half = gate.begin() + static_cast<std::ptrdiff_t>(gate.size() / 2);
        up.assign(half, gate.end());
        gate.erase(half, gate.end());
    } else {
        up = project(Role::up, Role::up_scale, Role::up_bias, h, rounding);
        if (values_.contains(Role::gate)) {
            gate = project(Role::gate, Role::gate_scale, Role::gate_bias, h, rounding);
        }
    }
    for (std::size_t i = 0; i < up.size(); ++i) { up[i] = activate(activation_, gate.empty() ? 0 : gate[i], up[i]); }
    return up;
}

std::vector<double> ReferenceExpert::outer(std::span<const double> inner, Rounding rounding) const {
    return project(Role::down, Role::down_scale, Role::down_bias, inner, rounding);
}

void ReferenceExpert::compute(std::span<const double> h, std::span<double> out, FfnRounding rounding) const {
    std::ranges::copy(outer(inner(h, rounding.input), rounding.inner), out.begin());
}

}  // namespace linkcpp::expert
