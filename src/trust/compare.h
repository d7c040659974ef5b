// Two records of the same probe against each other.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "base/error.h"
#include "expert/metrics.h"
#include "trust/record.h"
#include "trust/tolerances.h"

namespace linkcpp::trust {

enum class Verdict : std::uint8_t {
    identical,   // the same bits
    equivalent,  // every row within the tolerance
    different,
};
std::string_view to_string(Verdict verdict);

struct PartComparison {
    expert::Difference all;    // of all rows as one vector
    expert::Difference worst;  // of the row that is furthest from its tolerance, or beyond it
    std::size_t worst_row = 0;
    Tolerance tolerance;  // of each row
    Verdict verdict = Verdict::different;
};

struct Comparison {
    std::map<Part, PartComparison> parts;
    Verdict verdict = Verdict::different;  // the worst part's
    // The part that decides the verdict.
    Part decisive = Part::sums;
};

// b is the one that a is measured by. Errors: invalid (not the same probe of the same slices; says what differs).
Result<Comparison> compare(const Record& a, const Record& b);

}  // namespace linkcpp::trust
