// A file that need not exist: bytes of its own, stretches of a model's files, and holes, one behind the other. It can
// be read from anywhere without being built, in memory or on disk, and it can be written out.
//
// Const functions may be called from several threads at once.
#pragma once

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"
#include "base/progress.h"
#include "base/sha256.h"
#include "model/gguf_file.h"

namespace linkcpp::model {

class Composition {
  public:
    // Of `source`'s files, which outlives it.
    explicit Composition(const GgufFile& source) : source_(&source) {}

    void add(Bytes bytes);
    // Part of a tensor, whose place is inside it.
    void add(const TensorInfo& tensor, std::uint64_t offset, std::uint64_t n_bytes);
    // Zeros, which take no space on disk.
    void add_hole(std::uint64_t n_bytes);
    // A hole up to `offset`, which is not before the end.
    void fill_to(std::uint64_t offset) { add_hole(offset - n_bytes_); }

    std::uint64_t n_bytes() const { return n_bytes_; }
    // Without the holes.
    std::uint64_t data_bytes() const { return data_bytes_; }
    // All bytes of its own, one piece behind the other.
    Bytes own_bytes() const;

    // Fills `to` from `offset`; [offset, offset + to.size()) lies inside. Errors: corrupt (a file of the source is
    // shorter than it was), failed (disk).
    Status read(std::uint64_t offset, std::span<std::byte> to) const;
    // SHA-256 of the first so many. Errors: as above.
    Result<Digest> hash(std::uint64_t n_bytes) const;
    // All of it, inside the kernel where that can; `progress` goes by data_bytes(). Errors: as above.
    Status write(const AtomicFile& to, Progress& progress) const;

  private:
    struct Stretch {
        std::uint32_t split = 0;
        std::uint64_t offset = 0;
    };
    struct Hole {};
    struct Piece {
        std::uint64_t begin = 0;
        std::uint64_t n_bytes = 0;
        std::variant<Bytes, Stretch, Hole> what;
    };
    void append(std::uint64_t n_bytes, std::variant<Bytes, Stretch, Hole> what);

    const GgufFile* source_;
    std::vector<Piece> pieces_;  // none of them empty
    std::uint64_t n_bytes_ = 0;
    std::uint64_t data_bytes_ = 0;
};

}  // namespace linkcpp::model
