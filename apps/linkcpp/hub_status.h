// Asking a hub how it is.
#pragma once

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "net/join_line.h"
#include "store/https_client.h"

namespace linkcpp::cli {

// GET /status. Errors: those of HttpsClient, corrupt.
Result<nlohmann::json> fetch_status(const net::JoinLine& hub);
Result<nlohmann::json> fetch_status(store::HttpsClient& hub);

}  // namespace linkcpp::cli
