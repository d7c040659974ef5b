#include "expert/metrics.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace linkcpp::expert {
namespace {

template <class T = float>
Difference of(const std::vector<T>& a, const std::vector<T>& b) {
    return compare(std::span<const T>(a), std::span<const T>(b)).value();
}

TEST(Metrics, hand_worked_cases) {
    const Difference d = of({3, 4}, {3, 0});
    EXPECT_DOUBLE_EQ(d.cosine, 0.6);
    EXPECT_DOUBLE_EQ(d.max_abs, 4);
    EXPECT_DOUBLE_EQ(d.relative_max, 4 / std::sqrt(4.5));
    EXPECT_DOUBLE_EQ(d.nmse, 16.0 / 9.0);
    EXPECT_DOUBLE_EQ(d.relative_l2, 4.0 / 3.0);
    EXPECT_FALSE(d.identical);
    const Difference opposite = of({1, -2}, {-1, 2});
    EXPECT_DOUBLE_EQ(opposite.cosine, -1);
    EXPECT_DOUBLE_EQ(opposite.nmse, 4);
    EXPECT_DOUBLE_EQ(of({2, 4}, {1, 2}).cosine, 1) << "length alone does not turn a vector";
    EXPECT_DOUBLE_EQ(of({2, 4}, {1, 2}).relative_l2, 1);
    EXPECT_DOUBLE_EQ(of({2, 4}, {1, 2}).gain, 2);
    EXPECT_DOUBLE_EQ(of({0, 3}, {1, 1}).gain, 1.5);
    EXPECT_DOUBLE_EQ(of({0, 1}, {1, 0}).cosine, 0);
}

TEST(Metrics, identical_means_the_same_bits) {
    EXPECT_TRUE(of({1, -2}, {1, -2}).identical);
    EXPECT_FALSE(of({0.0f}, {-0.0f}).identical);
    EXPECT_FALSE(of({1.0f}, {std::nextafter(1.0f, 2.0f)}).identical);
}

TEST(Metrics, zero_vectors) {
    const Difference both = of({0, 0}, {0, 0});
    EXPECT_DOUBLE_EQ(both.cosine, 1);
    EXPECT_DOUBLE_EQ(both.nmse, 0);
    EXPECT_DOUBLE_EQ(both.relative_l2, 0);
    EXPECT_DOUBLE_EQ(both.relative_max, 0);
    const Difference first = of({0, 0}, {1, 0});
    EXPECT_DOUBLE_EQ(first.cosine, 0);
    EXPECT_DOUBLE_EQ(first.nmse, 1);
    const Difference second = of({1, 0}, {0, 0});
    EXPECT_DOUBLE_EQ(second.cosine, 0);
    EXPECT_TRUE(std::isinf(second.nmse));
    EXPECT_TRUE(std::isinf(second.relative_l2));
    EXPECT_TRUE(std::isinf(second.relative_max));
    EXPECT_DOUBLE_EQ(second.max_abs, 1);
}

TEST(Metrics, not_a_number_and_infinity_are_never_figures) {
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
        for (const Difference& d : {of({bad, 1}, {bad, 1}), of({1, 1}, {1, bad}), of({1, bad}, {1, 1})}) {
            EXPECT_FALSE(d.finite);
            for (const double figure : {d.cosine, d.nmse, d.relative_l2, d.max_abs, d.relative_max}) {
                EXPECT_TRUE(std::isnan(figure));
            }
        }
    }
}

TEST(Metrics, zeros_of_both_tell_nothing) {
    std::vector<double> a(1000);
    std::vector<double> b(1000);
    for (std::size_t i = 0; i < 4; ++i) {
        a[i * 100] = 1.5;
        b[i * 100] = 1;
    }
    const Difference sparse = compare(std::span<const double>(a), std::span<const double>(b)).value();
    EXPECT_EQ(sparse.n, 1000u);
    EXPECT_EQ(sparse.n_told, 4u);
    EXPECT_DOUBLE_EQ(sparse.relative_max, 0.5);  // as of the four alone
    EXPECT_DOUBLE_EQ(sparse.relative_l2, 0.5);
}

TEST(Metrics, lengths) {
    const std::vector<float> one{1};
    const std::vector<float> two{1, 2};
    for (const auto& [a, b] : {std::pair{one, two}, {two, one}, {one, {}}, {{}, one}, {{}, {}}}) {
        const auto d = compare(std::span<const float>(a), std::span<const float>(b));
        ASSERT_FALSE(d);
        EXPECT_EQ(d.error().kind, ErrorKind::invalid);
    }
}

// Where squares would be lost below the smallest number, or go beyond the largest.
TEST(Metrics, the_smallest_and_the_largest_numbers) {
    const float small = std::numeric_limits<float>::denorm_min();
    const float large = std::numeric_limits<float>::max();
    for (const float unit : {small, 0x1p125f}) {
        const Difference d = of({3 * unit, 4 * unit}, {3 * unit, 0});
        EXPECT_DOUBLE_EQ(d.cosine, 0.6) << unit;
        EXPECT_DOUBLE_EQ(d.relative_l2, 4.0 / 3.0) << unit;
        EXPECT_DOUBLE_EQ(d.max_abs, 4 * static_cast<double>(unit));
    }
    for (const double unit : {std::numeric_limits<double>::denorm_min(), 1e-200, 1e300}) {
        const Difference d = of<double>({3 * unit, 4 * unit}, {3 * unit, 0});
        EXPECT_DOUBLE_EQ(d.cosine, 0.6) << unit;
        EXPECT_DOUBLE_EQ(d.nmse, 16.0 / 9.0) << unit;
    }
    EXPECT_DOUBLE_EQ(of({large}, {-large}).relative_l2, 2);
}

}  // namespace
}  // namespace linkcpp::expert
