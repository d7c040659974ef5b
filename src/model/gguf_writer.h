// Writes the header of a GGUF file; the tensors' bytes go to the offsets that it gives.
//
// ggml has a writer too. This one copies metadata as the bytes they are, keeps an alignment other than 32, and needs no
// ggml_tensor for each entry.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ggml.h>
#include <gguf.h>

#include "base/bytes.h"
#include "base/error.h"
#include "model/gguf_header.h"

namespace linkcpp::model {

class GgufWriter {
  public:
    // A power of two; written as general.alignment when it is not the format's default.
    explicit GgufWriter(std::uint64_t alignment = GGUF_DEFAULT_ALIGNMENT);

    // Metadata. The caller adds each key once, and never general.alignment.
    void add(std::string_view key, std::uint32_t value);
    void add(std::string_view key, std::uint64_t value);
    void add(std::string_view key, std::int32_t value);
    void add(std::string_view key, float value);
    void add(std::string_view key, bool value);
    void add(std::string_view key, std::string_view value);
    void add(std::string_view key, const char* value) { add(key, std::string_view(value)); }
    void add(std::string_view key, std::span<const std::uint32_t> values);
    void add(std::string_view key, std::span<const std::uint64_t> values);
    void add(std::string_view key, std::span<const std::int32_t> values);
    void add(std::string_view key, std::span<const std::string> values);
    // As GgufFile::raw_value() gives it: the number of the type, then the value.
    void add_raw(std::string_view key, ByteView value);

    // Places the tensor behind those added before and returns its number.
    // Errors: invalid (tensor_bytes() knows no size for it, or the name is too long).
    Result<std::size_t> add_tensor(std::string_view name, ggml_type type, const std::array<std::int64_t, 4>& ne);

    // Everything that stands before the tensors' bytes.
    Bytes header() const;
    // The following hold once all keys and tensors are added.
    std::uint64_t offset(std::size_t tensor) const { return data_offset() + tensors_[tensor].offset; }  // in the file
    std::uint64_t n_bytes(std::size_t tensor) const { return tensors_[tensor].n_bytes; }
    std::uint64_t data_offset() const;
    std::uint64_t file_bytes() const { return data_offset() + data_bytes_; }

  private:
    void begin(std::string_view key, gguf_type type);
    void begin_array(std::string_view key, gguf_type type, std::size_t n);

    std::uint64_t alignment_;
    std::uint64_t n_keys_ = 0;
    std::uint64_t data_bytes_ = 0;
    Bytes keys_;
    Bytes table_;
    std::vector<TensorInfo> tensors_;  // offsets from the start of the data section
};

}  // namespace linkcpp::model
