#include "coordinator/auditor.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace linkcpp::coordinator {
namespace {

// Of rows that two devices round alike: the last bits, and no number tipped to the next step. Right devices were 6e-7
// and 4e-6 apart at most (docs/numerics.md).
constexpr trust::Tolerance kLastBits{2e-6, 2e-5};

std::uint64_t next_skip(double share, std::mt19937_64& random) {
    if (share <= 0) { return std::numeric_limits<std::uint64_t>::max(); }
    if (share >= 1) { return 0; }
    return std::geometric_distribution<std::uint64_t>(share)(random);
}

}  // namespace

Auditor::Auditor(double share, std::uint64_t seed) : share_(share), random_(seed), skip_(next_skip(share, random_)) {}

std::vector<std::uint32_t> Auditor::draw(std::size_t n) {
    std::vector<std::uint32_t> drawn;
    std::uint64_t at = 0;
    while (skip_ < n - at) {
        at += skip_;
        drawn.push_back(static_cast<std::uint32_t>(at++));
        skip_ = next_skip(share_, random_);
    }
    if (share_ > 0) { skip_ -= n - at; }
    return drawn;
}

std::string Auditor::types_of(const model::MoeLayer& layer, std::optional<model::Role> product) {
    std::string types;
    for (const model::ExpertTensor& tensor : layer.tensors) {
        if (!model::is_weight(tensor.role) || (product && tensor.role != *product)) { continue; }
        types += ggml_type_name(tensor.type);
        types += tensor.role == model::Role::down ? " down " : " ";
    }
    return types;
}

bool Auditor::agree(const model::MoeLayer& layer, std::optional<model::Role> product, const std::string& a,
                    std::span<const float> row_a, const std::string& b, std::span<const float> row_b,
                    trust::Tolerance more) const {
    // Also of what is no number: with the same bits there is nothing to decide.
    if (row_a.size() == row_b.size() && std::memcmp(row_a.data(), row_b.data(), row_a.size_bytes()) == 0) {
        return true;
    }
    const auto difference = expert::compare(row_a, row_b);
    if (!difference || !difference->finite) { return false; }
    const auto within = [&](trust::Tolerance tolerance) {
        tolerance.relative_l2 += more.relative_l2;
        tolerance.relative_max += more.relative_max;
        return tolerance.holds(*difference);
    };
    if (within(kLastBits)) { return true; }
    const std::string types = types_of(layer, product);
    const auto of_a = roundings_.find({a, types});
    const auto of_b = roundings_.find({b, types});
    if (of_a == roundings_.end() || of_b == roundings_.end()) { return false; }
    for (const expert::FfnRounding x : of_a->second) {
        for (const expert::FfnRounding y : of_b->second) {
            if (within(trust::tolerance_of(layer, product, x, y))) { return true; }
        }
    }
    return false;
}

void Auditor::learn(const model::MoeLayer& layer, std::optional<model::Role> product, const std::string& holder,
                    expert::FfnRounding rounding) {
    std::vector<expert::FfnRounding>& known = roundings_[{holder, types_of(layer, product)}];
    if (std::ranges::find(known, rounding) == known.end()) { known.push_back(rounding); }
}

}  // namespace linkcpp::coordinator
