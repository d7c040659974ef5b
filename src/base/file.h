// Files: descriptors with an owner, whole-range reads, read-only mappings, and files that appear whole or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"

namespace linkcpp {

// Owns a file descriptor; -1 is none.
class UniqueFd {
  public:
    UniqueFd() = default;
    explicit UniqueFd(int fd) : fd_(fd) {}
    ~UniqueFd() { reset(); }
    UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    UniqueFd& operator=(UniqueFd&& other) noexcept {
        if (this != &other) {
            reset();
            fd_ = std::exchange(other.fd_, -1);
        }
        return *this;
    }

    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }
    int release() { return std::exchange(fd_, -1); }
    void reset();

  private:
    int fd_ = -1;
};

// Reads a whole file of at most `limit` bytes, or a pipe to its end. Errors: not_found, invalid (too large), timeout (a
// pipe that nobody writes to), failed.
Result<std::string> read_file(const std::filesystem::path& path, std::uint64_t limit = 64u << 20);

// Holds `path`, made if needed, until the descriptor is closed or this process ends. No descriptor: another process
// holds it. Errors: failed.
Result<UniqueFd> try_lock(const std::filesystem::path& path);

// Fills `to` from `offset`. Errors: corrupt when the file ends before.
Status read_at(int fd, std::span<std::byte> to, std::uint64_t offset, std::string_view name);
Status write_at(int fd, ByteView bytes, std::uint64_t offset, std::string_view name);

// Whether a file may be renamed over what stands there. Errors: invalid (it is something else than a file).
Status check_replaceable(const std::filesystem::path& path);

// A file that gets its name by commit() and is gone otherwise, whatever ends this process: nobody ever sees half a
// file. (Where the file system has no files without a name it has a temporary one, which a SIGKILL leaves behind.)
class AtomicFile {
  public:
    // Errors: invalid (what stands under that name is no file), failed.
    static Result<AtomicFile> create(const std::filesystem::path& path, unsigned mode = 0644);
    ~AtomicFile();
    AtomicFile(AtomicFile&&) noexcept = default;
    AtomicFile& operator=(AtomicFile&&) = delete;

    int fd() const { return fd_.get(); }
    // The name it will have, for messages.
    std::string name() const { return path_.string(); }
    enum class Flush {
        yes,  // on disk before the rename: for what cannot be made again
        no,   // as cp does; a power failure soon after may leave a damaged file, which its hash gives away
    };
    // Renames over `path`.
    Status commit(Flush flush = Flush::yes);

  private:
    AtomicFile(UniqueFd fd, std::filesystem::path path, std::string temporary)
        : fd_(std::move(fd)), path_(std::move(path)), temporary_(std::move(temporary)) {}

    Status give_name();

    UniqueFd fd_;
    std::filesystem::path path_;
    std::string temporary_;  // empty: it has no name yet
};

Status write_file_atomically(const std::filesystem::path& path, std::string_view text, unsigned mode = 0644,
                             AtomicFile::Flush flush = AtomicFile::Flush::yes);

}  // namespace linkcpp
