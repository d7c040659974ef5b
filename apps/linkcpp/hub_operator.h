// What the commands of a hub's operator have in common: clear, drain, token, revoke.
#pragma once

#include <memory>
#include <string>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "net/join_line.h"
#include "store/https_client.h"

namespace linkcpp::cli {

// The hub, and a client that may change something there.
struct HubOperator {
    net::JoinLine hub;
    std::unique_ptr<store::HttpsClient> client;
};

// `hub`: as for find_hub(). Errors: those of find_hub(), find_operator_token().
Result<HubOperator> find_operator(const std::string& hub);

// What the hub has answered. Errors: corrupt.
Result<nlohmann::json> parse_answer(const std::string& text);

// --hub and --json, which live as long as the command.
void add_operator_options(CLI::App* command, std::string& hub, bool& json);
// WORKER
void add_worker_argument(CLI::App* command, std::string& worker);

}  // namespace linkcpp::cli
