// A GGUF model on disk, split files included: its tensor table and metadata, and where each tensor's bytes lie.
//
// Values are read by ggml's own gguf reader, once gguf_header.h's checks have passed. Every tensor lies inside its file
// and splits are complete and in order, so that no later read can go wrong but for the disk itself. Const functions may
// be called from several threads at once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <ggml.h>

#include "base/error.h"
#include "base/file.h"
#include "model/gguf_header.h"

struct gguf_context;

namespace linkcpp::model {

class GgufFile {
  public:
    // `path`: the file, or any one of its splits ("…-00001-of-0000N.gguf"; the others stand beside it).
    // `allow_missing_data`: also accept a file whose data section is cut short (header-only files, first megabytes).
    // Errors: not_found, corrupt (not a GGUF, truncated, tensors outside the file), invalid (a split is missing, not a
    // regular file), unsupported (an old version of the format).
    static Result<GgufFile> open(const std::filesystem::path& path, bool allow_missing_data = false);

    GgufFile(GgufFile&&) noexcept;
    GgufFile& operator=(GgufFile&&) noexcept;
    ~GgufFile();

    // In the order of the files' tensor tables.
    std::span<const TensorInfo> tensors() const { return tensors_; }
    // Null when there is none of that name.
    const TensorInfo* find(std::string_view name) const;

    // Metadata. Nothing when the key is missing or has another type; integers of any width are converted, negative ones
    // are nothing.
    std::optional<std::string> text(std::string_view key) const;
    std::optional<std::uint64_t> number(std::string_view key) const;
    std::optional<double> real(std::string_view key) const;
    std::optional<bool> flag(std::string_view key) const;
    // An array, or a lone value as an array of one.
    std::optional<std::vector<std::uint64_t>> numbers(std::string_view key) const;
    std::optional<std::vector<double>> reals(std::string_view key) const;
    std::optional<std::vector<std::string>> texts(std::string_view key) const;
    std::string architecture() const { return text("general.architecture").value_or(""); }

    // The first split's metadata as ggml holds it. Owned by this object.
    const gguf_context* context() const { return context_.get(); }
    // The same as bytes, in the file's order, for writers that copy it.
    std::span<const RawKey> keys() const { return header_.keys; }
    ByteView raw_value(const RawKey& key) const { return ByteView(header_.bytes).subspan(key.offset, key.n_bytes); }
    std::uint64_t alignment() const { return header_.alignment; }

    std::size_t n_splits() const { return files_.size(); }
    const std::filesystem::path& path(std::size_t split = 0) const { return files_[split].path; }
    int fd(std::size_t split) const { return files_[split].fd.get(); }
    std::uint64_t file_bytes(std::size_t split) const { return files_[split].n_bytes; }
    std::uint64_t data_offset(std::size_t split) const { return files_[split].data_offset; }
    // All splits together.
    std::uint64_t file_bytes() const;

    // Which files these are, and of what size and age: whatever follows from their bytes can be kept under this.
    std::string version() const;
    // As far as the file system can tell. Errors: corrupt (one of the files was written to since it was opened).
    Status check_unchanged() const;

    // Reads part of a tensor's bytes. Errors: invalid (outside the tensor), corrupt (file shorter than it was), failed.
    Status read(const TensorInfo& tensor, std::uint64_t offset, std::span<std::byte> to) const;

  private:
    struct Free {
        void operator()(gguf_context* context) const;
    };
    struct File {
        std::filesystem::path path;
        UniqueFd fd;
        std::uint64_t n_bytes = 0;
        std::uint64_t data_offset = 0;
        std::int64_t modified_ns = 0;  // since 1970
    };
    GgufFile() = default;
    static Result<GgufFile> open_one(const std::filesystem::path& path, bool allow_missing_data);
    static Result<GgufFile> open_splits(const std::filesystem::path& path, std::uint64_t n_splits,
                                        bool allow_missing_data);
    // Takes over another split's file and tensors.
    Status append(GgufFile split);

    std::vector<File> files_;
    GgufHeader header_;  // the first split's; its tensors have moved to tensors_
    std::unique_ptr<gguf_context, Free> context_;
    std::vector<TensorInfo> tensors_;
    std::unordered_map<std::string, std::size_t> by_name_;
};

}  // namespace linkcpp::model
