#include <algorithm>
#include <csignal>
#include <filesystem>
#include <memory>

#include <ggml.h>

#include "base/log.h"
#include "base/platform.h"
#include "commands.h"
#include "expert/device.h"
#include "hub_file.h"
#include "hub_status.h"
#include "plugin_environment.h"
#include "process.h"

namespace linkcpp::cli {
namespace {

using namespace std::chrono_literals;

// llama.cpp's programs load their backends before anything else.
constexpr Duration kCheckInTime = 10s;

struct ExecArguments {
    std::string hub;
    std::string mode;
    std::string rows;
    std::string audit;
    std::string listen;
    std::string advertise;
    bool no_local_experts = false;
    std::string other_models;
    std::vector<std::string> program;
};

// Whether any worker runs on this machine; a hub that does not answer now is the plugin's to report.
bool workers_here(const net::JoinLine& hub) {
    const auto status = fetch_status(hub);
    if (!status) { return false; }
    const std::string here = boot_id();
    for (const auto& worker : (*status)["workers"]) {
        if (worker.value("boot_id", "") == here) { return true; }
    }
    return false;
}

// llama-bench does not read the variable that tells other programs to keep experts away from a GPU.
void keep_experts_off_gpus(std::vector<std::string>& arguments) {
    const bool overrides = std::ranges::any_of(
        arguments, [](const std::string& text) { return text == "-ot" || text == "--override-tensor"; });
    if (std::filesystem::path(arguments[0]).filename() != "llama-bench" || overrides) { return; }
    expert::load_backends();
    if (std::ranges::all_of(expert::devices(), &expert::Device::is_cpu)) { return; }
    arguments.insert(arguments.end(), {"-ot", kExpertsOnSwarm});
}

std::unexpected<Error> fail_without_plugin(const ProcessOptions& process, std::optional<int> status) {
    return fail(
        ErrorKind::failed,
        "{} has not loaded the swarm plugin {} and {}; it must be a program of llama.cpp whose ggml has the version "
        "that the plugin was built for ({}); see above for its own words",
        process.arguments[0], process.environment.at("GGML_BACKEND_PATH"),
        status ? fmt::format("ended with status {}", *status) : "was stopped", ggml_version());
}

Status exec(const ExecArguments& options) {
    LINKCPP_CHECK(hide_join_line(options.hub));
    StopOnSignal stop;
    PluginOptions plugin{.mode = options.mode,
                         .rows = options.rows,
                         .audit = options.audit,
                         .local_experts = !options.no_local_experts,
                         .other_models = options.other_models,
                         .listen = options.listen,
                         .advertise = options.advertise};
    LINKCPP_CHECK(check(plugin));
    LINKCPP_TRY(plugin.hub, find_hub(options.hub));
    plugin.shares_cores = workers_here(plugin.hub);
    ProcessOptions process{.arguments = options.program, .check_in = true};
    LINKCPP_TRY(process.environment, plugin_environment(plugin));
    if (process.arguments[0].starts_with("llama-")) { process.arguments[0] = llama_program(process.arguments[0]); }
    keep_experts_off_gpus(process.arguments);
    LINKCPP_TRY(Process child, Process::start(process));
    const TimePoint start = steady_now();
    while (!child.poll()) {
        // Each signal once: llama-server takes a second one for impatience.
        const StopOnSignal::Signal signal = stop.sleep(child.checked_in() ? 100ms : 20ms);
        if (signal.number != 0 && !signal.from_terminal) { child.signal(signal.number); }
        // Without the plugin it would run the whole model on this machine, or a backbone without its experts.
        if (!child.checked_in() && steady_now() - start > kCheckInTime) { break; }
    }
    const std::optional<int> status = child.poll();
    if (!child.checked_in() && !stop.requested()) { return fail_without_plugin(process, status); }
    if (status != 0) { throw CLI::RuntimeError(status.value_or(1)); }
    return {};
}

}  // namespace

void add_exec(CLI::App& app) {
    auto options = std::make_shared<ExecArguments>();
    CLI::App* command = app.add_subcommand("exec", "Runs a program of llama.cpp with its routed experts on the swarm");
    command->add_option("--hub", options->hub,
                        "The hub's join line, or @FILE (default: $LINKCPP_HUB, or the hub on this machine)");
    command
        ->add_option("--mode", options->mode,
                     "exact: every expert's row comes back and is added as llama.cpp would; "
                     "partial: one sum a worker, fewer bytes, other rounding (default: $LINKCPP_MODE, or exact)")
        ->check(CLI::IsMember({"exact", "partial"}));
    command
        ->add_option("--rows", options->rows,
                     "What rows travel as; f16 needs --mode partial (default: $LINKCPP_ROWS, or f32)")
        ->check(CLI::IsMember({"f32", "f16"}));
    command->add_option(
        "--audit", options->audit,
        "Share of the experts' results that is computed again elsewhere and compared: 0 none, 1 every one "
        "before it is used (default: $LINKCPP_AUDIT, or 0.001)");
    command->add_option("--listen", options->listen,
                        "Where workers on other machines reach this program, such as 0.0.0.0:7072 "
                        "(default: this machine only)");
    command->add_option("--advertise", options->advertise,
                        "Where workers are told to reach it instead, HOST:PORT, if a router passes that on");
    command->add_flag("--no-local-experts", options->no_local_experts,
                      "Never compute an expert here: fail when no worker holds it");
    command
        ->add_option("--other-models", options->other_models,
                     "What to do with the experts of another model than the hub's, loaded after it, such as a draft "
                     "model: compute them here, or refuse to load it (default: $LINKCPP_OTHER_MODELS, or refuse)")
        ->check(CLI::IsMember({"here", "refuse"}));
    command->add_option("PROGRAM", options->program, "The program and its arguments, behind --")->required();
    command->prefix_command();
    command->footer("Example: linkcpp exec -- llama-completion -m model.gguf -p 'In the beginning' -n 64");
    run_or_exit(command, [options] { return exec(*options); });
}

}  // namespace linkcpp::cli
