// Rows that travel as 16-bit floats. ggml's conversions, for bytes that lie at any alignment.
#pragma once

#include <span>

#include "base/bytes.h"

namespace linkcpp::expert {

// from.size() == 2 * to.size()
void halves_to_floats(ByteView from, std::span<float> to);
// to.size() == 2 * from.size(); round to nearest even
void floats_to_halves(std::span<const float> from, std::span<std::byte> to);

}  // namespace linkcpp::expert
