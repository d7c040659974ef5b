// A file that is being fetched: what has come so far stays on disk, whatever ends the process, and is gone on with.
#pragma once

#include <cstdint>
#include <filesystem>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"
#include "base/sha256.h"

namespace linkcpp::store {

// One thread at a time, and one process: it is locked while it is open.
class PartialFile {
  public:
    // Made if needed. Errors: overloaded (somebody else is writing it), failed.
    static Result<PartialFile> open(const std::filesystem::path& path);

    std::uint64_t n_bytes() const { return n_bytes_; }
    // Appends. Errors: failed (disk full).
    Status add(ByteView bytes);
    // Whether that was ever an error.
    bool disk_failed() const { return disk_failed_; }
    // Of all bytes, those of earlier processes, too.
    Result<Digest> hash();
    // What came was wrong: begins anew.
    Status clear();

    int fd() const { return fd_.get(); }
    // Gives it its name, and its mode. Nothing may be called after that.
    Status commit(const std::filesystem::path& path, unsigned mode = 0644);
    // Deletes it. Nothing may be called after that.
    void discard();

  private:
    PartialFile(UniqueFd fd, std::filesystem::path path, std::uint64_t n_bytes)
        : fd_(std::move(fd)), path_(std::move(path)), n_bytes_(n_bytes) {}
    Status write(ByteView bytes);

    UniqueFd fd_;
    std::filesystem::path path_;
    std::uint64_t n_bytes_ = 0;
    bool disk_failed_ = false;
    Sha256 hash_;  // of the first so many
    std::uint64_t n_hashed_ = 0;
};

}  // namespace linkcpp::store
