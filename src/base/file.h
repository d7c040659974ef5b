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

// Fills `to` from `offset`. Errors: corrupt when the file ends before.
Status read_at(int fd, std::span<std::byte> to, std::uint64_t offset, std::string_view name);
Status write_at(int fd, ByteView bytes, std::uint64_t offset, std::string_view name);

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

// A file mapped read-only. Movable. The bytes stay valid as long as the object; a file that is cut short by
// somebody else meanwhile ends the process (SIGBUS), so map only files that this program or its user owns.
class MappedFile {
  public:
    static Result<MappedFile> open(const std::filesystem::path& path);
    MappedFile() = default;
    ~MappedFile();
    MappedFile(MappedFile&& other) noexcept : data_(std::exchange(other.data_, {})) {}
    MappedFile& operator=(MappedFile&& other) noexcept {
        std::swap(data_, other.data_);
        return *this;
    }

    ByteView bytes() const { return data_; }

  private:
    friend class MappedArray;
    explicit MappedFile(ByteView data) : data_(data) {}
    ByteView data_;
};

// Files of one size mapped one after another, each at the beginning of a page: an array whose elements are files.
class MappedArray {
  public:
    // Addresses for `n` files of `bytes` each; reading an element that has no file yet ends the process. Errors:
    // overloaded.
    static Result<MappedArray> reserve(std::size_t n, std::size_t bytes);
    MappedArray() = default;
    ~MappedArray();
    MappedArray(MappedArray&& other) noexcept { *this = std::move(other); }
    MappedArray& operator=(MappedArray&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        std::swap(stride_, other.stride_);
        return *this;
    }

    // Makes `file` element `i`; its pages are not read again. Errors: invalid (another size), failed (a process may
    // have so many mappings and no more).
    Status place(std::size_t i, MappedFile file);

    ByteView bytes() const { return data_; }
    // From one element to the next.
    std::size_t stride() const { return stride_; }

  private:
    ByteView data_;
    std::size_t bytes_ = 0;
    std::size_t stride_ = 0;
};

}  // namespace linkcpp
