// A model's backbone from a hub: everything but the experts' bytes, which never touch this machine's disk.
#pragma once

#include <cstdint>
#include <filesystem>

#include "base/error.h"
#include "store/https_client.h"

namespace linkcpp::store {

struct FetchedBackbone {
    std::uint64_t apparent_bytes = 0;
    std::uint64_t bytes = 0;    // without the holes
    std::uint64_t fetched = 0;  // by this call: an earlier one may have been broken off
};

// Writes it to `out`, with a progress line; what has come when it is broken off stays beside it as OUT.part, and is
// gone on with. Goes on by itself after a lost connection for as long as that brings anything. Errors: those of
// HttpsClient, corrupt (its bytes do not have their hash), overloaded (another process is fetching it), failed (disk).
Result<FetchedBackbone> fetch_backbone(HttpsClient& hub, const std::filesystem::path& out);

}  // namespace linkcpp::store
