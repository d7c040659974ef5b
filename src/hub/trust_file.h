// What is known of workers across starts of the hub: who is in quarantine, and since when each has served. JSON in its
// state folder, for people to read as well.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "base/error.h"
#include "hub/admission.h"

namespace linkcpp::hub {

// By id; empty when there is no file. Errors: corrupt, failed: a hub that does not know whom to distrust must not
// start.
Result<std::map<std::string, TrustRecord>> read_trust(const std::filesystem::path& path);
// Those of `records` that are in quarantine or have ever served. Replaces the file.
Status write_trust(const std::map<std::string, TrustRecord>& records, const std::filesystem::path& path);

}  // namespace linkcpp::hub
