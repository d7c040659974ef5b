#include "store/slice_store.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <mutex>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "base/platform.h"
#include "base/sparse.h"
#include "base/units.h"

namespace linkcpp::store {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kPiece = 256u << 10;
constexpr const char* kPartials = "partial";
constexpr const char* kManifests = "manifests";
// A slice's time of use is not written down more often than this.
constexpr std::int64_t kUseS = 60;
// With a limit some room is made at once, so that not every slice looks through the whole folder.
constexpr std::uint64_t kRoomAtOnce = 32;  // one of so many of the limit

std::int64_t now_s() {
    return std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
}

// The files of a folder, their names and what the system says of them; nothing where there is no folder.
template <class Visit>
void for_each_file(const fs::path& dir, const Visit& visit) {
    std::error_code error;
    for (fs::directory_iterator entry(dir, error), end; !error && entry != end; entry.increment(error)) {
        struct stat info{};
        if (::lstat(entry->path().c_str(), &info) == 0 && S_ISREG(info.st_mode)) {
            visit(entry->path(), entry->path().filename().string(), info);
        }
    }
}

// Reads all of an open file, hashing each piece while it is still in the caches; `to` is given all the pieces in turn
// and says where they belong.
template <class Place>
Result<Digest> read_and_hash(int fd, std::uint64_t n_bytes, const std::string& name, const Place& place) {
    Sha256 hash;
    for (std::uint64_t at = 0; at < n_bytes; at += kPiece) {
        const std::span<std::byte> piece = place(at, std::min<std::uint64_t>(kPiece, n_bytes - at));
        LINKCPP_CHECK(read_sparse(fd, piece, at, name));
        hash.add(piece);
    }
    return hash.finish();
}

Result<Digest> hash_of(int fd, std::uint64_t n_bytes, const std::string& name) {
    Bytes buffer(std::min<std::uint64_t>(kPiece, n_bytes));
    return read_and_hash(fd, n_bytes, name, [&](std::uint64_t, std::uint64_t n) { return std::span(buffer).first(n); });
}

void note_use(int fd, const struct stat& info) {
    if (now_s() - info.st_mtim.tv_sec > kUseS) { ::futimens(fd, nullptr); }
}

void remove_damaged(const fs::path& path) {
    std::error_code error;
    fs::remove(path, error);
    log_warn("store: {} does not have the bytes its name says; deleted, it will be fetched again", path.string());
}

}  // namespace

struct SliceStore::State {
    fs::path dir;
    std::uint64_t limit = 0;
    std::mutex mutex;                          // guards the next two
    std::set<Digest> protected_;               // slices
    std::uint64_t used = UINT64_MAX;           // bytes of slices, by what is known; not counted yet
    std::map<Digest, std::uint64_t> reserved;  // bytes, of those that are being fetched
};

Result<SliceStore> SliceStore::open(const fs::path& dir, std::uint64_t limit) {
    std::error_code error;
    fs::create_directories(dir, error);
    if (error) { return fail_errno(error.value(), fmt::format("store {}", dir.string())); }
    auto state = std::make_shared<State>();
    state->dir = dir;
    state->limit = limit;
    return SliceStore(std::move(state));
}

const fs::path& SliceStore::dir() const {
    return state_->dir;
}

fs::path SliceStore::path(const Digest& hash) const {
    const std::string name = hash.hex();
    return dir() / name.substr(0, 2) / name;
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
    if (::fstat(fd.get(), &info) == 0 && static_cast<std::size_t>(info.st_size) == to.size()) {
        const auto found = read_and_hash(fd.get(), to.size(), path.string(),
                                         [&](std::uint64_t at, std::uint64_t n) { return to.subspan(at, n); });
        if (found && *found == hash) {
            note_use(fd.get(), info);
            return {};
        }
    }
    remove_damaged(path);
    return fail(ErrorKind::corrupt, "store: {} was damaged", path.string());
}

Status SliceStore::map(const Digest& hash, std::span<std::byte> at) const {
    const fs::path path = this->path(hash);
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) { return fail_errno(errno, path.string()); }
    struct stat info{};
    if (::fstat(fd.get(), &info) == 0 && static_cast<std::size_t>(info.st_size) == at.size()) {
        // Read and not looked at where it is mapped: pages that nobody computes with are not this process's.
        if (hash_of(fd.get(), at.size(), path.string()) == hash) {
            LINKCPP_CHECK(map_file(fd.get(), at));
            note_use(fd.get(), info);
            return {};
        }
    }
    remove_damaged(path);
    return fail(ErrorKind::corrupt, "store: {} was damaged", path.string());
}

Result<UniqueFd> SliceStore::open_slice(const Digest& hash, std::uint64_t n_bytes) const {
    const fs::path path = this->path(hash);
    UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat info{};
    if (!fd || ::fstat(fd.get(), &info) != 0 || static_cast<std::uint64_t>(info.st_size) != n_bytes) {
        return fail(ErrorKind::not_found, "{}: no such slice", path.string());
    }
    return fd;
}

Status SliceStore::put(const Digest& hash, ByteView bytes) const {
    if (sha256(bytes) != hash) {
        return fail(ErrorKind::corrupt, "slice {}: the bytes received have another hash", hash.hex().substr(0, 12));
    }
    LINKCPP_TRY(PartialFile file, begin(hash, bytes.size()));
    // Whatever stood there is no better than what is here.
    Status written = file.clear();
    if (written) { written = file.add(bytes); }
    if (!written) {
        give_up(std::move(file), hash);
        return written;
    }
    return keep(std::move(file), hash);
}

Result<PartialFile> SliceStore::begin(const Digest& hash, std::uint64_t n_bytes) const {
    const fs::path folder = dir() / kPartials;
    std::error_code error;
    fs::create_directories(folder, error);
    if (error) { return fail_errno(error.value(), folder.string()); }
    LINKCPP_TRY(PartialFile file, PartialFile::open(folder / hash.hex()));
    if (file.n_bytes() > n_bytes) { LINKCPP_CHECK(file.clear()); }
    if (const Status room = reserve(hash, n_bytes); !room) {
        file.discard();
        return std::unexpected(room.error());
    }
    return file;
}

void SliceStore::give_up(PartialFile file, const Digest& hash) const {
    file.discard();
    const std::lock_guard lock(state_->mutex);
    state_->reserved.erase(hash);
}

Status SliceStore::keep(PartialFile file, const Digest& hash) const {
    const fs::path path = this->path(hash);
    std::error_code error;
    fs::create_directories(path.parent_path(), error);
    if (error) { return fail_errno(error.value(), path.string()); }
    LINKCPP_CHECK(file.commit(path, 0444));
    const std::lock_guard lock(state_->mutex);
    state_->reserved.erase(hash);
    if (state_->used != UINT64_MAX) { state_->used += file.n_bytes(); }
    return {};
}

void SliceStore::protect(std::set<Digest> slices) const {
    const std::lock_guard lock(state_->mutex);
    state_->protected_ = std::move(slices);
}

Status SliceStore::reserve(const Digest& hash, std::uint64_t n_bytes) const {
    if (state_->limit == 0) { return {}; }
    const std::lock_guard lock(state_->mutex);
    state_->reserved.erase(hash);
    // What others have reserved is as good as there.
    std::uint64_t limit = state_->limit;
    for (const auto& [other, bytes] : state_->reserved) { limit -= std::min(limit, bytes); }
    const auto fits = [&] { return state_->used <= limit && n_bytes <= limit - state_->used; };
    if (!fits()) {
        const std::vector<Entry> entries = list();  // other processes may have put some, and deleted some
        state_->used = 0;
        for (const Entry& entry : entries) { state_->used += entry.bytes; }
        const std::uint64_t target = limit - std::min(limit, std::max(n_bytes, limit / kRoomAtOnce));
        std::size_t n_deleted = 0;
        for (const Entry& entry : entries) {
            if (fits() && (n_deleted == 0 || state_->used <= target)) { break; }
            if (state_->protected_.contains(entry.hash)) { continue; }
            std::error_code error;
            fs::remove(entry.path, error);
            state_->used -= entry.bytes;
            ++n_deleted;
        }
        if (n_deleted > 0) { log_info("store: {} slices deleted that were not used for longest", n_deleted); }
    }
    if (!fits()) {
        return fail(ErrorKind::failed, "store {}: {} do not fit what is held now (--store-limit)", dir().string(),
                    format_bytes(state_->limit));
    }
    state_->reserved[hash] = n_bytes;
    return {};
}

fs::path SliceStore::manifest_path(const Digest& model_id) const {
    return dir() / kManifests / (model_id.hex() + ".json");
}

void SliceStore::remember(const model::Manifest& manifest) const {
    const std::string json = manifest.to_json();
    const fs::path path = manifest_path(sha256(as_bytes(json)));
    if (const auto here = read_file(path, model::kMaxManifestBytes); here && *here == json) { return; }
    std::error_code error;
    fs::create_directories(path.parent_path(), error);
    const Status written = write_file_atomically(path, json, 0444, AtomicFile::Flush::no);
    if (!written) { log_warn("store: {}", written.error().message); }
}

std::vector<SliceStore::Entry> SliceStore::list() const {
    std::vector<Entry> entries;
    static constexpr std::string_view kDigits = "0123456789abcdef";
    for (const char a : kDigits) {
        for (const char b : kDigits) {
            const std::string prefix{a, b};
            for_each_file(dir() / prefix, [&](const fs::path& path, const std::string& name, const struct stat& info) {
                const auto hash = Digest::from_hex(name);
                if (!hash || !name.starts_with(prefix)) { return; }
                entries.push_back({*hash, static_cast<std::uint64_t>(info.st_size), info.st_mtim.tv_sec, path});
            });
        }
    }
    std::ranges::stable_sort(entries, {}, &Entry::used);
    return entries;
}

std::vector<model::Manifest> SliceStore::models() const {
    std::vector<model::Manifest> models;
    for_each_file(dir() / kManifests, [&](const fs::path& path, const std::string& name, const struct stat&) {
        const auto json = read_file(path, model::kMaxManifestBytes);
        auto manifest = json ? model::Manifest::from_json(*json) : std::unexpected(json.error());
        if (manifest && name == manifest->id().hex() + ".json") { models.push_back(*std::move(manifest)); }
    });
    return models;
}

std::vector<SliceStore::Partial> SliceStore::partials() const {
    std::vector<Partial> partials;
    for_each_file(dir() / kPartials, [&](const fs::path& path, const std::string& name, const struct stat& info) {
        if (!Digest::from_hex(name)) { return; }
        partials.push_back({path, static_cast<std::uint64_t>(info.st_size), !PartialFile::open(path).has_value()});
    });
    return partials;
}

Result<bool> SliceStore::verify(const Entry& entry) const {
    const UniqueFd fd(::open(entry.path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) { return fail_errno(errno, entry.path.string()); }
    LINKCPP_TRY(const Digest found, hash_of(fd.get(), entry.bytes, entry.path.string()));
    if (found == entry.hash) { return true; }
    remove_damaged(entry.path);
    return false;
}

}  // namespace linkcpp::store
