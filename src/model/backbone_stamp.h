// Whose experts are missing: what stands at the front of every expert tensor of a backbone, in place of the bytes.
//
//   byte 0  "linkcpp backbone"
//       16  u32  the layer's sampled expert
//       20  u32  0
//       24  SHA-256 of that expert's slice
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "base/bytes.h"
#include "base/sha256.h"

namespace linkcpp::model {

struct BackboneStamp {
    static constexpr std::size_t kBytes = 56;
    std::uint32_t expert = 0;
    Digest slice;

    bool operator==(const BackboneStamp&) const = default;
};

// The expert of a layer that stands for all of it where reading every byte would take too long. Another one in every
// layer, so that a model that differs in a few experts only is noticed too.
std::uint32_t sampled_expert(std::uint32_t layer, std::uint32_t n_expert);

std::array<std::byte, BackboneStamp::kBytes> encode(const BackboneStamp& stamp);

// Nothing when `tensor`, an expert tensor's bytes or their beginning, does not start with a stamp.
std::optional<BackboneStamp> decode_backbone_stamp(ByteView tensor);

}  // namespace linkcpp::model
