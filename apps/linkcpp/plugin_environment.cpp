#include "plugin_environment.h"

#include <cstdlib>

#include "base/platform.h"

namespace linkcpp::cli {

Result<std::map<std::string, std::string>> plugin_environment(const PluginOptions& options) {
    const std::filesystem::path plugin = executable_dir() / "libggml-swarm.so";
    std::error_code error;
    if (!std::filesystem::exists(plugin, error)) {
        return fail(ErrorKind::not_found, "{}: the plugin is missing; build the whole project (scripts/build)",
                    plugin.string());
    }
    std::map<std::string, std::string> environment{
        {"GGML_BACKEND_PATH", plugin.string()},
        {"LINKCPP_HUB", options.hub.text()},
        {"LINKCPP_MODE", options.mode},
        {"LINKCPP_ROWS", options.rows},
        {"LINKCPP_LOCAL_EXPERTS", options.local_experts ? "on" : "off"},
        {"LINKCPP_OTHER_MODELS", options.other_models_here ? "here" : "refuse"},
        // For layers on a GPU, whose experts would go there, too. And a build of llama.cpp with its backends inside
        // reads GGML_BACKEND_PATH only when an override is given.
        {"LLAMA_ARG_OVERRIDE_TENSOR", kExpertsOnSwarm},
    };
    if (!options.listen.empty()) { environment["LINKCPP_LISTEN"] = options.listen; }
    // Threads that wait by spinning take the cores that local workers need. A short spin still bridges the gaps between
    // llama.cpp's own operations.
    if (options.shares_cores && std::getenv("GOMP_SPINCOUNT") == nullptr && std::getenv("OMP_WAIT_POLICY") == nullptr) {
        environment["GOMP_SPINCOUNT"] = "2000";
    }
    return environment;
}

std::string llama_program(const std::string& name) {
    const std::filesystem::path built = std::filesystem::path(LINKCPP_LLAMA_BIN) / name;
    std::error_code error;
    return std::filesystem::exists(built, error) ? built.string() : name;
}

}  // namespace linkcpp::cli
