#include <algorithm>
#include <cstdlib>
#include <memory>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/prctl.h>

#include "base/file.h"
#include "base/log.h"
#include "base/platform.h"
#include "base/units.h"
#include "commands.h"
#include "hub_file.h"
#include "net/identity.h"
#include "net/socket.h"
#include "process.h"
#include "store_folder.h"
#include "worker/worker.h"

namespace linkcpp::cli {
namespace {

struct JoinArguments {
    std::string line;
    std::string name;
    std::string device;
    std::string backend;
    std::string memory;
    std::string store;
    std::uint64_t store_limit = 0;
    std::string listen;
    bool mmap = false;
    unsigned n_threads = 0;
    std::size_t max_programs = worker::WorkerOptions().max_programs;
    worker::Server::Limits limits;
    store::NeighbourServer::Limits neighbours;
};

// Less holds no expert of any model, and is a unit forgotten.
constexpr std::uint64_t kLeastMemory = 1u << 10;

// A key of its own for each worker on this machine: the first name "NAME", "NAME-2", … whose key nobody else uses now.
struct OwnIdentity {
    std::string name;
    net::Identity identity;
    UniqueFd lock;
};

Result<OwnIdentity> own_identity(const std::string& wanted) {
    static constexpr int kMaxWorkers = 256;
    LINKCPP_TRY(const std::filesystem::path dir, state_dir());
    for (int i = 1; i <= kMaxWorkers; ++i) {
        std::string name = i == 1 ? wanted : fmt::format("{}-{}", wanted, i);
        LINKCPP_TRY(UniqueFd lock, try_lock(dir / fmt::format("worker-{}.lock", name)));
        if (!lock) { continue; }
        LINKCPP_TRY(net::Identity identity, net::Identity::load_or_make(dir, fmt::format("worker-{}", name)));
        return OwnIdentity{std::move(name), std::move(identity), std::move(lock)};
    }
    return fail(ErrorKind::overloaded, "{} workers of the name {} run on this machine already", kMaxWorkers, wanted);
}

// Names become file names and are shown to people.
std::string clean_name(std::string_view name) {
    std::string clean;
    for (const char c : name.substr(0, 64)) {
        const bool plain =
            (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
        clean += plain || c == '.' ? c : '-';
    }
    return clean.empty() || clean.front() == '.' ? "worker" + clean : clean;
}

Status join(const JoinArguments& options) {
    worker::WorkerOptions worker;
    LINKCPP_TRY(worker.hub, find_hub(options.line));
    // With the hub, llama.cpp runs on this machine, too: they share the cores.
    const bool here = net::is_loopback(worker.hub.hub.host) || worker.hub.hub.host == net::lan_host();
    LINKCPP_CHECK(hide_join_line(options.line, here ? short_spin() : std::map<std::string, std::string>()));
    StopOnSignal stop;
    worker.device = options.device;
    worker.backend = options.backend;
    worker.n_threads = options.n_threads;
    worker.max_programs = options.max_programs;
    worker.limits = options.limits;
    worker.neighbours = options.neighbours;
    if (!options.memory.empty()) {
        auto bytes = parse_bytes(options.memory);
        if (!bytes) { return fail_with("--memory", bytes.error()); }
        if (*bytes < kLeastMemory) {
            return fail(ErrorKind::invalid, "--memory: expected at least {} such as 4G, got '{}', which is {}",
                        format_bytes(kLeastMemory), options.memory, format_bytes(*bytes));
        }
        worker.memory_bytes = *bytes;
    }
    LINKCPP_TRY(worker.store_dir, store_folder(options.store));
    worker.store_limit = options.store_limit;
    worker.mmap = options.mmap;
    if (!options.listen.empty()) { LINKCPP_TRY(worker.offer_slices_at, net::parse_address(options.listen)); }
    LINKCPP_TRY(OwnIdentity own, own_identity(clean_name(options.name.empty() ? host_name() : options.name)));
    worker.name = own.name;
    set_log_name(fmt::format("worker {}", own.name));
    LINKCPP_TRY(const auto running, worker::Worker::make(std::move(worker), std::move(own.identity)));
    Status status;
    std::atomic<bool> done{false};
    std::jthread thread([&] {
        status = running->run(stop.token());
        done = true;
    });
    while (!stop.requested() && !done) { stop.sleep(std::chrono::milliseconds(200)); }
    thread.join();
    if (!status && status.error().kind == ErrorKind::invalid) { exit_with(kNotLetIn, status.error().message); }
    return status;
}

}  // namespace

void add_join(CLI::App& app) {
    auto options = std::make_shared<JoinArguments>();
    CLI::App* command = app.add_subcommand("join", "Joins a swarm as a worker (also as linkcpp-expert-worker)");
    command->add_option(
        "LINE", options->line,
        "The join line that `linkcpp serve` prints, or @FILE with the line in it; without it $LINKCPP_HUB, "
        "or the hub on this machine");
    command->add_option("--name", options->name, "What people call this worker (default: the host's name)");
    auto* device = command->add_option(
        "--device", options->device,
        "Where to compute, see `linkcpp devices` (default: the first that is not a CPU, else the CPU)");
    command->add_option("--backend", options->backend, "Compute on the device of this ggml module and load no other")
        ->excludes(device)
        ->check(CLI::ExistingFile);
    command->add_option("--memory", options->memory,
                        "Memory that experts may fill, such as 4G (default: most of what is free)");
    command->add_option("--threads", options->n_threads, "Threads of a CPU device (default: all processors)")
        ->check(CLI::Range(1u, kMaxThreads));
    command->add_option("--store", options->store, "Folder that slices are kept in (default: in the user's cache)");
    command
        ->add_option("--store-limit", options->store_limit,
                     "Bytes of slices that it may hold, such as 50G; those go first that were not used for longest "
                     "(default: no limit)")
        ->transform(is_size(1, UINT64_MAX))
        ->type_name("SIZE");
    command->add_flag(
        "--mmap", options->mmap,
        "Compute with slices where they lie in the store, without a copy in memory: for more than fits, and "
        "slower");
    command->add_option("--listen", options->listen,
                        "Offer slices to other workers of the swarm here, HOST or HOST:PORT, such as 0.0.0.0 (default: "
                        "only fetch, and listen nowhere)");
    const std::string limits = "Limits";
    command->add_option("--max-neighbours", options->neighbours.links, "With --listen: workers that fetch at a time")
        ->check(CLI::Range(1u, 10'000u))
        ->capture_default_str()
        ->group(limits);
    command->add_option("--max-programs", options->max_programs, "Programs that are served at a time")
        ->check(CLI::Range(1u, 100'000u))
        ->capture_default_str()
        ->group(limits);
    add_size(command, "--max-frame", options->limits.frame_bytes, "Bytes of one request", wire::kMinComputeLimit,
             wire::kMaxComputeBytes)
        ->group(limits);
    add_size(command, "--max-queued", options->limits.queued_bytes,
             "Bytes that wait to be written to one program, before it is given up", wire::kMinComputeLimit,
             std::size_t{1} << 34)
        ->group(limits);
    command->footer(
        "Example: linkcpp join 'linkcpp://192.168.1.5:7070/FINGERPRINT/TOKEN' --memory 4G\n"
        "Example: LINKCPP_HUB='linkcpp://…' linkcpp join --threads 2");
    run_or_exit(command, [options] { return join(*options); });
}

}  // namespace linkcpp::cli
