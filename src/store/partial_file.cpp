#include "store/partial_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/sparse.h"

namespace linkcpp::store {
namespace {

constexpr std::uint64_t kPiece = 256u << 10;

}  // namespace

Result<PartialFile> PartialFile::open(const std::filesystem::path& path) {
    while (true) {
        UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
        if (!fd) { return fail_errno(errno, path.string()); }
        if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
            if (errno != EWOULDBLOCK) { return fail_errno(errno, path.string()); }
            return fail(ErrorKind::overloaded, "{}: another process is fetching it", path.string());
        }
        struct stat locked{};
        if (::fstat(fd.get(), &locked) != 0) { return fail_errno(errno, path.string()); }
        struct stat named{};
        // Whoever held the lock until now may have renamed or deleted it.
        if (::stat(path.c_str(), &named) != 0 || named.st_ino != locked.st_ino || named.st_dev != locked.st_dev) {
            continue;
        }
        return PartialFile(std::move(fd), path, static_cast<std::uint64_t>(locked.st_size));
    }
}

Status PartialFile::add(ByteView bytes) {
    if (const Status written = write(bytes); !written) {
        disk_failed_ = true;
        return written;
    }
    if (n_hashed_ == n_bytes_) {
        hash_.add(bytes);
        n_hashed_ += bytes.size();
    }
    n_bytes_ += bytes.size();
    return {};
}

Status PartialFile::write(ByteView bytes) {
    const bool zeros = !bytes.empty() && bytes[0] == std::byte{0} &&
                       std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0;
    if (!zeros) { return write_at(fd_.get(), bytes, n_bytes_, path_.string()); }
    // A hole: models for tests are mostly zeros, and larger than disks.
    if (::ftruncate(fd_.get(), static_cast<off_t>(n_bytes_ + bytes.size())) != 0) {
        return fail_errno(errno, path_.string());
    }
    return {};
}

Result<Digest> PartialFile::hash() {
    Bytes piece(std::min(kPiece, n_bytes_ - n_hashed_));
    while (n_hashed_ < n_bytes_) {
        const auto part = std::span(piece).first(std::min<std::uint64_t>(piece.size(), n_bytes_ - n_hashed_));
        LINKCPP_CHECK(read_sparse(fd_.get(), part, n_hashed_, path_.string()));
        hash_.add(part);
        n_hashed_ += part.size();
    }
    n_hashed_ = 0;
    return hash_.finish();
}

Status PartialFile::clear() {
    if (::ftruncate(fd_.get(), 0) != 0) { return fail_errno(errno, path_.string()); }
    n_bytes_ = n_hashed_ = 0;
    (void)hash_.finish();
    return {};
}

Status PartialFile::commit(const std::filesystem::path& path, unsigned mode) {
    if (::fchmod(fd_.get(), mode) != 0 || ::rename(path_.c_str(), path.c_str()) != 0) {
        return fail_errno(errno, path.string());
    }
    fd_.reset();
    return {};
}

void PartialFile::discard() {
    ::unlink(path_.c_str());
    fd_.reset();
}

}  // namespace linkcpp::store
