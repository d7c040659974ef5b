// Random weights of any type, for synthetic models: the same bytes for the same key, whoever makes which part.
//
// The types that large models use are made as bits: random quants under random scales, every bit of the format in play.
// That is a hundred times faster than quantising floats, which ggml does for the others. Mean 0; the standard deviation
// is that of the blocks' distribution (uniform quants for Q4_0, Q8_0 and K-quants, a sum of four uniform numbers for
// floats).
#pragma once

#include <cstdint>
#include <span>

#include <ggml.h>

#include "base/bytes.h"
#include "base/error.h"

namespace linkcpp::model {

struct RandomWeights {
    ggml_type type = GGML_TYPE_F32;
    std::int64_t n_columns = 0;  // elements of a row
    double deviation = 1;
    double mean = 0;        // F32 only
    std::uint64_t key = 0;  // of this tensor

    // Errors: invalid (no whole number of blocks in a row), unsupported (a type that cannot be made without data).
    Status check() const;
    std::uint64_t row_bytes() const { return ggml_row_size(type, n_columns); }
    // Fills `to`, whole rows, as rows `first_row` and following. Threads may fill different rows at the same time.
    void fill(std::int64_t first_row, std::span<std::byte> to) const;
};

// A key for a named part of something that has a seed.
std::uint64_t key_of(std::uint64_t seed, std::string_view name);

}  // namespace linkcpp::model
