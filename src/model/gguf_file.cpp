#include "model/gguf_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>

#include <fcntl.h>
#include <gguf.h>
#include <sys/stat.h>

#include "model/split_name.h"

namespace linkcpp::model {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSplitNoKey = "split.no";
constexpr const char* kSplitCountKey = "split.count";
constexpr const char* kSplitTensorsKey = "split.tensors.count";

// Gives ggml the header that was checked, and zeros for the padding after it.
std::size_t read_from_header(void* header, void* to, std::uint64_t offset, std::size_t length) {
    const auto& bytes = static_cast<const GgufHeader*>(header)->bytes;
    std::memset(to, 0, length);
    if (offset < bytes.size()) {
        std::memcpy(to, bytes.data() + offset, std::min<std::uint64_t>(length, bytes.size() - offset));
    }
    return length;
}

gguf_context* parse(GgufHeader& header) {
    return gguf_init_from_callback(read_from_header, &header, 0, header.data_offset,
                                   {.no_alloc = true, .ctx = nullptr});
}

// Calls `use` with a pointer to the first of the values of that key, typed as they are, and their number. Not for text.
template <class Use>
void with_values(const gguf_context* context, std::string_view key, Use&& use) {
    const std::int64_t id = gguf_find_key(context, std::string(key).c_str());
    if (id < 0) { return; }
    gguf_type type = gguf_get_kv_type(context, id);
    std::size_t n = 1;
    if (type == GGUF_TYPE_ARRAY) {
        type = gguf_get_arr_type(context, id);
        n = gguf_get_arr_n(context, id);
    }
    if (type == GGUF_TYPE_STRING) { return; }
    const void* data = gguf_get_arr_data(context, id);  // also a lone value's
    switch (type) {
        case GGUF_TYPE_UINT8: return use(static_cast<const std::uint8_t*>(data), n);
        case GGUF_TYPE_INT8: return use(static_cast<const std::int8_t*>(data), n);
        case GGUF_TYPE_UINT16: return use(static_cast<const std::uint16_t*>(data), n);
        case GGUF_TYPE_INT16: return use(static_cast<const std::int16_t*>(data), n);
        case GGUF_TYPE_UINT32: return use(static_cast<const std::uint32_t*>(data), n);
        case GGUF_TYPE_INT32: return use(static_cast<const std::int32_t*>(data), n);
        case GGUF_TYPE_UINT64: return use(static_cast<const std::uint64_t*>(data), n);
        case GGUF_TYPE_INT64: return use(static_cast<const std::int64_t*>(data), n);
        case GGUF_TYPE_FLOAT32: return use(static_cast<const float*>(data), n);
        case GGUF_TYPE_FLOAT64: return use(static_cast<const double*>(data), n);
        default: return;
    }
}

bool is_array(const gguf_context* context, std::string_view key) {
    const std::int64_t id = gguf_find_key(context, std::string(key).c_str());
    return id >= 0 && gguf_get_kv_type(context, id) == GGUF_TYPE_ARRAY;
}

std::int64_t modified_ns(const struct stat& info) {
    return std::int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec;
}

}  // namespace

void GgufFile::Free::operator()(gguf_context* context) const {
    gguf_free(context);
}

GgufFile::GgufFile(GgufFile&&) noexcept = default;
GgufFile& GgufFile::operator=(GgufFile&&) noexcept = default;
GgufFile::~GgufFile() = default;

Result<GgufFile> GgufFile::open(const fs::path& path, bool allow_missing_data) {
    LINKCPP_TRY(GgufFile one, open_one(path, allow_missing_data));
    const std::uint64_t n_splits = one.number(kSplitCountKey).value_or(1);
    if (n_splits <= 1) { return one; }
    return open_splits(path, n_splits, allow_missing_data);
}

Result<GgufFile> GgufFile::open_one(const fs::path& path, bool allow_missing_data) {
    File file{.path = path, .fd = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK))};
    if (!file.fd) { return fail_errno(errno, path.string()); }
    struct stat info{};
    if (::fstat(file.fd.get(), &info) != 0) { return fail_errno(errno, path.string()); }
    if (!S_ISREG(info.st_mode)) {
        return fail(ErrorKind::invalid, "{}: expected a GGUF model file, got something that is not a file",
                    path.string());
    }
    file.n_bytes = static_cast<std::uint64_t>(info.st_size);
    file.modified_ns = modified_ns(info);

    GgufFile result;
    LINKCPP_TRY(result.header_, read_gguf_header(file.fd.get(), file.n_bytes, path.string()));
    if (result.header_.end > file.n_bytes && !allow_missing_data) {
        return fail(ErrorKind::corrupt,
                    "{}: expected {} bytes, got {}: the file is cut short; download or copy it again", path.string(),
                    result.header_.end, file.n_bytes);
    }
    result.context_.reset(parse(result.header_));
    if (result.context_ == nullptr) {
        return fail(ErrorKind::corrupt, "{}: expected a GGUF header that ggml can read, got one that it refuses",
                    path.string());
    }
    file.data_offset = result.header_.data_offset;
    result.files_.push_back(std::move(file));
    for (TensorInfo& tensor : result.header_.tensors) {
        result.by_name_.emplace(tensor.name, result.tensors_.size());
        result.tensors_.push_back(std::move(tensor));
    }
    result.header_.tensors.clear();
    return result;
}

Result<GgufFile> GgufFile::open_splits(const fs::path& path, std::uint64_t n_splits, bool allow_missing_data) {
    const auto name = parse_split_name(path.filename().string());
    if (!name || name->count != n_splits || name->number < 1 || name->number > n_splits) {
        return fail(ErrorKind::invalid,
                    "{}: expected the name of one of {} splits, \"…-00001-of-{:05}.gguf\"; give the splits their "
                    "original names back, or merge them with llama-gguf-split --merge",
                    path.string(), n_splits, n_splits);
    }
    std::optional<GgufFile> all;
    for (std::uint64_t i = 0; i < n_splits; ++i) {
        const fs::path beside = path.parent_path() / split_name(*name, i);
        auto split = open_one(beside, allow_missing_data);
        if (!split && split.error().kind == ErrorKind::not_found) {
            return fail(ErrorKind::invalid, "{}: split {} of {} is missing; all splits have to stand in one folder",
                        beside.string(), i + 1, n_splits);
        }
        if (!split) { return std::unexpected(std::move(split).error()); }
        if (split->number(kSplitNoKey) != i || split->number(kSplitCountKey) != n_splits) {
            return fail(ErrorKind::invalid, "{}: expected split {} of {}, got split {} of {} under this name",
                        beside.string(), i + 1, n_splits, split->number(kSplitNoKey).value_or(0) + 1,
                        split->number(kSplitCountKey).value_or(0));
        }
        if (!all) {
            all = *std::move(split);
        } else {
            LINKCPP_CHECK(all->append(*std::move(split)));
        }
    }
    const std::uint64_t expected = all->number(kSplitTensorsKey).value_or(all->tensors_.size());
    if (expected != all->tensors_.size()) {
        return fail(ErrorKind::corrupt, "{}: expected {} tensors in all splits, got {}; download the model again",
                    path.string(), expected, all->tensors_.size());
    }
    return *std::move(all);
}

Status GgufFile::append(GgufFile split) {
    for (TensorInfo& tensor : split.tensors_) {
        if (!by_name_.emplace(tensor.name, tensors_.size()).second) {
            return fail(ErrorKind::corrupt, "{}: tensor '{}': expected it in one split, got it in two",
                        split.path().string(), tensor.name);
        }
        tensor.split = static_cast<std::uint32_t>(files_.size());
        tensors_.push_back(std::move(tensor));
    }
    files_.push_back(std::move(split.files_.front()));
    return {};
}

const TensorInfo* GgufFile::find(std::string_view name) const {
    const auto found = by_name_.find(std::string(name));
    return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

std::optional<std::string> GgufFile::text(std::string_view key) const {
    const std::int64_t id = gguf_find_key(context(), std::string(key).c_str());
    if (id < 0 || gguf_get_kv_type(context(), id) != GGUF_TYPE_STRING) { return std::nullopt; }
    return gguf_get_val_str(context(), id);
}

std::optional<std::vector<std::string>> GgufFile::texts(std::string_view key) const {
    const std::int64_t id = gguf_find_key(context(), std::string(key).c_str());
    if (id < 0 || gguf_get_kv_type(context(), id) != GGUF_TYPE_ARRAY ||
        gguf_get_arr_type(context(), id) != GGUF_TYPE_STRING) {
        return std::nullopt;
    }
    std::vector<std::string> result;
    for (std::size_t i = 0; i < gguf_get_arr_n(context(), id); ++i) {
        result.emplace_back(gguf_get_arr_str(context(), id, i));
    }
    return result;
}

std::optional<bool> GgufFile::flag(std::string_view key) const {
    const std::int64_t id = gguf_find_key(context(), std::string(key).c_str());
    if (id < 0 || gguf_get_kv_type(context(), id) != GGUF_TYPE_BOOL) { return std::nullopt; }
    return gguf_get_val_bool(context(), id);
}

std::optional<std::vector<std::uint64_t>> GgufFile::numbers(std::string_view key) const {
    std::optional<std::vector<std::uint64_t>> result;
    with_values(context(), key, [&]<class T>(const T* values, std::size_t n) {
        if constexpr (std::is_integral_v<T>) {
            if (std::any_of(values, values + n, [](T value) { return std::is_signed_v<T> && value < T{}; })) { return; }
            result.emplace(values, values + n);
        }
    });
    return result;
}

std::optional<std::vector<double>> GgufFile::reals(std::string_view key) const {
    std::optional<std::vector<double>> result;
    with_values(context(), key, [&]<class T>(const T* values, std::size_t n) {
        if constexpr (std::is_floating_point_v<T>) { result.emplace(values, values + n); }
    });
    return result;
}

std::optional<std::uint64_t> GgufFile::number(std::string_view key) const {
    if (is_array(context(), key)) { return std::nullopt; }
    const auto all = numbers(key);
    return all ? std::optional(all->front()) : std::nullopt;
}

std::optional<double> GgufFile::real(std::string_view key) const {
    if (is_array(context(), key)) { return std::nullopt; }
    const auto all = reals(key);
    return all ? std::optional(all->front()) : std::nullopt;
}

std::uint64_t GgufFile::file_bytes() const {
    std::uint64_t sum = 0;
    for (const File& file : files_) { sum += file.n_bytes; }
    return sum;
}

std::string GgufFile::version() const {
    std::string version;
    for (const File& file : files_) {
        std::error_code error;
        const fs::path path = fs::canonical(file.path, error);
        version +=
            fmt::format("{}\n{} {}\n", error ? file.path.string() : path.string(), file.n_bytes, file.modified_ns);
    }
    return version;
}

Status GgufFile::check_unchanged() const {
    for (const File& file : files_) {
        struct stat info{};
        if (::fstat(file.fd.get(), &info) != 0) { return fail_errno(errno, file.path.string()); }
        if (static_cast<std::uint64_t>(info.st_size) != file.n_bytes || modified_ns(info) != file.modified_ns) {
            return fail(ErrorKind::corrupt,
                        "{}: this file has been written to since it was opened; start again what serves it",
                        file.path.string());
        }
    }
    return {};
}

Status GgufFile::read(const TensorInfo& tensor, std::uint64_t offset, std::span<std::byte> to) const {
    if (offset > tensor.n_bytes || to.size() > tensor.n_bytes - offset || tensor.split >= files_.size()) {
        return fail(ErrorKind::invalid, "'{}': expected a range within its {} bytes, got {} bytes from {}", tensor.name,
                    tensor.n_bytes, to.size(), offset);
    }
    const File& file = files_[tensor.split];
    return read_at(file.fd.get(), to, tensor.offset + offset, file.path.string());
}

}  // namespace linkcpp::model
