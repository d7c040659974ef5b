#include "base/file.h"

#include <cerrno>
#include <cstdlib>

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace linkcpp {

void UniqueFd::reset() {
    if (fd_ >= 0) { ::close(fd_); }
    fd_ = -1;
}

namespace {

constexpr int kPipeWaitMs = 5000;

Result<std::string> read_stream(int fd, std::uint64_t limit, const std::string& name) {
    std::string text;
    while (true) {
        pollfd entry{fd, POLLIN, 0};
        if (::poll(&entry, 1, kPipeWaitMs) == 0) {
            return fail(ErrorKind::timeout, "{}: nothing came within {} s", name, kPipeWaitMs / 1000);
        }
        char piece[4096];
        const ssize_t n = ::read(fd, piece, sizeof piece);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) { continue; }
        if (n < 0) { return fail_errno(errno, name); }
        if (n == 0) { return text; }
        text.append(piece, static_cast<std::size_t>(n));
        if (text.size() > limit) { return fail(ErrorKind::invalid, "{}: expected at most {} bytes", name, limit); }
    }
}

}  // namespace

Result<std::string> read_file(const std::filesystem::path& path, std::uint64_t limit) {
    // Without O_NONBLOCK a FIFO that nobody writes to would hold us here for ever.
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!fd) { return fail_errno(errno, path.string()); }
    struct stat info{};
    if (::fstat(fd.get(), &info) != 0) { return fail_errno(errno, path.string()); }
    // Files of /proc have no size either.
    if (!S_ISREG(info.st_mode) || info.st_size == 0) { return read_stream(fd.get(), limit, path.string()); }
    const auto size = static_cast<std::uint64_t>(info.st_size);
    if (size > limit) {
        return fail(ErrorKind::invalid, "{}: expected at most {} bytes, got {}", path.string(), limit, size);
    }
    std::string text(size, '\0');
    LINKCPP_CHECK(read_at(fd.get(), std::as_writable_bytes(std::span(text)), 0, path.string()));
    return text;
}

Result<UniqueFd> try_lock(const std::filesystem::path& path) {
    UniqueFd lock(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!lock) { return fail_errno(errno, path.string()); }
    if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK) { return fail_errno(errno, path.string()); }
        lock.reset();
    }
    return lock;
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

Status check_replaceable(const std::filesystem::path& path) {
    struct stat info{};
    if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
        return fail(ErrorKind::invalid, "{}: expected a name for a file, got a folder, a device or a pipe",
                    path.string());
    }
    return {};
}

Result<AtomicFile> AtomicFile::create(const std::filesystem::path& path, unsigned mode) {
    LINKCPP_CHECK(check_replaceable(path));
    // A file without a name until it is whole: whatever ends this process, nothing stays behind.
    std::string temporary;
    const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
    UniqueFd fd(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    if (!fd) {  // a file system that has no such files
        temporary = path.string() + ".part-XXXXXX";
        fd = UniqueFd(::mkostemp(temporary.data(), O_CLOEXEC));
        if (!fd) { return fail_errno(errno, path.string()); }
    }
    AtomicFile file(std::move(fd), path, std::move(temporary));
    if (::fchmod(file.fd(), mode) != 0) { return fail_errno(errno, path.string()); }
    return file;
}

AtomicFile::~AtomicFile() {
    if (fd_ && !temporary_.empty()) { ::unlink(temporary_.c_str()); }
}

Status AtomicFile::commit(Flush flush) {
    if (flush == Flush::yes && ::fsync(fd_.get()) != 0) { return fail_errno(errno, path_.string()); }
    if (temporary_.empty()) { LINKCPP_CHECK(give_name()); }
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) { return fail_errno(errno, path_.string()); }
    fd_.reset();
    return {};
}

// linkat() replaces nothing, so the file gets a name of its own first; rename() does the rest.
Status AtomicFile::give_name() {
    const std::string self = "/proc/self/fd/" + std::to_string(fd_.get());
    for (int i = 0; i < 100; ++i) {
        std::string name = path_.string() + ".part-" + std::to_string(::getpid()) + "-" + std::to_string(i);
        if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0) {
            temporary_ = std::move(name);
            return {};
        }
        if (errno != EEXIST) { break; }
    }
    return fail_errno(errno, path_.string());
}

Status write_file_atomically(const std::filesystem::path& path, std::string_view text, unsigned mode,
                             AtomicFile::Flush flush) {
    LINKCPP_TRY(AtomicFile file, AtomicFile::create(path, mode));
    LINKCPP_CHECK(write_at(file.fd(), as_bytes(text), 0, path.string()));
    return file.commit(flush);
}

}  // namespace linkcpp
