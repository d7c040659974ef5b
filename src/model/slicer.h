// Cutting models: mini-GGUFs of some experts of one layer, and backbone files. Bytes are copied as they are; nothing is
// ever dequantised. An output file appears whole or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "model/composition.h"
#include "model/gguf_file.h"
#include "model/moe.h"

namespace linkcpp::model {

struct Manifest;

// Metadata keys of a mini-GGUF: which layer, and the original ids of its experts in the order of ne[2]. The model's own
// keys (general.architecture, general.name, "<architecture>.…") stand beside them with the whole model's values.
inline constexpr const char* kSliceLayerKey = "linkcpp.slice.layer";       // uint32
inline constexpr const char* kSliceExpertsKey = "linkcpp.slice.experts";   // array of uint32
inline constexpr const char* kSliceNExpertKey = "linkcpp.slice.n_expert";  // uint32: experts the whole layer has

// Metadata keys of files whose experts are holes.
inline constexpr const char* kBackboneKey = "linkcpp.backbone";                     // bool, true
inline constexpr const char* kBackboneSourceKey = "linkcpp.backbone.source_bytes";  // uint64: the whole model's files
inline constexpr const char* kHeaderOnlyKey = "linkcpp.header_only";  // bool, true: every tensor is a hole

// What a backbone leaves out: the experts' weights. Biases and scales are small, and computing one product at a time
// needs them there.
bool is_left_out(const TensorInfo& tensor);

// An output replaces what stands in its place. Errors: invalid when that is one of `file`'s own files.
Status check_not_source(const GgufFile& file, const std::filesystem::path& out);

// Errors: invalid when the experts' tensors are there but their bytes are not (a backbone, a header-only file).
Status check_has_experts(const GgufFile& file);

// One slice: the slabs of one expert of a layer of `file`, in the order of MoeLayer::tensors. The expert is one of the
// layer's; `file` has all of its tensors and outlives the result.
Composition compose_slice(const GgufFile& file, const MoeLayer& layer, std::uint32_t expert);

// The slabs of `experts` of one layer, in that order, as a GGUF with the layer's tensor names and types and
// ne[2] = experts.size(). `model`: what read_moe() says of `file`, which outlives the result.
// Errors: those of check_has_experts(), invalid (no expert, or one twice), not_found (no such layer or expert).
Result<Composition> compose_slices(const GgufFile& file, const MoeModel& model, std::uint32_t layer,
                                   std::span<const std::uint32_t> experts);
// The same, written to `out`, which is replaced.
// Errors: also those of read_moe() and Composition::write(), invalid (`out` is the model itself).
Status write_slices(const GgufFile& file, std::uint32_t layer, std::span<const std::uint32_t> experts,
                    const std::filesystem::path& out);

// A file written by write_slices(), checked in every respect but the bytes of its slabs: those have their hash in the
// model's manifest.
struct SliceFile {
    GgufFile file;
    MoeLayer layer;                      // as in the whole model: `n_expert` and ne[2] count all of the layer's experts
    std::vector<std::uint32_t> experts;  // original ids; position i is step i along ne[2]

    // Reads the slice at a position: layer.slice_bytes() bytes. Errors: not_found, corrupt, failed.
    Result<Bytes> read(std::size_t position) const;
};
// Errors: those of GgufFile::open() and read_moe(), invalid (another kind of file), corrupt (it contradicts itself).
Result<SliceFile> open_slices(const std::filesystem::path& path);

struct BackboneSize {
    std::uint64_t apparent_bytes = 0;
    std::uint64_t bytes = 0;  // without the holes
};

// The model as one file, also where it has splits, with the same metadata (but for the split's own keys) and the same
// tensors, every routed expert tensor a hole: zeros that take no disk space, but for a stamp at its front that says
// whose experts are missing (backbone_stamp.h).
//
// The expert tensors stand last, all others before them in their old order: llama.cpp's loader maps and populates the
// whole file and then unmaps what lies behind the last tensor that it uses (src/llama-mmap.cpp,
// src/llama-model-loader.cpp of v0.4.0), so the holes must be one tail. `file` outlives the result. Errors: those of
// read_moe(), invalid (a header-only file), corrupt (`file` got shorter), failed (disk).
struct Backbone {
    Composition content;
    std::uint64_t front_bytes = 0;  // up to the first of the experts' tensors: the rest is holes and stamps
};
Result<Backbone> compose_backbone(const GgufFile& file);
// The same, written to `out`, which is replaced. Errors: also invalid (`out` is the model itself).
Result<BackboneSize> write_backbone(const GgufFile& file, const std::filesystem::path& out);

// Makes a backbone of an open file, which has the bytes of its front: gives it its length, and the stamps by what the
// manifest says of the model. Errors: corrupt (not a backbone's front, or not that model's), failed (disk).
Status complete_backbone(int fd, std::string_view name, std::uint64_t front_bytes, const Manifest& manifest);

}  // namespace linkcpp::model
