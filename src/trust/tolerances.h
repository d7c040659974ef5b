// How far two right results may be apart: one table, each line of it measured (docs/numerics.md says by which devices).
//
// Rows are compared, never whole results: a fault in one row would drown in the others. Two devices that round alike
// differ in the last bits of a product alone, so that one corrupted block, let alone a wrong expert or a shifted row,
// stands out by orders of magnitude. Between devices that round differently the rounding itself sets the tolerance.
#pragma once

#include <optional>
#include <span>

#include <ggml.h>

#include "expert/metrics.h"
#include "expert/rounding.h"
#include "model/moe.h"

namespace linkcpp::trust {

// What parts right devices is small, and it is noise: spread over all numbers of a row, and no multiple of the row.
// Faults are often neither, and are found by that long before they are large.
struct Tolerance {
    double relative_l2 = 0;
    double relative_max = 0;  // expert::Difference::relative_max

    // Never of what has a NaN or an infinity.
    bool holds(const expert::Difference& row) const;
    // How much of the tolerance a row takes; infinite when it is not finite.
    double share(const expert::Difference& row) const;
};

// How far a row's product moves when one of its numbers, which lies between two values that it can be rounded to, goes
// to the other one: relative to the product's length. Fused multiplications and the order of additions tip such
// numbers. Of a row with a NaN or an infinity, whose product is no number whatever is rounded how, it is 0.
double flip_of(expert::Rounding rounding, std::span<const float> row);
// What a flip in the input of an FFN is at its output, at most, in units of the above.
inline constexpr double kFlipThroughFfn = 2;
// With room for the few flips that a row may have.
Tolerance with_flips(Tolerance tolerance, double flip);

// Of the same product by that weight, on devices that round their rows like `a` and like `b`.
Tolerance product_tolerance(const model::ExpertTensor& tensor, expert::Rounding a, expert::Rounding b);

// Of the same whole FFN.
Tolerance ffn_tolerance(const model::MoeLayer& layer, expert::FfnRounding a, expert::FfnRounding b);

// Of one product, or of the whole FFN.
Tolerance tolerance_of(const model::MoeLayer& layer, std::optional<model::Role> product, expert::FfnRounding a,
                       expert::FfnRounding b);

// The weighted sum of rows in 32 bits against the same in double precision.
inline constexpr Tolerance kSumTolerance{2e-6, 2e-5};

}  // namespace linkcpp::trust
