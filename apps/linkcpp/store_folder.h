// Where slices are kept on this machine.
#pragma once

#include <filesystem>
#include <string>

#include "base/error.h"
#include "base/platform.h"

namespace linkcpp::cli {

// `option`: what the user has named; the user's cache otherwise.
inline Result<std::filesystem::path> store_folder(const std::string& option) {
    if (!option.empty()) { return option; }
    LINKCPP_TRY(const std::filesystem::path cache, cache_dir());
    return cache / "slices";
}

}  // namespace linkcpp::cli
