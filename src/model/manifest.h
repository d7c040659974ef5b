// A model's manifest: what its routed experts are, and the SHA-256 of every slice. The hash of the manifest's own bytes
// is the model's id: two files with the same id have the same experts, byte for byte.
//
// The bytes are JSON without white space, keys sorted, non-ASCII characters escaped:
//   {"architecture": text, "format": "linkcpp.manifest.2", "layers": [layer...], "n_embd": n, "n_layer": n, "name":
//   text}
//   layer: {"activation": Activation's number, "layer": n, "n_embd": n, "n_expert": n, "n_expert_used": n, "n_ff": n,
//           "parameters": [the activation's two numbers], "slices": [64 hexadecimal digits for each expert],
//           "tensors": [tensor...], "weights_first": true or false}
//   tensor: {"role": Role's number, "type": GGUF's number of the type}; its name and shape follow from the above
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/sha256.h"
#include "model/gguf_file.h"
#include "model/moe.h"
#include "model/slicer.h"

namespace linkcpp::model {

// The longest manifest accepted: kMaxSlices hashes and what stands around them.
inline constexpr std::size_t kMaxManifestBytes = 24u << 20;

struct Manifest {
    MoeModel model;
    // slices[i][e]: hash of expert e of model.layers[i]: SHA-256 over its slabs in the order of MoeLayer::tensors.
    std::vector<std::vector<Digest>> slices;

    // Null when that layer or expert does not exist.
    const Digest* slice(std::uint32_t layer, std::uint32_t expert) const;

    // JSON, one canonical text for one manifest (keys sorted, no white space).
    std::string to_json() const;
    // Everything in it is checked (shapes, limits, lengths, that it is canonical). Errors: corrupt.
    static Result<Manifest> from_json(std::string_view json);
    // SHA-256 of to_json().
    Digest id() const;
};

// Reads and hashes every slice, on `n_threads` threads (0: all processors), with a progress line.
// Errors: those of read_moe(), invalid (a file without the experts' bytes), corrupt, failed (disk).
Result<Manifest> make_manifest(const GgufFile& file, unsigned n_threads = 0);

// The same, kept in the user's cache folder under a name made of the files' paths, sizes and modification times,
// so that the second call is quick. A cache that cannot be written is a warning only.
Result<Manifest> load_or_make_manifest(const GgufFile& file);

// SHA-256 of a backbone's front, kept in the same way: `backbone` is compose_backbone(file). Errors: corrupt, failed.
Result<Digest> load_or_make_front_hash(const GgufFile& file, const Backbone& backbone);

// Reads one slice: its slabs concatenated, MoeLayer::slice_bytes() long. Errors: not_found, failed, corrupt.
Result<Bytes> read_slice(const GgufFile& file, const MoeLayer& layer, std::uint32_t expert);
// The same where its bytes must be those of the manifest. Errors: also corrupt when they are not, saying so.
Result<Bytes> read_slice(const GgufFile& file, const Manifest& manifest, std::uint32_t layer, std::uint32_t expert);

}  // namespace linkcpp::model
