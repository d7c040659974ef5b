#include "expert/rounding.h"

#include <cmath>
#include <random>
#include <vector>

#include <ggml.h>
#include <gtest/gtest.h>

#include "base/bytes.h"

namespace linkcpp::expert {
namespace {

std::vector<float> normal_row(std::size_t n, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> row(n);
    for (float& x : row) { x = normal(random); }
    return row;
}

std::vector<double> rounded(Rounding rounding, const std::vector<float>& row) {
    std::vector<double> out(row.size());
    round_row(rounding, row, out);
    return out;
}

// What ggml's own code makes of the row: quantised, and back.
std::vector<float> by_ggml(ggml_type type, const std::vector<float>& row) {
    const auto n = static_cast<std::int64_t>(row.size());
    Bytes bytes(ggml_row_size(type, n));
    ggml_get_type_traits(type)->from_float_ref(row.data(), bytes.data(), n);
    std::vector<float> back(row.size());
    ggml_get_type_traits(type)->to_float(bytes.data(), back.data(), n);
    return back;
}

TEST(Rounding, is_ggmls_own) {
    const std::vector<float> row = normal_row(1024, 3);
    for (const auto& [rounding, type] : {std::pair{Rounding::f16, GGML_TYPE_F16},
                                         {Rounding::bf16, GGML_TYPE_BF16},
                                         {Rounding::q8_0, GGML_TYPE_Q8_0}}) {
        const std::vector<double> ours = rounded(rounding, row);
        const std::vector<float> theirs = by_ggml(type, row);
        for (std::size_t i = 0; i < row.size(); ++i) { ASSERT_FLOAT_EQ(static_cast<float>(ours[i]), theirs[i]); }
    }
}

// ggml has no way back from Q8_K: by hand, from a block of one scale.
TEST(Rounding, of_256_numbers_takes_the_largest_with_its_sign) {
    std::vector<float> row(256, 0.0f);
    row[0] = -4;
    row[1] = 2;
    row[2] = 4.0f / 127 * 0.4f;
    row[3] = 4.0f / 127 * 0.6f;
    const std::vector<double> out = rounded(Rounding::q8_k, row);
    EXPECT_NEAR(out[0], -4, 1e-6);
    EXPECT_NEAR(out[1], 4.0 / 127 * 64, 1e-6);  // 63.5 goes to the even 64
    EXPECT_EQ(out[2], 0);
    EXPECT_NEAR(out[3], 4.0 / 127, 1e-6);
    EXPECT_EQ(rounded(Rounding::q8_k, std::vector<float>(256, 0.0f)), std::vector<double>(256, 0.0));
}

TEST(Rounding, the_wide_scale_is_finer) {
    std::vector<float> row(32, 0.0f);
    row[0] = 1.0f / 3;
    EXPECT_NEAR(rounded(Rounding::q8_wide, row)[0], row[0], 1e-7);
    EXPECT_NE(rounded(Rounding::q8_0, row)[0], rounded(Rounding::q8_wide, row)[0]);
}

TEST(Rounding, rows_that_are_no_whole_number_of_blocks_and_names) {
    const std::vector<float> row = normal_row(70, 5);
    for (const Rounding rounding : kRoundings) {
        const std::vector<double> out = rounded(rounding, row);
        for (std::size_t i = 0; i < row.size(); ++i) { EXPECT_NEAR(out[i], row[i], 0.02); }
        EXPECT_EQ(rounding_of(to_string(rounding)), rounding);
    }
    EXPECT_EQ(rounding_of("q8"), std::nullopt);
    EXPECT_EQ(to_string(static_cast<Rounding>(99)), "unknown");
}

}  // namespace
}  // namespace linkcpp::expert
