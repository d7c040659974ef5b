#include "store/slice_store.h"

#include "base/log.h"

namespace linkcpp::store {
namespace fs = std::filesystem;

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

Result<MappedFile> SliceStore::get(const Digest& hash) const {
    const fs::path file = path(hash);
    LINKCPP_TRY(MappedFile mapped, MappedFile::open(file));
    if (sha256(mapped.bytes()) == hash) { return mapped; }
    std::error_code error;
    fs::remove(file, error);
    log_warn("store: {} does not have the bytes its name says; deleted, it will be fetched again", file.string());
    return fail(ErrorKind::corrupt, "store: {} was damaged", file.string());
}

Status SliceStore::put(const Digest& hash, ByteView bytes) const {
    if (sha256(bytes) != hash) {
        return fail(ErrorKind::corrupt, "slice {}: the bytes received have another hash", hash.hex().substr(0, 12));
    }
    const fs::path file = path(hash);
    std::error_code error;
    fs::create_directories(file.parent_path(), error);
    if (error) { return fail_errno(error.value(), file.string()); }
    return write_file_atomically(file, as_text(bytes), 0444, AtomicFile::Flush::no);  // workers map it
}

}  // namespace linkcpp::store
