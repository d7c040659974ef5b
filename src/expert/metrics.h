// How far two results are apart, in double precision.
#pragma once

#include <cstddef>
#include <span>

#include "base/error.h"

namespace linkcpp::expert {

struct Difference {
    double cosine = 0;       // 1 for parallel vectors; two zero vectors count as parallel
    double relative_l2 = 0;  // |a - b| / |b|; 0 when both are zero, infinite when only b is
    double max_abs = 0;
    double relative_max =
        0;              // max_abs / the root mean square of b's n_told; 0 when both are zero, infinite when only b is
    double nmse = 0;    // relative_l2 squared
    double gain = 1;    // how long a is along b, in units of b; 1 when both are zero
    std::size_t n = 0;  // numbers compared
    std::size_t n_told = 0;  // of these, all but zeros of both, which tell nothing
    bool identical = false;  // the same bits
    bool finite = true;      // false as soon as either has a NaN or an infinity; the figures are then NaN
};

// b is the one that a is measured by. Errors: invalid (different lengths, or none).
Result<Difference> compare(std::span<const float> a, std::span<const float> b);
Result<Difference> compare(std::span<const double> a, std::span<const double> b);

}  // namespace linkcpp::expert
