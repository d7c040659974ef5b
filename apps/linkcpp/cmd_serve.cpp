#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/platform.h"
#include "base/units.h"
#include "commands.h"
#include "hub/hub.h"
#include "hub_file.h"
#include "hub_process.h"
#include "hub_status.h"
#include "kept_alive.h"
#include "local_workers.h"
#include "model/slicer.h"
#include "net/socket.h"
#include "plugin_environment.h"
#include "process.h"

namespace linkcpp::cli {
namespace {

using namespace std::chrono_literals;

// Share of the free memory that all local workers together may fill.
constexpr double kLocalMemoryShare = 0.8;
constexpr Duration kWorkerWait = 10min;         // without any progress
constexpr Duration kServerCheckInTime = 10min;  // from llama-server's start until the plugin is in it
constexpr Duration kProgressEvery = 5s;
constexpr Duration kAskHubEvery = 100ms;  // while the workers load
constexpr Duration kAskServingHubEvery = 1s;
// The hub runs on this machine. Nothing else is watched while it is asked.
constexpr store::HttpsClient::Patience kHubPatience{.connect = 1s, .stall = 2s};
constexpr Duration kWatchEvery = 20ms;
constexpr Duration kServingWatchEvery = 200ms;

constexpr const char* kOwnWorkers = "--own-workers";  // of the workers on this machine, how many will be started

struct LimitOption {
    const char* name;
    std::size_t hub::HubLimits::* limit;
    std::size_t least;
    std::size_t most;
    bool in_bytes;
    const char* text;
};

constexpr std::array kLimitOptions{
    LimitOption{"--max-peers", &hub::HubLimits::peers, 1, 100'000, false, "Connections to the hub"},
    LimitOption{"--max-per-address", &hub::HubLimits::per_address, 1, 100'000, false, "Of these, from one address"},
    LimitOption{"--max-strangers", &hub::HubLimits::strangers, 1, 100'000, false,
                "Of these, not let in yet; of more the one that has waited longest gives way"},
    // A worker says what it holds in one message, a hub sends the manifest in one.
    LimitOption{"--max-message", &hub::HubLimits::message_bytes, 1u << 20, wire::kMaxControlBytes, true,
                "Bytes of one message of a peer"},
    LimitOption{"--max-queued", &hub::HubLimits::queued_bytes, wire::kMaxControlBytes, 1u << 30, true,
                "Bytes that wait to be written to one peer, before it is given up"},
    LimitOption{"--https-requests", &hub::HubLimits::https_requests, 4, 1024, false,
                "Requests that HTTPS answers at a time"},
    LimitOption{"--https-per-address", &hub::HubLimits::https_per_address, 1, 1023, false,
                "Connections to HTTPS from one address that have shown no token yet"},
};

struct ServeArguments {
    std::string model;
    std::string listen;
    std::string mode;
    std::string rows;
    std::string worker_memory;
    std::string audit;
    double probe_every = 120;
    hub::HubLimits limits;
    double hello_time = to_seconds(hub::HubLimits().hello_time);
    unsigned n_expected = 0;
    unsigned n_own_workers = 0;
    std::uint16_t port = 7070;
    std::uint16_t https_port = 0;
    unsigned n_local_workers = 0;
    std::uint32_t n_replicas = 1;
    std::uint16_t data_port = 0;
    bool lan = false;
    bool hub_only = false;
    bool no_local_experts = false;
    std::vector<std::string> server_arguments;
};

// A cached backbone is used if it has every byte of its header and the length that goes with it. It was written to the
// end before it got its name.
bool is_whole_backbone(const std::filesystem::path& path, const model::GgufFile& source) {
    std::error_code error;
    if (!std::filesystem::exists(path, error)) { return false; }
    const auto backbone = model::GgufFile::open(path);
    if (backbone && backbone->flag(model::kBackboneKey) == true &&
        backbone->number(model::kBackboneSourceKey) == source.file_bytes() &&
        backbone->tensors().size() == source.tensors().size()) {
        return true;
    }
    log_warn("{}: damaged, made again", path.string());
    return false;
}

// The model without its experts, made once and kept under the model's id.
Result<std::filesystem::path> backbone_of(const std::string& model, const std::string& model_id) {
    LINKCPP_TRY(const model::GgufFile file, model::GgufFile::open(model));
    LINKCPP_TRY(const std::filesystem::path cache, cache_dir());
    const std::filesystem::path dir = cache / "backbones";
    std::error_code error;
    std::filesystem::create_directories(dir, error);
    if (error) { return fail_errno(error.value(), dir.string()); }
    // The id names the experts; what else is in the file (chat template, vocabulary) is told apart by size and time.
    std::string rest;
    for (std::size_t i = 0; i < file.n_splits(); ++i) {
        const auto time = std::filesystem::last_write_time(file.path(i), error).time_since_epoch().count();
        rest += fmt::format("{} {} {}\n", std::filesystem::absolute(file.path(i)).string(), file.file_bytes(i), time);
    }
    std::filesystem::path path =
        dir / fmt::format("{}-{}-stamped.gguf", model_id.substr(0, 16), sha256(as_bytes(rest)).hex().substr(0, 8));
    if (is_whole_backbone(path, file)) { return path; }
    log_info("making the backbone of {}", file.path().filename().string());
    LINKCPP_TRY(const model::BackboneSize size, model::write_backbone(file, path));
    log_info("backbone: {} of {}", format_bytes(size.bytes), format_bytes(size.apparent_bytes));
    return path;
}

// Bytes that each local worker may fill. Errors: invalid (the option).
Result<std::uint64_t> memory_of_local_worker(const ServeArguments& options) {
    if (options.worker_memory.empty()) {
        return static_cast<std::uint64_t>(static_cast<double>(available_memory_bytes()) * kLocalMemoryShare) /
               std::max(1u, options.n_local_workers);
    }
    auto bytes = parse_bytes(options.worker_memory);
    if (!bytes) { return fail_with("--worker-memory", bytes.error()); }
    return *bytes;
}

// "models/big.gguf" → "big"
std::string options_name(const std::string& model) {
    return std::filesystem::path(model).stem().string();
}

// What the hub says of itself, as far as the start of llama-server depends on it.
struct SwarmView {
    std::string model_id;
    std::string model_name;
    bool complete = false;             // every slice has a live holder
    bool settled = false;              // all who have joined have loaded what they were given, or failed to
    std::vector<std::string> awaited;  // workers that have slices and are not there
    std::uint64_t loading_bytes = 0;
    std::uint64_t loaded_bytes = 0;
    std::set<std::string> computed_for;  // programs
};

// Errors: those of fetch_status, corrupt.
Result<SwarmView> ask_hub(store::HttpsClient& hub) {
    LINKCPP_TRY(const nlohmann::json status, fetch_status(hub));
    try {
        SwarmView view{.model_id = status.at("model").at("id"),
                       .model_name = status.at("model").at("name"),
                       .complete = status.at("coverage").at("missing_slices") == 0,
                       .settled = status.at("coverage").at("settled")};
        for (const auto& worker : status.at("workers")) {
            if (worker.at("state") == "gone") { view.awaited.push_back(worker.at("name")); }
            if (worker.at("state") != "loading") { continue; }
            view.loading_bytes += worker.at("loading").at("total_bytes").get<std::uint64_t>();
            view.loaded_bytes += worker.at("loading").at("done_bytes").get<std::uint64_t>();
        }
        for (const auto& program : status.at("computed_for")) { view.computed_for.insert(program); }
        return view;
    } catch (const nlohmann::json::exception& error) {
        return fail(ErrorKind::corrupt, "the hub's status: {}", error.what());
    }
}

// As it is registered with the hub.
std::string server_name(const Process& server) {
    return fmt::format("llama-server[{}]", server.pid());
}

Result<Process> start_server(const ServeArguments& options, const net::JoinLine& hub, const SwarmView& swarm) {
    LINKCPP_TRY(const std::filesystem::path backbone, backbone_of(options.model, swarm.model_id));
    PluginOptions plugin{.hub = hub,
                         .mode = options.mode,
                         .rows = options.rows,
                         .audit = options.audit,
                         .local_experts = !options.no_local_experts,
                         .other_models = "here",  // -m is ours: what else it loads is a draft model
                         .shares_cores = true};   // workers may join on this machine at any time
    if (options.lan || !options.listen.empty()) {
        const unsigned port = options.data_port != 0 ? options.data_port : hub.https_port + 1u;
        plugin.listen = fmt::format("0.0.0.0:{}", port);
    }
    ProcessOptions process{.check_in = true};
    process.own_group = true;
    process.arguments = {llama_program("llama-server"), "-m", backbone.string()};
    const auto given = [&](std::string_view name) {
        return std::ranges::find(options.server_arguments, name) != options.server_arguments.end();
    };
    if (!given("-a") && !given("--alias")) {
        process.arguments.insert(
            process.arguments.end(),
            {"--alias", swarm.model_name.empty() ? options_name(options.model) : swarm.model_name});
    }
    process.arguments.insert(process.arguments.end(), options.server_arguments.begin(), options.server_arguments.end());
    LINKCPP_TRY(process.environment, plugin_environment(plugin));
    log_info("starting llama-server");
    return Process::start(process);
}

Result<net::Address> hub_address(const ServeArguments& options) {
    if (!options.listen.empty()) { return net::parse_address(options.listen, options.port); }
    return net::Address{options.lan ? "0.0.0.0" : "127.0.0.1", options.port};
}

std::uint16_t hub_https_port(const ServeArguments& options, const net::Address& hub) {
    if (options.https_port != 0 || hub.port == 0) { return options.https_port; }
    return static_cast<std::uint16_t>(hub.port + 1);
}

Result<hub::HubOptions> hub_options(const ServeArguments& options) {
    hub::HubOptions hub;
    hub.model = options.model;
    LINKCPP_TRY(hub.listen, hub_address(options));
    if (hub.listen.host == "0.0.0.0" || hub.listen.host == "::") { hub.advertised_host = net::lan_host(); }
    hub.https_port = hub_https_port(options, hub.listen);
    hub.admission.interval = from_seconds(options.probe_every);
    hub.limits = options.limits;
    hub.limits.hello_time = from_seconds(options.hello_time);
    hub.swarm.n_replicas = options.n_replicas;
    hub.swarm.expected_workers = options.n_expected;
    for (unsigned i = 1; i <= options.n_own_workers; ++i) { hub.own_workers.insert(local_worker_name(i)); }
    return hub;
}

// The options above, for a `linkcpp serve --hub-only` of its own; its addresses are HubProcess's.
std::vector<std::string> hub_arguments(const ServeArguments& options) {
    std::vector<std::string> arguments{"-m",
                                       options.model,
                                       "--replicas",
                                       std::to_string(options.n_replicas),
                                       "--hello-time",
                                       std::to_string(options.hello_time),
                                       "--probe-every",
                                       std::to_string(options.probe_every),
                                       "--expect-workers",
                                       std::to_string(std::max(options.n_expected, options.n_local_workers)),
                                       kOwnWorkers,
                                       std::to_string(options.n_local_workers)};
    for (const LimitOption& option : kLimitOptions) {
        arguments.insert(arguments.end(), {option.name, std::to_string(options.limits.*option.limit)});
    }
    return arguments;
}

void print_line(const HubLines& lines) {
    const bool open = !net::is_loopback(lines.own.hub.host);
    if (lines.printed.empty()) {
        fmt::print(
            "The token for workers was revoked; `linkcpp token new NAME` makes another and prints its line.\n\n");
    } else {
        fmt::print("{}, run {}:\n\n  linkcpp join '{}'\n\n",
                   open ? "To add a machine" : "This machine only (--lan lets others in). To add a worker",
                   open ? "there" : "here", lines.printed);
    }
    std::fflush(stdout);
}

// This process is the hub, and nothing else.
Status run_hub(const ServeArguments& options) {
    set_log_name("hub");
    LINKCPP_TRY(hub::HubOptions settings, hub_options(options));
    // Hashing a large model takes minutes: until it is done a signal ends the process as it ends any other.
    LINKCPP_TRY(const auto hub, hub::Hub::make(std::move(settings)));
    StopOnSignal stop;
    const net::JoinLine printed = hub->join_line();
    const HubLines lines{hub->own_line(), printed.token.empty() ? "" : printed.text()};
    LINKCPP_TRY(const HubFile file, HubFile::write(lines.own, hub->operator_token()));
    Status status;
    std::atomic<bool> ended{false};
    std::jthread thread([&](const std::stop_token& token) {
        try {
            status = hub->run(token);
        } catch (const std::exception& error) { status = fail(ErrorKind::failed, "{}", error.what()); }
        ended = true;
    });
    if (!tell_parent(lines)) { print_line(lines); }
    while (!stop.requested() && !ended) { stop.sleep(kServingWatchEvery); }
    thread.request_stop();
    thread.join();
    return status;
}

// The hub, workers if wanted, and llama-server, each a process of its own, so that each outlives what befalls the
// others and is started again when it has ended.
class Supervisor {
  public:
    Supervisor(const ServeArguments& options, HubProcess hub, std::uint64_t worker_memory)
        : options_(options), hub_(std::move(hub)), workers_(options.n_local_workers, worker_memory) {}

    // Until a signal asks it to end, or llama-server ends by itself.
    Status run(StopOnSignal& stop) {
        while (!stop.requested()) {
            LINKCPP_CHECK(watch_hub());
            if (hub_.lines()) {
                LINKCPP_CHECK(workers_.watch(server_ && server_->process().checked_in()));
                if (!options_.hub_only) {
                    LINKCPP_CHECK(server_ ? watch_server() : await_workers());
                    if (server_has_finished_) { return {}; }
                }
            }
            const bool settled = server_ || (options_.hub_only && hub_.lines());
            stop.sleep(settled ? kServingWatchEvery : kWatchEvery);
        }
        return {};
    }

  private:
    Status watch_hub() {
        const bool was_there = hub_.lines().has_value();
        if (const Status status = hub_.watch(); !status) {
            // It has said why, unless a signal has ended it.
            if (hub_.status() > 0 && hub_.status() < 128) { throw CLI::RuntimeError(hub_.status()); }
            return status;
        }
        if (was_there || !hub_.lines()) { return {}; }
        print_line(*hub_.lines());
        last_progress_ = steady_now();
        next_line_ = last_progress_ + kProgressEvery;
        return workers_.start([this] { return hub_.lines()->own; });
    }

    // What the hub says; what it has said when it does not answer.
    void ask(Duration every) {
        if (steady_now() < next_question_) { return; }
        const net::JoinLine& line = hub_.lines()->own;
        if (!client_ || client_token_ != line.token) {  // a new hub has a new one
            client_ = std::make_unique<store::HttpsClient>(net::Address{line.hub.host, line.https_port},
                                                           line.fingerprint, line.token, kHubPatience);
            client_token_ = line.token;
        }
        auto view = ask_hub(*client_);
        no_answer_ = view ? "" : view.error().message;
        if (view) { swarm_ = *std::move(view); }
        next_question_ = steady_now() + every;
    }

    Status await_workers() {
        ask(kAskHubEvery);
        const bool hopes = workers_.n_hoped_for() > 0;
        if (swarm_ && no_answer_.empty() && (!hopes || swarm_->complete || swarm_->settled)) {
            if (options_.n_local_workers > 0 && !swarm_->complete) {
                const char* why = hopes ? "have no room for every expert" : "are not let in";
                if (options_.no_local_experts) {
                    return fail(ErrorKind::overloaded,
                                "the local workers {}; {}, or let llama-server compute the rest (without "
                                "--no-local-experts)",
                                why, hopes ? "give them more (--worker-memory)" : "see above");
                }
                log_warn("the workers {}: llama-server computes the other experts itself", why);
            }
            LINKCPP_TRY(KeptAlive server,
                        KeptAlive::run([this] { return start_server(options_, hub_.lines()->own, *swarm_); }));
            server_.emplace(std::move(server));
            return {};
        }
        const std::uint64_t loaded = swarm_ ? swarm_->loaded_bytes : 0;
        if (std::exchange(loaded_bytes_, loaded) != loaded) { last_progress_ = steady_now(); }
        if (steady_now() >= next_line_) {
            next_line_ += kProgressEvery;
            if (!no_answer_.empty()) {
                log_warn("the hub does not answer: {}", no_answer_);
            } else if (swarm_ && swarm_->loading_bytes > 0) {
                log_info("the workers are loading: {} of {}", format_bytes(swarm_->loaded_bytes),
                         format_bytes(swarm_->loading_bytes));
            } else if (swarm_ && !swarm_->awaited.empty()) {
                log_info("waiting for {}, which had slices before the hub was started again; for {:.0f} s at most",
                         fmt::join(swarm_->awaited, ", "), to_seconds(hub::Swarm::Options().restart_grace));
            } else {
                log_info("waiting for the local workers");
            }
        }
        if (steady_now() - last_progress_ <= kWorkerWait) { return {}; }
        return fail(ErrorKind::timeout, "the local workers have loaded nothing for {:.0f} s{}{}",
                    to_seconds(kWorkerWait), no_answer_.empty() ? "" : ", and the hub does not answer: ", no_answer_);
    }

    Status watch_server() {
        const auto status = server_->watch();
        if (!has_served_) {
            if (status) { next_question_ = {}; }
            ask(kAskServingHubEvery);
            has_served_ = swarm_->computed_for.contains(server_name(server_->process()));
        }
        Process& process = server_->process();
        if (!status) {
            server_->start_again();
            if (process.checked_in() || process.poll() || steady_now() - server_->started() <= kServerCheckInTime) {
                return {};
            }
            return fail(ErrorKind::failed, "llama-server has not loaded the swarm plugin; see above");
        }
        server_has_finished_ = *status == 0;
        if (server_has_finished_) { return {}; }
        if (!has_served_) {
            return fail(ErrorKind::failed, "llama-server ended with status {}{}; its last lines above say why", *status,
                        process.checked_in() ? "" : " without having loaded the swarm plugin");
        }
        log_error("llama-server ended with status {}; starting it again, the workers keep what they hold", *status);
        return {};
    }

    const ServeArguments& options_;
    HubProcess hub_;  // these three end in the opposite order
    LocalWorkers workers_;
    std::optional<KeptAlive> server_;
    bool server_has_finished_ = false;
    bool has_served_ = false;  // it has computed with the swarm: if it ends now, it has crashed
    std::unique_ptr<store::HttpsClient> client_;
    std::string client_token_;
    std::optional<SwarmView> swarm_;
    std::string no_answer_;  // why the hub has not answered the last question
    TimePoint next_question_{};
    TimePoint next_line_{};
    TimePoint last_progress_{};
    std::uint64_t loaded_bytes_ = 0;
};

// Errors: invalid (they would keep out what this command starts itself, all from one address).
Status check_limits(const ServeArguments& options) {
    const hub::HubLimits& limits = options.limits;
    const std::size_t n_own = options.n_local_workers + (options.hub_only ? 0u : 1u);
    if (const std::size_t least = std::min(limits.peers, limits.per_address); least < n_own) {
        return fail(
            ErrorKind::invalid,
            "--max-peers and --max-per-address: expected at least {}, which is what this command starts itself, "
            "got {}",
            n_own, least);
    }
    // While it loads each worker keeps two connections, and this process asks, too.
    const std::size_t n_https = 2 * std::size_t{options.n_local_workers} + 2;
    if (limits.https_requests < n_https) {
        return fail(ErrorKind::invalid,
                    "--https-requests: expected at least {}, for what this command starts itself, got {}", n_https,
                    limits.https_requests);
    }
    if (limits.https_per_address >= limits.https_requests) {
        return fail(
            ErrorKind::invalid,
            "--https-per-address: expected less than --https-requests, or one stranger could take all {}, got {}",
            limits.https_requests, limits.https_per_address);
    }
    return {};
}

Status serve(const ServeArguments& options) {
    LINKCPP_CHECK(check_limits(options));
    if (options.hub_only && !options.server_arguments.empty()) {
        return fail(ErrorKind::invalid, "--hub-only starts no llama-server that '{}' could be given to",
                    options.server_arguments.front());
    }
    if (options.hub_only) {
        const std::array<std::pair<const char*, bool>, 4> for_server{
            {{"--mode", !options.mode.empty()},
             {"--rows", !options.rows.empty()},
             {"--audit", !options.audit.empty()},
             {"--no-local-experts", options.no_local_experts}}};
        for (const auto& [name, given] : for_server) {
            if (!given) { continue; }
            return fail(ErrorKind::invalid,
                        "--hub-only starts no llama-server that {} could be for; give it to "
                        "`linkcpp exec`",
                        name);
        }
        if (options.n_local_workers == 0) { return run_hub(options); }
    }
    set_log_name("serve");
    LINKCPP_CHECK(check(PluginOptions{.mode = options.mode, .rows = options.rows, .audit = options.audit}));
    LINKCPP_TRY(const std::uint64_t worker_memory, memory_of_local_worker(options));
    LINKCPP_TRY(net::Address listen, hub_address(options));
    const std::uint16_t https_port = hub_https_port(options, listen);
    StopOnSignal stop;
    LINKCPP_TRY(HubProcess hub, HubProcess::start(hub_arguments(options), std::move(listen), https_port));
    return Supervisor(options, std::move(hub), worker_memory).run(stop);
}

}  // namespace

void add_serve(CLI::App& app) {
    auto options = std::make_shared<ServeArguments>();
    CLI::App* command =
        app.add_subcommand("serve", "Serves a model: the hub, local workers if wanted, and llama-server");
    command->add_option("-m,--model", options->model, "The GGUF model (of a split one any part)")->required();
    command->add_option("--local-workers", options->n_local_workers, "Workers to start on this machine")
        ->check(CLI::Range(0u, 64u))
        ->capture_default_str();
    command->add_option("--worker-memory", options->worker_memory,
                        "Memory of each local worker, such as 4G (default: most of what is free, shared among them)");
    command->add_option("--replicas", options->n_replicas, "How many workers hold each expert")
        ->check(CLI::Range(1u, 16u))
        ->capture_default_str();
    command
        ->add_option("--expect-workers", options->n_expected,
                     "Place no slice before so many workers have joined (or 20 s have passed since the first)")
        ->check(CLI::Range(0u, 4096u));
    command->add_option(kOwnWorkers, options->n_own_workers)->group("");  // between this command and its hub
    command->add_flag("--lan", options->lan, "Let other machines in (default: this machine only)");
    command->add_option("--listen", options->listen, "The address to listen on instead, HOST or HOST:PORT");
    command->add_option("--port", options->port, "Port of the hub; HTTPS is on the next one")
        ->check(is_port())
        ->capture_default_str();
    command->add_option("--https-port", options->https_port, "Port of HTTPS, if not the next one")->check(is_port());
    command
        ->add_option("--data-port", options->data_port,
                     "With --lan: where workers send results to (default: the one after HTTPS)")
        ->check(is_port());
    command->add_flag("--hub-only", options->hub_only, "Start no llama-server; run programs with `linkcpp exec`");
    command->add_option("--mode", options->mode, "exact or partial, see `linkcpp exec --help`")
        ->check(CLI::IsMember({"exact", "partial"}));
    command->add_option("--rows", options->rows, "f32 or f16, see `linkcpp exec --help`")
        ->check(CLI::IsMember({"f32", "f16"}));
    command->add_option("--audit", options->audit, "Share of the pairs that is checked, see `linkcpp exec --help`");
    command->add_option("--probe-every", options->probe_every, "Seconds after which a worker is probed again")
        ->check(is_between(0.1, 1e6))
        ->capture_default_str();
    command->add_flag("--no-local-experts", options->no_local_experts, "llama-server computes no expert itself");
    const std::string limits = "Limits";
    for (const LimitOption& option : kLimitOptions) {
        std::size_t& limit = options->limits.*option.limit;
        CLI::Option* added = option.in_bytes
                                 ? add_size(command, option.name, limit, option.text, option.least, option.most)
                                 : command->add_option(option.name, limit, option.text)
                                       ->check(CLI::Range(option.least, option.most))
                                       ->capture_default_str();
        added->group(limits);
    }
    command->add_option("--hello-time", options->hello_time, "Seconds until a stranger must have said who it is")
        ->check(is_between(0.1, 3600))
        ->capture_default_str()
        ->group(limits);
    command->add_option("ARGS", options->server_arguments, "Arguments for llama-server, behind --");
    command->prefix_command(false);
    command->footer(
        "Example: linkcpp serve -m model.gguf --local-workers 2 -- --port 8080 -c 8192\n"
        "Example: linkcpp serve -m model.gguf --lan --hub-only");
    run_or_exit(command, [options] { return serve(*options); });
}

}  // namespace linkcpp::cli
