#include "trust/tolerances.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace linkcpp::trust {
namespace {

// Reports print tolerances and hold rows against them: a tolerance is a number whatever a model's own numbers are.
TEST(Tolerance, is_finite_also_of_rows_that_are_not) {
    for (const float odd : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::max(), 0.0F}) {
        for (const std::size_t n_odd : {1, 32}) {
            std::vector<float> row(32 - n_odd, 1);
            row.insert(row.end(), n_odd, odd);
            for (const expert::Rounding rounding : expert::kRoundings) {
                const Tolerance tolerance = with_flips({1e-6, 1e-5}, flip_of(rounding, row));
                EXPECT_TRUE(std::isfinite(tolerance.relative_l2)) << odd;
                EXPECT_TRUE(std::isfinite(tolerance.relative_max)) << odd;
                EXPECT_GE(tolerance.relative_l2, 1e-6) << odd;
            }
        }
    }
}

}  // namespace
}  // namespace linkcpp::trust
