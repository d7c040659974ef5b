// Slices on disk, each in a file named after its hash. A slice is stored once however many models share it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>

#include "base/bytes.h"
#include "base/error.h"
#include "base/sha256.h"

namespace linkcpp::store {

// Any number of processes may share a folder: files appear whole and are never changed. Thread-safe.
class SliceStore {
  public:
    // Makes the folder if needed. Errors: invalid (not writable), failed.
    static Result<SliceStore> open(const std::filesystem::path& dir);

    bool has(const Digest& hash) const;
    // Fills `to` with the slice and checks its hash. A file whose bytes do not have its hash is deleted.
    // Errors: not_found, corrupt (`to` holds anything then).
    Status read(const Digest& hash, std::span<std::byte> to) const;
    // Checks the hash, then writes. Errors: corrupt (the bytes have another hash), failed (disk full; nothing is left).
    Status put(const Digest& hash, ByteView bytes) const;

    const std::filesystem::path& dir() const { return dir_; }

  private:
    explicit SliceStore(std::filesystem::path dir) : dir_(std::move(dir)) {}
    std::filesystem::path path(const Digest& hash) const;

    std::filesystem::path dir_;
};

}  // namespace linkcpp::store
