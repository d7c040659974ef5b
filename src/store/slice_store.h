// Slices on disk, each in a file named after its hash. A slice is stored once however many models share it.
//
//   ab/abcd…               a slice: the first two digits of its hash, and all 64
//   partial/abcd…          one that is being fetched, or was when its process ended
//   manifests/0123….json   what models the slices belong to, by their ids; of those that a worker here has held
//
// Nothing in it depends on anything else: each file may be deleted at any time. Any number of processes may share a
// folder: slices appear whole and are never changed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/sha256.h"
#include "model/manifest.h"
#include "store/partial_file.h"

namespace linkcpp::store {

// Thread-safe.
class SliceStore {
  public:
    // Makes the folder if needed. `limit`: bytes of slices that it may hold, 0 for no limit.
    // Errors: invalid (not writable), failed.
    static Result<SliceStore> open(const std::filesystem::path& dir, std::uint64_t limit = 0);

    bool has(const Digest& hash) const;
    // Fills `to` with the slice and checks its hash. A file whose bytes do not have its hash is deleted.
    // Errors: not_found, corrupt (`to` holds anything then).
    Status read(const Digest& hash, std::span<std::byte> to) const;
    // Maps the slice's file to `at`, addresses of an AddressSpace, and checks its hash. A file whose bytes do not have
    // its hash is deleted. Errors: not_found, corrupt (anything may be mapped then), overloaded.
    Status map(const Digest& hash, std::span<std::byte> at) const;
    // Its file, for whoever checks the bytes elsewhere. Errors: not_found (also one of another length).
    Result<UniqueFd> open_slice(const Digest& hash, std::uint64_t n_bytes) const;
    // Checks the hash, then writes. Errors: corrupt (the bytes have another hash), those of begin(); nothing is left.
    Status put(const Digest& hash, ByteView bytes) const;

    // What has come of a slice that is being fetched. Errors: overloaded (another process or thread is fetching it),
    // failed (disk; it does not fit under the limit).
    Result<PartialFile> begin(const Digest& hash, std::uint64_t n_bytes) const;
    // It will not be gone on with, and is deleted.
    void give_up(PartialFile file, const Digest& hash) const;
    // `file` has all of the slice's bytes, which were checked: it is stored. Errors: failed.
    Status keep(PartialFile file, const Digest& hash) const;

    // These are deleted for no other slice's sake; instead of those that were named before.
    void protect(std::set<Digest> slices) const;

    // A model whose slices are here. What cannot be written is a warning: only people look at it.
    void remember(const model::Manifest& manifest) const;
    std::filesystem::path manifest_path(const Digest& model_id) const;

    struct Entry {
        Digest hash;
        std::uint64_t bytes = 0;
        std::int64_t used = 0;  // when it was put or read last, seconds since 1970
        std::filesystem::path path;
    };
    // All slices, those first that were not used for longest. What does not look like one is left out.
    std::vector<Entry> list() const;
    // All models that are remembered; a file that is not what its name says is left out.
    std::vector<model::Manifest> models() const;
    struct Partial {
        std::filesystem::path path;
        std::uint64_t bytes = 0;
        bool in_use = false;
    };
    std::vector<Partial> partials() const;

    // Whether the bytes on disk have the slice's hash; deletes the file if not. Errors: failed (it cannot be read).
    Result<bool> verify(const Entry& entry) const;

    const std::filesystem::path& dir() const;

  private:
    struct State;
    explicit SliceStore(std::shared_ptr<State> state) : state_(std::move(state)) {}
    std::filesystem::path path(const Digest& hash) const;
    // Room for a slice of so many bytes, in place of what was not used for longest. Errors: failed.
    Status reserve(const Digest& hash, std::uint64_t n_bytes) const;

    std::shared_ptr<State> state_;
};

}  // namespace linkcpp::store
