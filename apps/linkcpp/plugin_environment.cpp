#include "plugin_environment.h"

#include <cstdlib>

#include "base/platform.h"
#include "base/units.h"

namespace linkcpp::cli {

Status check(const PluginOptions& options) {
    const char* inherited = std::getenv("LINKCPP_MODE");
    const std::string mode = options.mode.empty() && inherited != nullptr ? inherited : options.mode;
    if (options.rows == "f16" && mode != "partial") {
        return fail(ErrorKind::invalid, "--rows f16 rounds what is sent: it needs --mode partial");
    }
    const char* audit = options.audit.empty() ? std::getenv("LINKCPP_AUDIT") : options.audit.c_str();
    if (audit != nullptr && *audit != 0) {
        const auto share = parse_share(audit);
        if (!share) { return fail_with(options.audit.empty() ? "LINKCPP_AUDIT" : "--audit", share.error()); }
    }
    return {};
}

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
        // For layers on a GPU, whose experts would go there, too. And a build of llama.cpp with its backends inside
        // reads GGML_BACKEND_PATH only when an override is given.
        {"LLAMA_ARG_OVERRIDE_TENSOR", kExpertsOnSwarm},
    };
    const auto set = [&](const char* name, const std::string& value) {
        if (!value.empty()) { environment[name] = value; }
    };
    set("LINKCPP_MODE", options.mode);
    set("LINKCPP_ROWS", options.rows);
    set("LINKCPP_AUDIT", options.audit);
    set("LINKCPP_OTHER_MODELS", options.other_models);
    set("LINKCPP_LISTEN", options.listen);
    set("LINKCPP_ADVERTISE", options.advertise);
    if (!options.local_experts) { environment["LINKCPP_LOCAL_EXPERTS"] = "off"; }
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
