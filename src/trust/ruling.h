// A ruling: rows that two holders have made of the same pair, or that one has, against the truth; or sums of several
// pairs' rows times their weights. A row is right when it agrees with double precision under any one rounding that
// devices are known to have (truth.h).
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "trust/truth.h"

namespace linkcpp::trust {

// What went into an expert, or into one of its weights.
struct PairInput {
    std::optional<model::Role> product;
    std::span<const float> row;
};

// An expert that it went through. `slice`: its bytes, known to be the model's.
struct Term {
    ByteView slice;
    float weight = 1;
};

// Rows that travelled as 16-bit floats are off by their rounding.
inline constexpr Tolerance kHalfTolerance{1e-3, 5e-3};

// What is said of each of `rows`, in their order: each is the sum of the terms, of one term of weight 1 an expert's row
// itself. `more`: room beside what rounding takes. Errors: those of ExpertTruth::make(), invalid (no terms, a row of
// another length, an FFN of an unknown activation).
Result<std::vector<RowFit>> rule(const model::MoeLayer& layer, std::span<const Term> terms, PairInput input,
                                 std::span<const std::span<const float>> rows, Tolerance more = {});

}  // namespace linkcpp::trust
