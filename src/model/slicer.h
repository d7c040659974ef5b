// Cutting models: mini-GGUFs of some experts of one layer, and backbone files. Bytes are copied as they are; nothing is
// ever dequantised. An output file appears whole or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "base/error.h"
#include "model/gguf_file.h"
#include "model/moe.h"

namespace linkcpp::model {

// Metadata keys of a mini-GGUF: which layer, and the original ids of its experts in the order of ne[2].
inline constexpr const char* kSliceLayerKey = "linkcpp.slice.layer";       // uint32
inline constexpr const char* kSliceExpertsKey = "linkcpp.slice.experts";   // array of uint32
inline constexpr const char* kSliceNExpertKey = "linkcpp.slice.n_expert";  // uint32: experts the whole layer has

// Writes the slabs of `experts` of one layer as a GGUF with the layer's tensor names and types, ne[2] = experts.size().
// Errors: not_found (no such layer or expert), failed (disk).
Status write_slices(const GgufFile& file, std::uint32_t layer, std::span<const std::uint32_t> experts,
                    const std::filesystem::path& out);

struct BackboneSize {
    std::uint64_t apparent_bytes = 0;
    std::uint64_t bytes = 0;  // without the holes
};

// Writes the model as one file (or as many splits as it has, if `out` names a file: splits stand beside it under the
// same naming scheme) with the same metadata and tensor table and every routed expert tensor a hole (zeros that take no
// disk space). Errors: those of read_moe(), failed (disk).
Result<BackboneSize> write_backbone(const GgufFile& file, const std::filesystem::path& out);

}  // namespace linkcpp::model
