// Putting a model together again, bit for bit, from its backbone and its slices.
//
// A backbone keeps, beside the tensors that are no experts', the *rest*: of each of the model's files all that is no
// tensor's, which is the header, the padding and what stands behind the last tensor, one after the other.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "model/gguf_file.h"
#include "model/gguf_writer.h"
#include "model/moe.h"

namespace linkcpp::model {

// Metadata keys of a backbone, each with the number of the file behind it (from 0): array of uint64, the rest's length
// in bytes and then its bytes, padded with zeros. (llama.cpp reads arrays element by element; there is a vocabulary in
// it.)
inline constexpr const char* kBackboneRestKey = "linkcpp.backbone.rest.";

// Of all files together. A backbone of a model with more has no rest.
inline constexpr std::uint64_t kMaxRestBytes = 24u << 20;

// Adds the rest of `file`'s files to the backbone that `writer` begins; of a backbone, its own model's.
// Errors: corrupt (`file` got shorter), failed (disk).
Status add_rest(const GgufFile& file, GgufWriter& writer);

// The slice of one expert: MoeLayer::slice_bytes() bytes. Called from several threads at once.
using SliceReader = std::function<Result<Bytes>(const MoeLayer& layer, std::uint32_t expert)>;

// Writes the model that `backbone` was made of: to `out`, or where it had several files to `out` with
// "-00001-of-0000N" and so on in its name. Returns their names. All are written before the first appears.
// Errors: invalid (`backbone` is none, or one without its rest), corrupt (it contradicts itself; a slice of another
// length), those of `slice`, failed (disk).
Result<std::vector<std::filesystem::path>> assemble(const GgufFile& backbone, const SliceReader& slice,
                                                    const std::filesystem::path& out);

}  // namespace linkcpp::model
