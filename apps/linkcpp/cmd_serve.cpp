#include <algorithm>
#include <csignal>
#include <exception>
#include <filesystem>
#include <memory>
#include <utility>

#include "base/log.h"
#include "base/platform.h"
#include "base/units.h"
#include "commands.h"
#include "hub/hub.h"
#include "hub_file.h"
#include "model/slicer.h"
#include "net/socket.h"
#include "plugin_environment.h"
#include "process.h"
#include "restarts.h"

namespace linkcpp::cli {
namespace {

using namespace std::chrono_literals;

// Share of the free memory that all local workers together may fill.
constexpr double kLocalMemoryShare = 0.8;
constexpr Duration kWorkerWait = 10min;  // without any progress
constexpr Duration kProgressEvery = 5s;

struct ServeArguments {
    std::string model;
    std::string listen;
    std::string mode;
    std::string rows;
    std::string worker_memory;
    std::string audit;
    double probe_every = 120;
    std::size_t max_peers = hub::HubLimits().peers;
    std::size_t max_per_address = hub::HubLimits().per_address;
    std::size_t max_strangers = hub::HubLimits().strangers;
    double hello_time = to_seconds(hub::HubLimits().hello_time);
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
Result<std::filesystem::path> backbone_of(const hub::Hub& hub) {
    LINKCPP_TRY(const std::filesystem::path cache, cache_dir());
    const std::filesystem::path dir = cache / "backbones";
    std::error_code error;
    std::filesystem::create_directories(dir, error);
    if (error) { return fail_errno(error.value(), dir.string()); }
    // The id names the experts; what else is in the file (chat template, vocabulary) is told apart by size and time.
    const std::filesystem::path& source = hub.file().path();
    std::string rest;
    for (std::size_t i = 0; i < hub.file().n_splits(); ++i) {
        const auto time = std::filesystem::last_write_time(hub.file().path(i), error).time_since_epoch().count();
        rest += fmt::format("{} {} {}\n", std::filesystem::absolute(hub.file().path(i)).string(),
                            hub.file().file_bytes(i), time);
    }
    std::filesystem::path path = dir / fmt::format("{}-{}-stamped.gguf", hub.model_id().hex().substr(0, 16),
                                                   sha256(as_bytes(rest)).hex().substr(0, 8));
    if (is_whole_backbone(path, hub.file())) { return path; }
    log_info("making the backbone of {}", source.filename().string());
    LINKCPP_TRY(const model::BackboneSize size, model::write_backbone(hub.file(), path));
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

// The workers that `serve` itself has started on this machine. They hold no state: one that dies is started again.
class LocalWorkers {
  public:
    LocalWorkers(const ServeArguments& options, std::uint64_t memory) : options_(options), memory_(memory) {}

    Status start(const net::JoinLine& line) {
        line_ = line;
        for (unsigned i = 1; i <= options_.n_local_workers; ++i) {
            LINKCPP_TRY(Process process, start_one(i));
            workers_.push_back({i, std::move(process), Restarts(now())});
        }
        return {};
    }

    // Starts again what has died, after a pause that grows while it dies young. `serving`: llama-server answers, so
    // nothing that a worker does may end this process. Errors, before that: failed (one dies whenever it is started).
    Status watch(bool serving) {
        for (Worker& worker : workers_) {
            const auto status = worker.process.poll();
            if (!status) { continue; }
            worker.restarts.ended(now());
            if (worker.restarts.n_short_lives() >= Restarts::kMaxShortLives && !serving) {
                return fail(ErrorKind::failed, "local worker {} ends (status {}) whenever it is started; see above",
                            worker.number, *status);
            }
            if (!worker.restarts.due(now())) { continue; }
            log_warn("local worker {} ended with status {}; starting it again", worker.number, *status);
            auto process = start_one(worker.number);
            if (!process) {
                log_error("{}", process.error().message);
                worker.restarts.failed(now());
                continue;
            }
            worker.process = *std::move(process);
            worker.restarts.started(now());
        }
        return {};
    }

    bool empty() const { return workers_.empty(); }

  private:
    struct Worker {
        unsigned number;
        Process process;
        Restarts restarts;
    };

    static TimePoint now() { return std::chrono::steady_clock::now(); }

    Result<Process> start_one(unsigned number) const {
        const unsigned n_threads = std::max(1u, n_processors() / options_.n_local_workers);
        ProcessOptions process;
        process.arguments = {(executable_dir() / "linkcpp").string(),
                             "join",
                             "--name",
                             fmt::format("local-{}", number),
                             "--memory",
                             std::to_string(memory_),
                             "--threads",
                             std::to_string(n_threads)};
        // The join line holds a secret: the environment is this user's alone, a command line is everybody's.
        process.environment = short_spin();
        process.environment["LINKCPP_HUB"] = line_.text();
        process.own_group = true;
        return Process::start(process);
    }

    const ServeArguments& options_;
    net::JoinLine line_;
    std::uint64_t memory_;
    std::vector<Worker> workers_;
};

// "models/big.gguf" → "big"
std::string options_name(const std::string& model) {
    return std::filesystem::path(model).stem().string();
}

// As it is registered with the hub.
std::string server_name(const Process& server) {
    return fmt::format("llama-server[{}]", server.pid());
}

Result<Process> start_server(const ServeArguments& options, const hub::Hub& hub) {
    LINKCPP_TRY(const std::filesystem::path backbone, backbone_of(hub));
    PluginOptions plugin{.hub = hub.own_line(),
                         .mode = options.mode,
                         .rows = options.rows,
                         .audit = options.audit,
                         .local_experts = !options.no_local_experts,
                         .other_models = "here",  // -m is ours: what else it loads is a draft model
                         .shares_cores = true};   // workers may join on this machine at any time
    if (options.lan || !options.listen.empty()) {
        const unsigned port = options.data_port != 0 ? options.data_port : hub.https_port() + 1u;
        plugin.listen = fmt::format("0.0.0.0:{}", port);
    }
    ProcessOptions process{.check_in = true};
    process.own_group = true;
    process.arguments = {llama_program("llama-server"), "-m", backbone.string()};
    const auto given = [&](std::string_view name) {
        return std::ranges::find(options.server_arguments, name) != options.server_arguments.end();
    };
    if (!given("-a") && !given("--alias")) {
        const std::string& name = hub.manifest().model.name;
        process.arguments.insert(process.arguments.end(),
                                 {"--alias", name.empty() ? options_name(options.model) : name});
    }
    process.arguments.insert(process.arguments.end(), options.server_arguments.begin(), options.server_arguments.end());
    LINKCPP_TRY(process.environment, plugin_environment(plugin));
    log_info("starting llama-server");
    return Process::start(process);
}

Result<hub::HubOptions> hub_options(const ServeArguments& options) {
    hub::HubOptions hub;
    hub.model = options.model;
    hub.listen.port = options.port;
    if (options.lan) { hub.listen.host = "0.0.0.0"; }
    if (!options.listen.empty()) { LINKCPP_TRY(hub.listen, net::parse_address(options.listen, options.port)); }
    if (hub.listen.host == "0.0.0.0" || hub.listen.host == "::") { hub.advertised_host = net::lan_host(); }
    hub.https_port = options.https_port != 0 ? options.https_port
                     : hub.listen.port == 0  ? std::uint16_t{0}
                                             : static_cast<std::uint16_t>(hub.listen.port + 1);
    hub.admission.interval = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(options.probe_every));
    hub.limits.peers = options.max_peers;
    hub.limits.per_address = options.max_per_address;
    hub.limits.strangers = options.max_strangers;
    hub.limits.hello_time = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(options.hello_time));
    hub.swarm.n_replicas = options.n_replicas;
    hub.swarm.expected_workers = options.n_local_workers;
    return hub;
}

Status serve(const ServeArguments& options) {
    set_log_name("hub");
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
    }
    LINKCPP_CHECK(check(PluginOptions{.mode = options.mode, .rows = options.rows, .audit = options.audit}));
    LINKCPP_TRY(const std::uint64_t worker_memory, memory_of_local_worker(options));
    LINKCPP_TRY(hub::HubOptions settings, hub_options(options));
    // Hashing a large model takes minutes: until it is done a signal ends the process as it ends any other.
    LINKCPP_TRY(const auto hub, hub::Hub::make(std::move(settings)));
    StopOnSignal stop;
    const net::JoinLine line = hub->own_line();
    const net::JoinLine printed = hub->join_line();
    LINKCPP_TRY(const HubFile file, HubFile::write(line, hub->operator_token()));
    std::atomic<bool> hub_ended{false};
    std::jthread hub_thread([&](const std::stop_token& token) {
        try {
            if (const Status status = hub->run(token); !status) { log_error("{}", status.error().message); }
        } catch (const std::exception& error) { log_error("{}", error.what()); }
        hub_ended = true;
    });
    const bool open = !net::is_loopback(line.hub.host);
    if (printed.token.empty()) {
        fmt::print(
            "The token for workers was revoked; `linkcpp token new NAME` makes another and prints its line.\n\n");
    } else {
        fmt::print("{}, run {}:\n\n  linkcpp join '{}'\n\n",
                   open ? "To add a machine" : "This machine only (--lan lets others in). To add a worker",
                   open ? "there" : "here", printed.text());
    }
    std::fflush(stdout);
    LocalWorkers workers(options, worker_memory);  // they end before the hub does
    LINKCPP_CHECK(workers.start(line));

    std::optional<Process> server;
    Restarts restarts(TimePoint{});
    bool has_served = false;  // llama-server has computed with the swarm: if it ends now, it has crashed
    const TimePoint start = std::chrono::steady_clock::now();
    TimePoint next_line = start + kProgressEvery;
    TimePoint last_progress = start;
    std::uint64_t loaded_bytes = 0;
    while (!stop.requested()) {
        if (!server && !options.hub_only && std::chrono::steady_clock::now() >= next_line) {
            const hub::Loading loading = hub->loading();
            if (loading.total_bytes > 0) {
                log_info("the workers are loading: {} of {}", format_bytes(loading.done_bytes),
                         format_bytes(loading.total_bytes));
            } else {
                log_info("waiting for the local workers");
            }
            if (std::exchange(loaded_bytes, loading.done_bytes) != loading.done_bytes) {
                last_progress = std::chrono::steady_clock::now();
            }
            next_line += kProgressEvery;
        }
        LINKCPP_CHECK(workers.watch(server && server->checked_in()));
        if (hub_ended) { return fail(ErrorKind::failed, "the hub has ended; its last lines above say why"); }
        if (server) {
            if (const auto status = server->poll()) {
                if (*status == 0) { return {}; }
                const TimePoint now = std::chrono::steady_clock::now();
                const bool has_just_ended = restarts.ended(now);
                has_served = has_served || hub->has_computed_for(server_name(*server));
                if (!has_served) {
                    return fail(ErrorKind::failed, "llama-server ended with status {}{}; its last lines above say why",
                                *status, server->checked_in() ? "" : " without having loaded the swarm plugin");
                }
                if (has_just_ended) {
                    log_error("llama-server ended with status {}; starting it again, the workers keep what they hold",
                              *status);
                }
                if (!restarts.due(now)) {
                    stop.sleep(20ms);
                    continue;
                }
                LINKCPP_TRY(Process started, start_server(options, *hub));
                server.emplace(std::move(started));
                restarts.started(now);
            }
            if (!server->checked_in() && std::chrono::steady_clock::now() - start > kWorkerWait) {
                return fail(ErrorKind::failed, "llama-server has not loaded the swarm plugin; see above");
            }
        } else if (!options.hub_only && (workers.empty() || hub->complete() || hub->settled())) {
            if (!workers.empty() && !hub->complete()) {
                if (options.no_local_experts) {
                    return fail(ErrorKind::overloaded,
                                "the local workers have no room for every expert; give them more (--worker-memory), "
                                "or let llama-server compute the rest (without --no-local-experts)");
                }
                log_warn("the workers have no room for every expert: llama-server computes the others itself");
            }
            LINKCPP_TRY(Process started, start_server(options, *hub));
            server.emplace(std::move(started));
            restarts.started(std::chrono::steady_clock::now());
        } else if (!options.hub_only && std::chrono::steady_clock::now() - last_progress > kWorkerWait) {
            return fail(ErrorKind::timeout, "the local workers have loaded nothing for {:.0f} s",
                        to_seconds(kWorkerWait));
        }
        stop.sleep(server || options.hub_only ? 200ms : 20ms);
    }
    return {};
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
    command->add_option("--worker-memory", options->worker_memory, "Memory of each local worker, such as 4G");
    command->add_option("--replicas", options->n_replicas, "How many workers hold each expert")
        ->check(CLI::Range(1u, 16u))
        ->capture_default_str();
    command->add_flag("--lan", options->lan, "Let other machines in (default: this machine only)");
    command->add_option("--listen", options->listen, "The address to listen on instead, HOST or HOST:PORT");
    command->add_option("--port", options->port, "Port of the hub; HTTPS is on the next one")->capture_default_str();
    command->add_option("--https-port", options->https_port, "Port of HTTPS, if not the next one");
    command->add_option("--data-port", options->data_port,
                        "With --lan: where workers send results to (default: the one after HTTPS)");
    command->add_flag("--hub-only", options->hub_only, "Start no llama-server; run programs with `linkcpp exec`");
    command->add_option("--mode", options->mode, "exact or partial, see `linkcpp exec --help`")
        ->check(CLI::IsMember({"exact", "partial"}));
    command->add_option("--rows", options->rows, "f32 or f16, see `linkcpp exec --help`")
        ->check(CLI::IsMember({"f32", "f16"}));
    command->add_option("--audit", options->audit, "Share of the pairs that is checked, see `linkcpp exec --help`");
    command->add_option("--probe-every", options->probe_every, "Seconds after which a worker is probed again")
        ->check(CLI::Range(0.1, 1e6))
        ->capture_default_str();
    command->add_flag("--no-local-experts", options->no_local_experts, "llama-server computes no expert itself");
    const std::string limits = "Limits against strangers";
    command->add_option("--max-peers", options->max_peers, "Connections to the hub")
        ->check(CLI::Range(1u, 100'000u))
        ->capture_default_str()
        ->group(limits);
    command->add_option("--max-per-address", options->max_per_address, "Of these, from one address")
        ->check(CLI::Range(1u, 100'000u))
        ->capture_default_str()
        ->group(limits);
    command
        ->add_option("--max-strangers", options->max_strangers,
                     "Of these, not let in yet; of more the one that has waited longest gives way")
        ->check(CLI::Range(1u, 100'000u))
        ->capture_default_str()
        ->group(limits);
    command->add_option("--hello-time", options->hello_time, "Seconds until a stranger must have said who it is")
        ->check(CLI::Range(0.1, 3600.0))
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
