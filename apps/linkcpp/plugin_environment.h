// The environment in which a stock llama.cpp program runs with the plugin.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "base/error.h"
#include "net/join_line.h"

namespace linkcpp::cli {

// What llama.cpp's --override-tensor needs to place routed experts, their biases and their scales with the plugin.
inline constexpr const char* kExpertsOnSwarm = R"(\.ffn_(gate|up|down|gate_up)_(ch)?exps\.(weight|bias|scale)$=Swarm)";

// What is empty is left to the environment, and to the plugin's defaults.
struct PluginOptions {
    net::JoinLine hub;
    std::string mode;   // "exact" or "partial"
    std::string rows;   // "f32" or "f16"
    std::string audit;  // share of the pairs that is checked: "0.001"
    bool local_experts = true;
    std::string other_models;   // "here" or "refuse"
    std::string listen;         // empty: loopback
    std::string advertise;      // empty: what it listens on
    bool shares_cores = false;  // workers run on this machine too
};

// Errors: invalid (f16 rows in exact mode, an audit that is no share).
Status check(const PluginOptions& options);

// Errors: not_found (libggml-swarm.so does not lie beside the program).
Result<std::map<std::string, std::string>> plugin_environment(const PluginOptions& options);

// llama.cpp's own program of that name, from the build this program was made with; the name itself (to be looked up in
// PATH) when it is not there.
std::string llama_program(const std::string& name);

}  // namespace linkcpp::cli
