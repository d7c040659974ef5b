#include "trust/tolerances.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace linkcpp::trust {
namespace {

using expert::FfnRounding;
using expert::Rounding;
using model::Role;

struct Line {
    Tolerance product;
    Tolerance ffn;
};

// Q8_1 keeps the sum of a block's numbers in 16 bits, for the minimum that such weights have.
bool has_minimum(ggml_type type) {
    return type == GGML_TYPE_Q4_1 || type == GGML_TYPE_Q5_1;
}

// Devices that round alike: what is left is the order of additions, and numbers that it tips, of which blocks have
// their own account (with_flips()).
Line alike(ggml_type type, Rounding rounding, std::size_t n_in) {
    switch (rounding) {
        case Rounding::none: return {{1e-5, 1e-4}, {1e-5, 1e-4}};
        case Rounding::f16:
        case Rounding::bf16:
        case Rounding::q8_0:
        case Rounding::q8_wide:
        case Rounding::q8_k: break;
        case Rounding::f16_sums: {
            // Grows with the root of how much is added up.
            const double root = std::sqrt(static_cast<double>(n_in));
            return {{3.5e-4 * root, 3e-3 * root}, {6e-4 * root, 2.5e-3 * root}};
        }
    }
    if (has_minimum(type)) { return {{2e-3, 5e-3}, {5e-3, 2e-2}}; }
    return {{1e-5, 1e-4}, {1e-5, 1e-4}};
}

// How far a rounding is from none, for rows of normally distributed numbers.
Line apart(Rounding rounding) {
    switch (rounding) {
        case Rounding::none: return {{0, 0}, {0, 0}};
        case Rounding::f16:
        case Rounding::f16_sums: return {{1e-3, 5e-3}, {2e-3, 1e-2}};
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

bool Tolerance::holds(const expert::Difference& row) const {
    // The largest of some thousand numbers of noise in units of their root mean square, with room for columns of
    // weights that have a few large ones; one wrong number alone among n has sqrt(n).
    constexpr double kSpread = 14;
    // Noise of n numbers along a given row, in units of its length over sqrt(n); an activation bends it a little.
    constexpr double kAlong = 12;
    constexpr double kLastBits = 1e-5;
    if (!row.finite || row.relative_l2 > relative_l2 || row.relative_max > relative_max) { return false; }
    const double along = kAlong * relative_l2 / std::sqrt(static_cast<double>(std::max<std::size_t>(row.n_told, 1)));
    return row.relative_max <= kSpread * (row.relative_l2 + kLastBits) && std::abs(row.gain - 1) <= along + kLastBits;
}

double Tolerance::share(const expert::Difference& row) const {
    if (!row.finite) { return std::numeric_limits<double>::infinity(); }
    return std::max(row.relative_l2 / relative_l2, row.relative_max / relative_max);
}

double flip_of(Rounding rounding, std::span<const float> row) {
    const double step = expert::largest_step(rounding, row);
    if (step == 0) { return 0; }
    double squares = 0;
    for (const float x : row) { squares += static_cast<double>(x) * static_cast<double>(x); }
    const double flip = step / std::sqrt(squares);
    return std::isfinite(flip) ? flip : 0;
}

Tolerance with_flips(Tolerance tolerance, double flip) {
    constexpr double kFlips = 3;
    // A flip moves all numbers of a product, by normally distributed amounts, of which one in thousands is this far
    // out.
    constexpr double kLargest = 5;
    return {tolerance.relative_l2 + kFlips * flip, tolerance.relative_max + kLargest * kFlips * flip};
}

Tolerance product_tolerance(const model::ExpertTensor& tensor, Rounding a, Rounding b) {
    const auto n_in = static_cast<std::size_t>(tensor.ne[0]);
    const Tolerance both = largest(alike(tensor.type, a, n_in).product, alike(tensor.type, b, n_in).product);
    return a == b ? both : sum(both, sum(apart(a).product, apart(b).product));
}

Tolerance ffn_tolerance(const model::MoeLayer& layer, FfnRounding a, FfnRounding b) {
    Tolerance tolerance;
    for (const model::ExpertTensor& tensor : layer.tensors) {
        if (!model::is_weight(tensor.role)) { continue; }
        const bool is_inner = tensor.role == Role::down;
        const Rounding x = is_inner ? a.inner : a.input;
        const Rounding y = is_inner ? b.inner : b.input;
        const auto n_in = static_cast<std::size_t>(tensor.ne[0]);
        const Tolerance both = largest(alike(tensor.type, x, n_in).ffn, alike(tensor.type, y, n_in).ffn);
        tolerance = largest(tolerance, x == y ? both : sum(both, sum(apart(x).ffn, apart(y).ffn)));
    }
    return tolerance;
}

Tolerance tolerance_of(const model::MoeLayer& layer, std::optional<Role> product, FfnRounding a, FfnRounding b) {
    if (!product) { return ffn_tolerance(layer, a, b); }
    const model::ExpertTensor* tensor = layer.find(*product);
    return tensor == nullptr ? Tolerance{} : product_tolerance(*tensor, a.input, b.input);
}

}  // namespace linkcpp::trust
