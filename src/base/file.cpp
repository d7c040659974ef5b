#include "base/file.h"

#include <cerrno>
#include <cstdlib>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace linkcpp {

void UniqueFd::reset() {
    if (fd_ >= 0) { ::close(fd_); }
    fd_ = -1;
}

Result<std::string> read_file(const std::filesystem::path& path, std::uint64_t limit) {
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) { return fail_errno(errno, path.string()); }
    struct stat info{};
    if (::fstat(fd.get(), &info) != 0) { return fail_errno(errno, path.string()); }
    const auto size = static_cast<std::uint64_t>(info.st_size);
    if (size > limit) {
        return fail(ErrorKind::invalid, "{}: expected at most {} bytes, got {}", path.string(), limit, size);
    }
    std::string text(size, '\0');
    LINKCPP_CHECK(read_at(fd.get(), std::as_writable_bytes(std::span(text)), 0, path.string()));
    return text;
}

Status read_at(int fd, std::span<std::byte> to, std::uint64_t offset, std::string_view name) {
    while (!to.empty()) {
        const ssize_t n = ::pread(fd, to.data(), to.size(), static_cast<off_t>(offset));
        if (n < 0 && errno == EINTR) { continue; }
        if (n < 0) { return fail_errno(errno, name); }
        if (n == 0) {
            return fail(ErrorKind::corrupt, "{}: the file ends at byte {}, {} bytes too early", name, offset,
                        to.size());
        }
        to = to.subspan(static_cast<std::size_t>(n));
        offset += static_cast<std::uint64_t>(n);
    }
    return {};
}

Status write_at(int fd, ByteView bytes, std::uint64_t offset, std::string_view name) {
    while (!bytes.empty()) {
        const ssize_t n = ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
        if (n < 0 && errno == EINTR) { continue; }
        if (n < 0) { return fail_errno(errno, name); }
        bytes = bytes.subspan(static_cast<std::size_t>(n));
        offset += static_cast<std::uint64_t>(n);
    }
    return {};
}

Result<AtomicFile> AtomicFile::create(const std::filesystem::path& path, unsigned mode) {
    std::string temporary = path.string() + ".part-XXXXXX";
    UniqueFd fd(::mkostemp(temporary.data(), O_CLOEXEC));
    if (!fd) { return fail_errno(errno, path.string()); }
    AtomicFile file(std::move(fd), path, std::move(temporary));
    if (::fchmod(file.fd(), mode) != 0) { return fail_errno(errno, path.string()); }
    return file;
}

AtomicFile::~AtomicFile() {
    if (fd_) { ::unlink(temporary_.c_str()); }
}

Status AtomicFile::commit(Flush flush) {
    if (flush == Flush::yes && ::fsync(fd_.get()) != 0) { return fail_errno(errno, path_.string()); }
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) { return fail_errno(errno, path_.string()); }
    fd_.reset();
    return {};
}

Status write_file_atomically(const std::filesystem::path& path, std::string_view text, unsigned mode,
                             AtomicFile::Flush flush) {
    LINKCPP_TRY(AtomicFile file, AtomicFile::create(path, mode));
    LINKCPP_CHECK(write_at(file.fd(), as_bytes(text), 0, path.string()));
    return file.commit(flush);
}

Result<MappedFile> MappedFile::open(const std::filesystem::path& path) {
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) { return fail_errno(errno, path.string()); }
    struct stat info{};
    if (::fstat(fd.get(), &info) != 0) { return fail_errno(errno, path.string()); }
    if (!S_ISREG(info.st_mode) || info.st_size == 0) {
        return fail(ErrorKind::invalid, "{}: expected a file with content", path.string());
    }
    const auto size = static_cast<std::size_t>(info.st_size);
    void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
    if (data == MAP_FAILED) { return fail_errno(errno, path.string()); }
    return MappedFile(ByteView(static_cast<const std::byte*>(data), size));
}

MappedFile::~MappedFile() {
    if (!data_.empty()) { ::munmap(const_cast<std::byte*>(data_.data()), data_.size()); }
}

}  // namespace linkcpp
