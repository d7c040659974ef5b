// Probes (trust/probe.h) that the hub asks for: computed on the data thread, a part at a time, between requests.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "expert/engine.h"
#include "model/manifest.h"
#include "net/wakeup.h"
#include "wire/control.h"
#include "worker/server.h"

namespace linkcpp::worker {

class Prober {
  public:
    // Both outlive this object, and the server runs none of its work after that.
    Prober(expert::Engine& engine, Server& server) : engine_(engine), server_(server) {}

    // From one thread. What cannot be probed is answered with its error.
    void start(const wire::fb::ProbeT& probe, std::shared_ptr<const model::Manifest> manifest, const Digest& model_id);
    // From any thread: the parts that are done, in order.
    std::vector<wire::fb::ProbeRowsT> take();
    // Signalled when there are some.
    const net::Wakeup& on_done() const { return done_; }

  private:
    struct Job;
    void compute(const std::shared_ptr<Job>& job);
    void put(wire::fb::ProbeRowsT rows);

    expert::Engine& engine_;
    Server& server_;
    net::Wakeup done_;
    std::mutex mutex_;  // guards results_
    std::vector<wire::fb::ProbeRowsT> results_;
};

}  // namespace linkcpp::worker
