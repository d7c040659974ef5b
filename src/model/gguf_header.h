// The header of a GGUF file, checked before anything else looks at it.
//
// ggml's own reader trusts a file in places: sizes that overflow, names with a zero byte inside, and arrays as long as
// the file lead to aborts or to gigabytes of memory. So the header is walked here first, against limits and against the
// real size of the file; what passes gives ggml no reason to complain. The layout is described on top of ggml's gguf.h.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ggml.h>
#include <gguf.h>

#include "base/bytes.h"
#include "base/error.h"

namespace linkcpp::model {

// The largest known header has 10 MB (a vocabulary of 250,000 tokens), the most tensors 2,000, the most keys 100.
inline constexpr std::uint64_t kMaxGgufHeaderBytes = 64u << 20;
inline constexpr std::uint64_t kMaxGgufTensors = 1u << 15;
inline constexpr std::uint64_t kMaxGgufKeys = 1u << 12;
inline constexpr std::uint64_t kMaxGgufStrings = 1u << 21;  // in one array; ggml takes 32 bytes for each
inline constexpr std::uint64_t kMaxGgufKeyBytes = 65535;    // the format's own limit
inline constexpr std::uint64_t kMaxGgufAlignment = 1u << 20;

struct TensorInfo {
    std::string name;
    ggml_type type = GGML_TYPE_F32;
    std::array<std::int64_t, 4> ne{1, 1, 1, 1};  // ggml order, fastest dimension first
    std::uint32_t split = 0;                     // index of the file that holds it
    std::uint64_t offset = 0;                    // from the start of that file, bytes
    std::uint64_t n_bytes = 0;
};

// Bytes of a tensor of that shape; nothing when the type is unknown, a row is not a whole number of its blocks, or the
// number does not fit into 63 bits.
std::optional<std::uint64_t> tensor_bytes(std::int32_t type, const std::array<std::int64_t, 4>& ne);

// One piece of metadata as it stands in the file: the number of its type, then the value.
struct RawKey {
    std::string key;
    gguf_type type = GGUF_TYPE_UINT8;  // GGUF_TYPE_ARRAY for an array
    std::uint64_t offset = 0;          // in GgufHeader::bytes
    std::uint64_t n_bytes = 0;
};

struct GgufHeader {
    Bytes bytes;  // from the start of the file to the end of the tensor table
    std::vector<RawKey> keys;
    std::vector<TensorInfo> tensors;  // split 0; offsets from the start of the file
    std::uint64_t alignment = GGUF_DEFAULT_ALIGNMENT;
    std::uint64_t data_offset = 0;
    std::uint64_t end = 0;  // where the last tensor ends: the file is complete when it reaches this far
};

// Reads and checks the header of an open file of `file_bytes` bytes; `name` is for messages.
// Errors: corrupt, unsupported (a version of the format that ggml cannot read), failed (disk).
Result<GgufHeader> read_gguf_header(int fd, std::uint64_t file_bytes, std::string_view name);

}  // namespace linkcpp::model
