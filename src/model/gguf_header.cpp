#include "model/gguf_header.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <unordered_set>

#include "base/file.h"

namespace linkcpp::model {
namespace {

constexpr std::uint64_t kChunk = 256u << 10;
constexpr std::uint64_t kMaxBytes = std::numeric_limits<std::int64_t>::max();

std::uint64_t padded(std::uint64_t n, std::uint64_t alignment) {
    return (n + alignment - 1) / alignment * alignment;
}

// Reads a file's beginning as far as it is asked for, in order.
class Cursor {
  public:
    Cursor(int fd, std::uint64_t file_bytes, std::string_view name) : fd_(fd), file_bytes_(file_bytes), name_(name) {}

    template <class T>
    Result<T> number(std::string_view what) {
        LINKCPP_CHECK(need(sizeof(T), what));
        const T value = load_le<T>(bytes_.data() + position_);
        position_ += sizeof(T);
        return value;
    }

    Result<std::string> text(std::string_view what, std::uint64_t limit) {
        LINKCPP_TRY(const auto length, number<std::uint64_t>(what));
        if (length > limit) {
            return fail(ErrorKind::corrupt, "{}: {}: expected at most {} bytes, got {} (byte {})", name_, what, limit,
                        length, position_);
        }
        LINKCPP_CHECK(need(length, what));
        std::string text(as_text(ByteView(bytes_).subspan(position_, length)));
        position_ += length;
        if (text.find('\0') != std::string::npos) {
            return fail(ErrorKind::corrupt, "{}: {}: expected text, got a zero byte in it (byte {})", name_, what,
                        position_);
        }
        return text;
    }

    // `n` things of `size` bytes each.
    Status skip(std::uint64_t n, std::uint64_t size, std::string_view what) {
        if (n > kMaxGgufHeaderBytes / size) { return too_large(what); }
        LINKCPP_CHECK(need(n * size, what));
        position_ += n * size;
        return {};
    }

    std::uint64_t position() const { return position_; }
    std::string_view name() const { return name_; }
    Bytes take_bytes() { return std::move(bytes_); }

  private:
    std::unexpected<Error> too_large(std::string_view what) const {
        return fail(ErrorKind::corrupt, "{}: {}: expected a header of at most {} bytes, got more (byte {})", name_,
                    what, kMaxGgufHeaderBytes, position_);
    }

    Status need(std::uint64_t n, std::string_view what) {
        if (n > kMaxGgufHeaderBytes - position_) { return too_large(what); }
        const std::uint64_t end = position_ + n;
        if (end > file_bytes_) {
            return fail(ErrorKind::corrupt,
                        "{}: {}: expected {} more bytes at byte {}, got the end of the file; it is cut short", name_,
                        what, n, position_);
        }
        if (end <= bytes_.size()) { return {}; }
        const std::uint64_t have = bytes_.size();
        const std::uint64_t want = std::min(file_bytes_, std::max(end, have + std::max(kChunk, have)));
        bytes_.resize(want);
        return read_at(fd_, std::span(bytes_).subspan(have), have, name_);
    }

    int fd_;
    std::uint64_t file_bytes_;
    std::string_view name_;
    std::uint64_t position_ = 0;
    Bytes bytes_;
};

Status read_start(Cursor& in, std::uint64_t& n_tensors, std::uint64_t& n_keys) {
    LINKCPP_TRY(const auto magic, in.number<std::uint32_t>("magic"));
    if (magic != 0x46554747) {  // "GGUF"
        return fail(ErrorKind::corrupt, "{}: magic: expected 'GGUF', got 0x{:08x}; this is not a GGUF model file",
                    in.name(), magic);
    }
    LINKCPP_TRY(const auto version, in.number<std::uint32_t>("version"));
    if (version != 2 && version != 3) {
        return fail(ErrorKind::unsupported,
                    "{}: GGUF version: expected 2 or 3 (little-endian), got {}; convert the model again", in.name(),
                    version);
    }
    LINKCPP_TRY(n_tensors, in.number<std::uint64_t>("number of tensors"));
    LINKCPP_TRY(n_keys, in.number<std::uint64_t>("number of keys"));
    if (n_tensors > kMaxGgufTensors) {
        return fail(ErrorKind::corrupt, "{}: number of tensors: expected at most {}, got {}", in.name(),
                    kMaxGgufTensors, n_tensors);
    }
    if (n_keys > kMaxGgufKeys) {
        return fail(ErrorKind::corrupt, "{}: number of keys: expected at most {}, got {}", in.name(), kMaxGgufKeys,
                    n_keys);
    }
    return {};
}

std::uint64_t size_of(std::int32_t type) {
    switch (type) {
        case GGUF_TYPE_UINT8:
        case GGUF_TYPE_INT8:
        case GGUF_TYPE_BOOL: return 1;
        case GGUF_TYPE_UINT16:
        case GGUF_TYPE_INT16: return 2;
        case GGUF_TYPE_UINT32:
        case GGUF_TYPE_INT32:
        case GGUF_TYPE_FLOAT32: return 4;
        case GGUF_TYPE_UINT64:
        case GGUF_TYPE_INT64:
        case GGUF_TYPE_FLOAT64: return 8;
        default: return 0;  // of no fixed size, or no type at all
    }
}

// Steps over `n` values of one type that is not an array.
Status skip_values(Cursor& in, std::int32_t type, std::uint64_t n, std::string_view key) {
    if (type == GGUF_TYPE_STRING) {
        if (n > kMaxGgufStrings) {
            return fail(ErrorKind::corrupt, "{}: '{}': expected at most {} strings, got {}", in.name(), key,
                        kMaxGgufStrings, n);
        }
        for (std::uint64_t i = 0; i < n; ++i) {
            LINKCPP_TRY(const auto length, in.number<std::uint64_t>(key));
            LINKCPP_CHECK(in.skip(length, 1, key));
        }
        return {};
    }
    if (size_of(type) == 0) {
        return fail(ErrorKind::corrupt, "{}: type of '{}': expected a simple type, got {} (byte {})", in.name(), key,
                    type, in.position());
    }
    return in.skip(n, size_of(type), key);
}

Result<RawKey> read_key(Cursor& in) {
    RawKey raw;
    LINKCPP_TRY(raw.key, in.text("key", kMaxGgufKeyBytes));
    if (raw.key.empty()) {
        return fail(ErrorKind::corrupt, "{}: key: expected a name, got none (byte {})", in.name(), in.position());
    }
    raw.offset = in.position();
    LINKCPP_TRY(auto type, in.number<std::int32_t>(raw.key));
    std::uint64_t n = 1;
    raw.type = GGUF_TYPE_ARRAY;
    if (type == GGUF_TYPE_ARRAY) {
        LINKCPP_TRY(type, in.number<std::int32_t>(raw.key));
        LINKCPP_TRY(n, in.number<std::uint64_t>(raw.key));
        LINKCPP_CHECK(skip_values(in, type, n, raw.key));
    } else {
        LINKCPP_CHECK(skip_values(in, type, 1, raw.key));
        raw.type = static_cast<gguf_type>(type);
    }
    raw.n_bytes = in.position() - raw.offset;
    return raw;
}

Result<TensorInfo> read_tensor(Cursor& in) {
    TensorInfo tensor;
    LINKCPP_TRY(tensor.name, in.text("tensor name", GGML_MAX_NAME - 1));
    LINKCPP_TRY(const auto n_dims, in.number<std::uint32_t>(tensor.name));
    if (n_dims > GGML_MAX_DIMS) {
        return fail(ErrorKind::corrupt, "{}: dimensions of '{}': expected at most {}, got {}", in.name(), tensor.name,
                    GGML_MAX_DIMS, n_dims);
    }
    for (std::uint32_t i = 0; i < n_dims; ++i) { LINKCPP_TRY(tensor.ne[i], in.number<std::int64_t>(tensor.name)); }
    LINKCPP_TRY(const auto type, in.number<std::int32_t>(tensor.name));
    LINKCPP_TRY(tensor.offset, in.number<std::uint64_t>(tensor.name));

    const auto n_bytes = tensor_bytes(type, tensor.ne);
    if (!n_bytes) {
        return fail(ErrorKind::corrupt,
                    "{}: tensor '{}': expected a known type and rows of whole blocks, got type {}, shape {{{}}}",
                    in.name(), tensor.name, type, fmt::join(tensor.ne, ", "));
    }
    tensor.type = static_cast<ggml_type>(type);
    tensor.n_bytes = *n_bytes;
    return tensor;
}

// Turns offsets within the data section into offsets within the file; they must follow one another without gaps.
Status place_tensors(GgufHeader& header, std::uint64_t end_of_table, std::string_view name) {
    header.data_offset = header.tensors.empty() ? end_of_table : padded(end_of_table, header.alignment);
    std::uint64_t at = 0;
    header.end = header.data_offset;
    for (TensorInfo& tensor : header.tensors) {
        if (tensor.offset != at) {
            return fail(ErrorKind::corrupt, "{}: offset of '{}': expected {}, got {}", name, tensor.name, at,
                        tensor.offset);
        }
        if (tensor.n_bytes > kMaxBytes / 2 - at) {
            return fail(ErrorKind::corrupt, "{}: tensor '{}': expected a file of less than 2^62 bytes, got more", name,
                        tensor.name);
        }
        tensor.offset += header.data_offset;
        header.end = tensor.offset + tensor.n_bytes;
        at += padded(tensor.n_bytes, header.alignment);
    }
    return {};
}

Status read_alignment(GgufHeader& header, std::string_view name) {
    for (const RawKey& raw : header.keys) {
        if (raw.key != GGUF_KEY_GENERAL_ALIGNMENT) { continue; }
        const bool right_type = raw.type == GGUF_TYPE_UINT32;
        const std::uint64_t value = right_type ? load_le<std::uint32_t>(header.bytes.data() + raw.offset + 4) : 0;
        if (!std::has_single_bit(value) || value > kMaxGgufAlignment) {
            return fail(ErrorKind::corrupt,
                        "{}: " GGUF_KEY_GENERAL_ALIGNMENT ": expected a uint32 power of two up to {}, got {}", name,
                        kMaxGgufAlignment, right_type ? std::to_string(value) : "another type");
        }
        header.alignment = value;
    }
    return {};
}

}  // namespace

std::optional<std::uint64_t> tensor_bytes(std::int32_t type, const std::array<std::int64_t, 4>& ne) {
    if (type < 0 || type >= GGML_TYPE_COUNT) { return std::nullopt; }
    const auto block = static_cast<std::uint64_t>(ggml_blck_size(static_cast<ggml_type>(type)));
    if (block == 0) { return std::nullopt; }  // a number that ggml no longer uses
    if (std::ranges::any_of(ne, [](std::int64_t n) { return n < 0; })) { return std::nullopt; }
    if (static_cast<std::uint64_t>(ne[0]) % block != 0) { return std::nullopt; }

    // ggml multiplies elements and bytes in 64 bits, also where a dimension is 0, so zeros count as ones here. No type
    // has more than 8 bytes an element, so this bounds the bytes as well.
    const std::uint64_t block_bytes = ggml_type_size(static_cast<ggml_type>(type));
    std::uint64_t elements = 1;
    for (const std::int64_t n : ne) {
        const auto factor = static_cast<std::uint64_t>(std::max<std::int64_t>(n, 1));
        if (factor > kMaxBytes / 256 / elements) { return std::nullopt; }
        elements *= factor;
    }
    std::uint64_t n_bytes = static_cast<std::uint64_t>(ne[0]) / block * block_bytes;
    for (std::size_t i = 1; i < ne.size(); ++i) { n_bytes *= static_cast<std::uint64_t>(ne[i]); }
    return n_bytes;
}

Result<GgufHeader> read_gguf_header(int fd, std::uint64_t file_bytes, std::string_view name) {
    Cursor in(fd, file_bytes, name);
    std::uint64_t n_tensors = 0;
    std::uint64_t n_keys = 0;
    LINKCPP_CHECK(read_start(in, n_tensors, n_keys));

    GgufHeader header;
    std::unordered_set<std::string> seen;
    for (std::uint64_t i = 0; i < n_keys; ++i) {
        LINKCPP_TRY(RawKey raw, read_key(in));
        if (!seen.insert(raw.key).second) {
            return fail(ErrorKind::corrupt, "{}: key '{}': expected it once, got it twice", name, raw.key);
        }
        header.keys.push_back(std::move(raw));
    }
    seen.clear();
    for (std::uint64_t i = 0; i < n_tensors; ++i) {
        LINKCPP_TRY(TensorInfo tensor, read_tensor(in));
        if (!seen.insert(tensor.name).second) {
            return fail(ErrorKind::corrupt, "{}: tensor '{}': expected it once, got it twice", name, tensor.name);
        }
        header.tensors.push_back(std::move(tensor));
    }
    const std::uint64_t end_of_table = in.position();
    header.bytes = in.take_bytes();
    header.bytes.resize(end_of_table);
    header.bytes.shrink_to_fit();
    LINKCPP_CHECK(read_alignment(header, name));
    LINKCPP_CHECK(place_tensors(header, end_of_table, name));
    return header;
}

}  // namespace linkcpp::model
