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

// A model with many zeros in its weights has rows with many: noise is where something is.
TEST(Tolerance, holds_for_noise_on_the_few_numbers_of_a_row_that_are_not_zero) {
    for (const std::size_t step : {1u, 3u, 100u, 700u}) {
        std::vector<double> truth(3000);
        std::vector<double> row(3000);
        for (std::size_t i = 0; i < row.size(); i += step) {
            const double sign = i / step % 2 == 0 ? 1 : -1;
            truth[i] = sign * (1 + 0.1 * static_cast<double>(i % 7));
            row[i] = truth[i] + 5e-5 * (i / step % 3 == 0 ? 1 : -1);
        }
        const auto noise = expert::compare(std::span<const double>(row), std::span<const double>(truth)).value();
        EXPECT_TRUE((Tolerance{1e-3, 1e-2}.holds(noise))) << step;
        // One that is wrong where nothing should be is a fault as before.
        row[1] = 0.9 * 1e-2;
        const auto fault = expert::compare(std::span<const double>(row), std::span<const double>(truth)).value();
        if (step == 1) { continue; }
        EXPECT_FALSE((Tolerance{1e-4, 1e-2}.holds(fault))) << step;
    }
}

}  // namespace
}  // namespace linkcpp::trust
