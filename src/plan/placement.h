// Placement: which worker holds which slices. Pure and deterministic: the same input gives the same answer everywhere.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "model/moe.h"

namespace linkcpp::plan {

// The experts of one layer that a holder has: bit e is expert e.
using ExpertSet = std::vector<bool>;
// holdings[i] belongs to MoeModel::layers[i].
using Holdings = std::vector<ExpertSet>;

struct Holder {
    std::string id;
    std::uint64_t memory_bytes = 0;  // that slices may fill
    Holdings held;                   // what it holds now; empty: nothing
};

struct Placement {
    std::vector<Holdings> holders;     // in the order given
    std::uint64_t missing_slices = 0;  // without any holder: not enough memory
    std::uint64_t missing_copies = 0;  // slices × replicas that found no place, missing_slices included
    std::uint64_t moved_bytes = 0;     // slices that a holder gets and does not have yet
};

// Spreads every slice over `n_replicas` different holders. Each layer is spread by itself, in proportion to the
// holders' memory, so that every token finds its work evenly distributed. What a holder has already it keeps as far as
// its share goes. A holder gets no more than its memory takes. Fewer holders than replicas: as many copies as there are
// holders.
Placement place(const model::MoeModel& model, const std::vector<Holder>& holders, std::uint32_t n_replicas);

// What somebody holds who holds nothing.
Holdings nothing(const model::MoeModel& model);
std::uint64_t bytes_of(const model::MoeModel& model, const Holdings& holdings);
std::uint64_t count(const Holdings& holdings);

}  // namespace linkcpp::plan
