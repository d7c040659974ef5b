#include "trust/tolerances.h"

#include <algorithm>
#include <cmath>

namespace linkcpp::trust {
namespace {

using expert::FfnRounding;
using expert::Rounding;
using model::Role;

// Types whose kernels do the same with rows.
enum class Family : std::uint8_t { f32, half, blocks, blocks_with_minimum, super_blocks };

Family family_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32: return Family::f32;
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16: return Family::half;
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_1: return Family::blocks_with_minimum;
        default: return ggml_blck_size(type) >= 256 ? Family::super_blocks : Family::blocks;
    }
}

struct Line {
    Tolerance product;
    Tolerance ffn;
};

// PLACEHOLDER until measured
Line alike(Family family) {
    switch (family) {
        case Family::f32: return {{1e-5, 1e-4}, {1e-5, 1e-4}};
        case Family::half: return {{1e-5, 1e-4}, {1e-4, 1e-3}};
        case Family::blocks: return {{1e-5, 1e-4}, {1e-5, 1e-4}};
        case Family::blocks_with_minimum: return {{1e-3, 1e-2}, {4e-3, 4e-2}};
        case Family::super_blocks: return {{1e-5, 1e-4}, {1e-5, 1e-4}};
    }
    return {};
}

// How far a rounding is from none.
Line apart(Rounding rounding) {
    switch (rounding) {
        case Rounding::none: return {{0, 0}, {0, 0}};
        case Rounding::f16: return {{1e-3, 5e-3}, {2e-3, 1e-2}};
        case Rounding::bf16: return {{5e-3, 3e-2}, {1e-2, 5e-2}};
        case Rounding::q8_0:
        case Rounding::q8_wide: return {{8e-3, 5e-2}, {2e-2, 1e-1}};
        case Rounding::q8_k: return {{1.2e-2, 7e-2}, {3e-2, 1.5e-1}};
    }
    return {};
}

Tolerance largest(Tolerance a, Tolerance b) {
    return {std::max(a.relative_l2, b.relative_l2), std::max(a.relative_max, b.relative_max)};
}

Tolerance sum(Tolerance a, Tolerance b) {
    return {a.relative_l2 + b.relative_l2, a.relative_max + b.relative_max};
}

}  // namespace

double flip_of(Rounding rounding, std::span<const float> row) {
    const double step = expert::largest_step(rounding, row);
    if (step == 0) { return 0; }
    double squares = 0;
    for (const float x : row) { squares += static_cast<double>(x) * static_cast<double>(x); }
    return step / std::sqrt(squares);
}

Tolerance with_flips(Tolerance tolerance, double flip) {
    constexpr double kFlips = 3;
    // A flip moves all numbers of a product, by normally distributed amounts, of which one in thousands is this far
    // out.
    constexpr double kLargest = 5;
    return {tolerance.relative_l2 + kFlips * flip, tolerance.relative_max + kLargest * kFlips * flip};
}

Tolerance product_tolerance(ggml_type type, Rounding a, Rounding b) {
    const Tolerance same = alike(family_of(type)).product;
    return a == b ? same : largest(same, sum(apart(a).product, apart(b).product));
}

Tolerance ffn_tolerance(const model::MoeLayer& layer, FfnRounding a, FfnRounding b) {
    Tolerance tolerance;
    for (const model::ExpertTensor& tensor : layer.tensors) {
        if (!model::is_weight(tensor.role)) { continue; }
        const bool is_inner = tensor.role == Role::down;
        const Rounding x = is_inner ? a.inner : a.input;
        const Rounding y = is_inner ? b.inner : b.input;
        const Tolerance same = alike(family_of(tensor.type)).ffn;
        tolerance = largest(tolerance, x == y ? same : largest(same, sum(apart(x).ffn, apart(y).ffn)));
    }
    return tolerance;
}

Tolerance tolerance_of(const model::MoeLayer& layer, std::optional<Role> product, FfnRounding a, FfnRounding b) {
    if (!product) { return ffn_tolerance(layer, a, b); }
    const model::ExpertTensor* tensor = layer.find(*product);
    return tensor == nullptr ? Tolerance{} : product_tolerance(tensor->type, a.input, b.input);
}

}  // namespace linkcpp::trust
