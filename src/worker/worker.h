// A worker: joins a hub, is told what to hold, loads it, and keeps a data link to every coordinator. Accepts nothing
// but "these rows through these experts of this layer of this model".
//
// Threads: the caller of run() is the control thread (hub link, dialling coordinators, heartbeats); the data thread
// (server.h) computes; the loader thread (loader.h) loads, and the fetcher's fetch; the neighbours' thread
// (store/neighbour_server.h) offers slices to other workers.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <vector>

#include "base/backoff.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/refusals.h"
#include "expert/engine.h"
#include "net/control_link.h"
#include "net/identity.h"
#include "net/join_line.h"
#include "net/link.h"
#include "store/neighbour.h"
#include "store/neighbour_server.h"
#include "store/slice_store.h"
#include "worker/loader.h"
#include "worker/prober.h"
#include "worker/server.h"

namespace linkcpp::worker {

struct WorkerOptions {
    net::JoinLine hub;
    std::string name;
    std::string device;              // empty: the first that is not a CPU, else the CPU
    std::filesystem::path backend;   // a ggml module to compute with, and no other; empty: those of this build
    unsigned n_threads = 0;          // 0: all processors
    std::uint64_t memory_bytes = 0;  // for slices; 0: most of what is free
    std::filesystem::path store_dir;
    std::uint64_t store_limit = 0;                // bytes of slices in it; 0: no limit
    bool mmap = false;                            // compute with slices where they lie in the store
    std::optional<net::Address> offer_slices_at;  // where neighbours reach this worker; nothing: they do not
    store::NeighbourServer::Limits neighbours;
    std::size_t max_programs = 64;  // that it keeps links to
    Server::Limits limits;          // of each of these
};

class Worker {
  public:
    // Errors: not_found (no such device or module), unsupported (the module), failed.
    static Result<std::unique_ptr<Worker>> make(WorkerOptions options, net::Identity identity);

    // Serves until `stop` is requested; reconnects by itself. Errors: invalid (the hub's key or the token is wrong:
    // trying again would not help).
    Status run(const std::stop_token& stop);

  private:
    struct Peer {
        wire::fb::CoordinatorT coordinator;
        std::shared_ptr<std::atomic<bool>> alive;
        TimePoint next_try{};
        Backoff backoff;
    };

    Worker(WorkerOptions options, net::Identity identity, net::TlsContext tls, store::SliceStore store,
           std::unique_ptr<expert::Engine> engine);

    Result<std::unique_ptr<net::Link>> join();
    Status session(net::Link& hub, const std::stop_token& stop);
    Status handle(const wire::ControlT& message);
    Status assign(const wire::fb::AssignT& assign);
    void set_coordinators(const wire::fb::CoordinatorsT& coordinators);
    void set_neighbours(const wire::fb::NeighboursT& neighbours);
    // Tries one coordinator that has no link, if it is time to.
    void dial();
    Status dial_one(const wire::fb::CoordinatorT& coordinator, const std::shared_ptr<std::atomic<bool>>& alive);
    Result<std::unique_ptr<net::Link>> connect(const wire::fb::CoordinatorT& coordinator);
    // `first`: of this session; says in full what is held.
    Status report(net::Link& hub, std::uint64_t sequence, bool first);

    WorkerOptions options_;
    net::Identity identity_;
    net::TlsContext tls_;
    store::SliceStore store_;
    store::Neighbourhood neighbourhood_;
    std::unique_ptr<expert::Engine> engine_;
    Loader loader_;
    Prober prober_;  // before the server, which ends first
    Server server_;
    net::Wakeup stop_wakeup_;

    wire::fb::WelcomeT welcome_;
    std::shared_ptr<const model::Manifest> manifest_;
    Digest model_id_;
    std::vector<std::uint32_t>
        epochs_;  // of the sets of slices of this model that it was told to hold, the latest last
    std::map<std::string, Peer> peers_;  // by coordinator id
    std::set<std::string> left_out_;     // coordinators beyond those that are served
    Refusals refusals_;
    std::uint64_t asked_ = 0;                                   // sequence of the hub's last question
    std::unique_ptr<store::NeighbourServer> neighbour_server_;  // last: uses most of the above; null: offers nothing
};

}  // namespace linkcpp::worker
