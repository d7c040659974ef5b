#include "expert/reference.h"

#include <algorithm>
#include <cmath>

#include <ggml.h>

namespace linkcpp::expert {
namespace {

// matrix: {columns, rows}; out: {rows}
void multiply(std::span<const float> matrix, std::span<const double> h, std::span<double> out) {
    for (std::size_t r = 0; r < out.size(); ++r) {
        const std::span<const float> row = matrix.subspan(r * h.size(), h.size());
        double sum = 0;
        for (std::size_t c = 0; c < h.size(); ++c) { sum += static_cast<double>(row[c]) * h[c]; }
        out[r] = sum;
    }
}

}  // namespace

Result<std::vector<float>> dequantise(const model::ExpertTensor& tensor, ByteView slab) {
    const auto n = static_cast<std::size_t>(tensor.ne[0] * tensor.ne[1]);
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
    expert.n_embd_ = layer.n_embd;
    expert.n_ff_ = layer.n_ff;
    std::size_t offset = 0;
    for (const model::ExpertTensor& tensor : layer.tensors) {
        LINKCPP_TRY(std::vector<float> values, dequantise(tensor, slice.subspan(offset, tensor.slab_bytes)));
        offset += tensor.slab_bytes;
        const auto half = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
        switch (tensor.role) {
            case model::Role::gate: expert.gate_ = std::move(values); break;
            case model::Role::up: expert.up_ = std::move(values); break;
            case model::Role::down: expert.down_ = std::move(values); break;
            case model::Role::gate_up:
                expert.gate_.assign(values.begin(), half);
                expert.up_.assign(half, values.end());
                break;
        }
    }
    return expert;
}

void ReferenceExpert::compute(std::span<const double> h, std::span<double> out) const {
    std::vector<double> gate(n_ff_);
    std::vector<double> up(n_ff_);
    multiply(gate_, h, gate);
    multiply(up_, h, up);
    for (std::size_t i = 0; i < n_ff_; ++i) { up[i] *= gate[i] / (1.0 + std::exp(-gate[i])); }
    multiply(down_, up, out);
}

}  // namespace linkcpp::expert
