// Whoever slices come from.
#pragma once

#include <cstdint>
#include <functional>

#include "base/bytes.h"
#include "base/error.h"
#include "base/sha256.h"

namespace linkcpp::store {

// Is given bytes in their order, and can stop their coming with an error.
using Take = std::function<Status(ByteView piece)>;

// One thread at a time.
class SliceOrigin {
  public:
    virtual ~SliceOrigin() = default;
    // The bytes of a slice of `n_bytes` bytes from byte `from` on. Nobody has looked at their hash. Errors: not_found,
    // disconnected, timeout, overloaded, corrupt (more or fewer bytes), those of `take`, failed.
    virtual Status fetch(const Digest& hash, std::uint64_t from, std::uint64_t n_bytes, const Take& take) = 0;
};

}  // namespace linkcpp::store
