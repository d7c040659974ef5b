// What an audit needs beside dispatch: which pairs are drawn, and whether two holders' rows of a pair agree. One thread
// at a time.
//
// Devices that round alike agree to the last bits; devices that do not are further apart, and how far is known once it
// is known how each rounds. A ruling (trust/ruling.h) shows that, so the first pairs of two holders that are not alike
// are ruled on, and no more of them than that.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "expert/rounding.h"
#include "model/moe.h"
#include "trust/tolerances.h"

namespace linkcpp::coordinator {

class Auditor {
  public:
    // `share` of the pairs is drawn, at random; `seed` is nothing that a worker could know.
    Auditor(double share, std::uint64_t seed);

    // Every pair is drawn, and none may be used unchecked.
    bool checks_all() const { return share_ >= 1; }
    // Of the next n pairs those that are drawn, ascending.
    std::vector<std::uint32_t> draw(std::size_t n);

    // Rows that holders `a` and `b` have made of the same pair, or sums of the same pairs: the same bits, or numbers
    // near each other. `more`: room beside what rounding takes.
    bool agree(const model::MoeLayer& layer, std::optional<model::Role> product, const std::string& a,
               std::span<const float> row_a, const std::string& b, std::span<const float> row_b,
               trust::Tolerance more = {}) const;
    // A ruling has shown how `holder` rounds.
    void learn(const model::MoeLayer& layer, std::optional<model::Role> product, const std::string& holder,
               expert::FfnRounding rounding);

  private:
    // Kernels round by the types of weights: of one weight, or of all of an FFN.
    using Kind = std::pair<std::string, std::string>;  // holder, types
    static std::string types_of(const model::MoeLayer& layer, std::optional<model::Role> product);

    double share_;
    std::mt19937_64 random_;
    std::uint64_t skip_ = 0;  // pairs until the next that is drawn
    // Kernels differ by the size of a batch, so a holder may round in several ways.
    std::map<Kind, std::vector<expert::FfnRounding>> roundings_;
};

}  // namespace linkcpp::coordinator
