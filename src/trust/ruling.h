// A ruling: rows that two holders have made of the same pair, or that one has, against the truth. A row is right when
// it agrees with double precision under any one rounding that devices are known to have (truth.h).
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "trust/truth.h"

namespace linkcpp::trust {

// One pair: what went into an expert, or into one of its weights.
struct PairInput {
    std::optional<model::Role> product;
    std::span<const float> row;
};

// What is said of each of `rows`, in their order. `slice`: the expert's, whose bytes are known to be the model's.
// Errors: those of ExpertTruth::make(), invalid (a row of another length, an FFN of an unknown activation).
Result<std::vector<RowFit>> rule(const model::MoeLayer& layer, ByteView slice, PairInput input,
                                 std::span<const std::span<const float>> rows);

}  // namespace linkcpp::trust
