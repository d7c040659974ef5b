#include "store/slice_store.h"

#include <algorithm>
#include <cerrno>

#include <fcntl.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/log.h"

namespace linkcpp::store {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kPiece = 256u << 10;

}  // namespace

Result<SliceStore> SliceStore::open(const fs::path& dir) {
    std::error_code error;
    fs::create_directories(dir, error);
    if (error) { return fail_errno(error.value(), fmt::format("store {}", dir.string())); }
    return SliceStore(dir);
}

fs::path SliceStore::path(const Digest& hash) const {
    const std::string name = hash.hex();
    return dir_ / name.substr(0, 2) / name;
}

bool SliceStore::has(const Digest& hash) const {
    std::error_code error;
    return fs::is_regular_file(path(hash), error);
}

Status SliceStore::read(const Digest& hash, std::span<std::byte> to) const {
    const fs::path path = this->path(hash);
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) { return fail_errno(errno, path.string()); }
    struct stat info{};
    bool good = ::fstat(fd.get(), &info) == 0 && static_cast<std::size_t>(info.st_size) == to.size();
    Sha256 found;
    // In pieces that are still in the cache when they are hashed.
    for (std::size_t at = 0; good && at < to.size(); at += kPiece) {
        const std::span<std::byte> piece = to.subspan(at, std::min(kPiece, to.size() - at));
        good = read_at(fd.get(), piece, at, path.string()).has_value();
        found.add(piece);
    }
    if (good && found.finish() == hash) { return {}; }
    std::error_code error;
    fs::remove(path, error);
    log_warn("store: {} does not have the bytes its name says; deleted, it will be fetched again", path.string());
    return fail(ErrorKind::corrupt, "store: {} was damaged", path.string());
}

Status SliceStore::put(const Digest& hash, ByteView bytes) const {
    if (sha256(bytes) != hash) {
        return fail(ErrorKind::corrupt, "slice {}: the bytes received have another hash", hash.hex().substr(0, 12));
    }
    const fs::path file = path(hash);
    std::error_code error;
    fs::create_directories(file.parent_path(), error);
    if (error) { return fail_errno(error.value(), file.string()); }
    return write_file_atomically(file, as_text(bytes), 0444, AtomicFile::Flush::no);
}

}  // namespace linkcpp::store
