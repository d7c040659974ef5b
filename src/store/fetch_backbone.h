// A model's backbone from a hub: everything but the experts' bytes, which never touch this machine's disk.
#pragma once

#include <filesystem>

#include "base/error.h"
#include "model/slicer.h"
#include "store/https_client.h"

namespace linkcpp::store {

// Writes it to `out`, with a progress line; what has come when it is broken off stays beside it as OUT.part, and is
// gone on with. Goes on by itself after a lost connection for as long as that brings anything. Errors: those of
// HttpsClient, corrupt (its bytes do not have their hash), overloaded (another process is fetching it), failed (disk).
Result<model::BackboneSize> fetch_backbone(HttpsClient& hub, const std::filesystem::path& out);

}  // namespace linkcpp::store
