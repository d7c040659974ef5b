#include "model/gguf_writer.h"

namespace linkcpp::model {
namespace {

constexpr std::uint64_t kStartBytes = 24;  // magic, version, number of tensors, number of keys

void put_bytes(Bytes& to, ByteView bytes) {
    to.insert(to.end(), bytes.begin(), bytes.end());
}

template <class T>
void put(Bytes& to, T value) {
    put_bytes(to, std::as_bytes(std::span(&value, 1)));
}

void put_text(Bytes& to, std::string_view text) {
    put<std::uint64_t>(to, text.size());
    put_bytes(to, as_bytes(text));
}

}  // namespace

GgufWriter::GgufWriter(std::uint64_t alignment) : alignment_(alignment) {
    if (alignment != GGUF_DEFAULT_ALIGNMENT) { add(GGUF_KEY_GENERAL_ALIGNMENT, static_cast<std::uint32_t>(alignment)); }
}

void GgufWriter::begin(std::string_view key, gguf_type type) {
    ++n_keys_;
    put_text(keys_, key);
    put<std::int32_t>(keys_, type);
}

void GgufWriter::begin_array(std::string_view key, gguf_type type, std::size_t n) {
    begin(key, GGUF_TYPE_ARRAY);
    put<std::int32_t>(keys_, type);
    put<std::uint64_t>(keys_, n);
}

void GgufWriter::add(std::string_view key, std::uint32_t value) {
    begin(key, GGUF_TYPE_UINT32);
    put(keys_, value);
}

void GgufWriter::add(std::string_view key, std::uint64_t value) {
    begin(key, GGUF_TYPE_UINT64);
    put(keys_, value);
}

void GgufWriter::add(std::string_view key, std::int32_t value) {
    begin(key, GGUF_TYPE_INT32);
    put(keys_, value);
}

void GgufWriter::add(std::string_view key, float value) {
    begin(key, GGUF_TYPE_FLOAT32);
    put(keys_, value);
}

void GgufWriter::add(std::string_view key, bool value) {
    begin(key, GGUF_TYPE_BOOL);
    put<std::uint8_t>(keys_, value ? 1 : 0);
}

void GgufWriter::add(std::string_view key, std::string_view value) {
    begin(key, GGUF_TYPE_STRING);
    put_text(keys_, value);
}

void GgufWriter::add(std::string_view key, std::span<const std::uint32_t> values) {
    begin_array(key, GGUF_TYPE_UINT32, values.size());
    put_bytes(keys_, std::as_bytes(values));
}

void GgufWriter::add(std::string_view key, std::span<const std::uint64_t> values) {
    begin_array(key, GGUF_TYPE_UINT64, values.size());
    put_bytes(keys_, std::as_bytes(values));
}

void GgufWriter::add(std::string_view key, std::span<const std::int32_t> values) {
    begin_array(key, GGUF_TYPE_INT32, values.size());
    put_bytes(keys_, std::as_bytes(values));
}

void GgufWriter::add(std::string_view key, std::span<const std::string> values) {
    begin_array(key, GGUF_TYPE_STRING, values.size());
    for (const std::string& value : values) { put_text(keys_, value); }
}

void GgufWriter::add_raw(std::string_view key, ByteView value) {
    ++n_keys_;
    put_text(keys_, key);
    put_bytes(keys_, value);
}

Result<std::size_t> GgufWriter::add_tensor(std::string_view name, ggml_type type,
                                           const std::array<std::int64_t, 4>& ne) {
    const auto n_bytes = tensor_bytes(type, ne);
    if (!n_bytes || name.size() >= GGML_MAX_NAME) {
        return fail(ErrorKind::invalid,
                    "tensor '{}': expected a name of less than {} bytes and rows of whole blocks of {} elements, got "
                    "shape {{{}}}",
                    name, GGML_MAX_NAME, ggml_blck_size(type), fmt::join(ne, ", "));
    }
    // Trailing ones are left out, as ggml does.
    std::uint32_t n_dims = 4;
    while (n_dims > 1 && ne[n_dims - 1] == 1) { --n_dims; }
    put_text(table_, name);
    put(table_, n_dims);
    for (std::uint32_t i = 0; i < n_dims; ++i) { put(table_, ne[i]); }
    put<std::int32_t>(table_, type);
    put(table_, data_bytes_);
    tensors_.push_back({.name = std::string(name), .type = type, .ne = ne, .offset = data_bytes_, .n_bytes = *n_bytes});
    data_bytes_ += (*n_bytes + alignment_ - 1) / alignment_ * alignment_;
    return tensors_.size() - 1;
}

std::uint64_t GgufWriter::data_offset() const {
    return (kStartBytes + keys_.size() + table_.size() + alignment_ - 1) / alignment_ * alignment_;
}

Bytes GgufWriter::header() const {
    Bytes bytes;
    bytes.reserve(data_offset());
    put_bytes(bytes, as_bytes(GGUF_MAGIC));
    put<std::uint32_t>(bytes, GGUF_VERSION);
    put<std::uint64_t>(bytes, tensors_.size());
    put(bytes, n_keys_);
    put_bytes(bytes, keys_);
    put_bytes(bytes, table_);
    bytes.resize(data_offset());
    return bytes;
}

}  // namespace linkcpp::model
