#include "expert/metrics.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace linkcpp::expert {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class T>
Result<Difference> compare_any(std::span<const T> a, std::span<const T> b) {
    if (a.size() != b.size() || a.empty()) {
        return fail(ErrorKind::invalid, "compare: expected two vectors of one length, got {} and {}", a.size(),
                    b.size());
    }
    using Word = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
    Difference difference{.n = a.size(), .identical = true};
    double largest = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        const auto x = static_cast<double>(a[i]);
        const auto y = static_cast<double>(b[i]);
        difference.identical = difference.identical && std::bit_cast<Word>(a[i]) == std::bit_cast<Word>(b[i]);
        difference.finite = difference.finite && std::isfinite(x) && std::isfinite(y);
        difference.n_told += x != 0 || y != 0 ? 1 : 0;
        largest = std::max({largest, std::abs(x), std::abs(y)});
    }
    if (!difference.finite) {
        difference.cosine = difference.relative_l2 = difference.max_abs = difference.relative_max = difference.nmse =
            difference.gain = kNaN;
        return difference;
    }
    if (largest == 0) {
        difference.cosine = 1;
        return difference;
    }
    // In units of a power of two near the largest: no square is lost below the smallest number or above the largest.
    const int exponent = std::ilogb(largest);
    double aa = 0;
    double bb = 0;
    double ab = 0;
    double dd = 0;
    double largest_difference = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        const double x = std::scalbn(static_cast<double>(a[i]), -exponent);
        const double y = std::scalbn(static_cast<double>(b[i]), -exponent);
        aa += x * x;
        bb += y * y;
        ab += x * y;
        dd += (x - y) * (x - y);
        largest_difference = std::max(largest_difference, std::abs(x - y));
    }
    difference.max_abs = std::scalbn(largest_difference, exponent);
    difference.cosine = aa == 0 || bb == 0 ? 0 : std::clamp(ab / (std::sqrt(aa) * std::sqrt(bb)), -1.0, 1.0);
    difference.nmse = bb == 0 ? kInfinity : dd / bb;
    difference.gain = bb == 0 ? kInfinity : ab / bb;
    difference.relative_l2 = std::sqrt(difference.nmse);
    difference.relative_max =
        bb == 0 ? kInfinity : largest_difference / std::sqrt(bb / static_cast<double>(difference.n_told));
    return difference;
}

}  // namespace

Result<Difference> compare(std::span<const float> a, std::span<const float> b) {
    return compare_any(a, b);
}

Result<Difference> compare(std::span<const double> a, std::span<const double> b) {
    return compare_any(a, b);
}

}  // namespace linkcpp::expert
