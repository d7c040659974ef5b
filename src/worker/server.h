// Serving: answers compute requests on data links with the engine's results. One thread, the data thread, owns the
// links; "these rows through these experts of this layer of this model" is all that a coordinator can ask for.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "expert/engine.h"
#include "net/link.h"
#include "net/wakeup.h"
#include "wire/compute.h"

namespace linkcpp::worker {

struct ServerStats {
    std::atomic<std::uint64_t> requests{0};
    std::atomic<std::uint64_t> pairs{0};
    std::atomic<std::uint64_t> rows{0};
    std::atomic<std::uint64_t> busy_us{0};
    std::atomic<std::uint64_t> bytes_in{0};
    std::atomic<std::uint64_t> bytes_out{0};
    std::atomic<std::uint64_t> refused{0};
};

class Server {
  public:
    explicit Server(expert::Engine& engine);
    ~Server();

    // From any thread. The link has passed its hello; `alive` is set to false when the server has let it go.
    void add(std::unique_ptr<net::Link> link, std::shared_ptr<std::atomic<bool>> alive);
    // From any thread: `work` runs on the data thread, which alone may compute, between requests. One piece a turn, so
    // that requests wait for one piece at most.
    void post(std::function<void()> work);

    const ServerStats& stats() const { return stats_; }
    // Signalled when a link was let go.
    const net::Wakeup& on_closed() const { return closed_; }

  private:
    struct Client {
        std::unique_ptr<net::Link> link;
        std::shared_ptr<std::atomic<bool>> alive;
    };

    void run(const std::stop_token& stop);
    void adopt();
    void work_one();
    // False when the link must be closed.
    bool serve(net::Link& link);
    Status answer(net::Link& link, ByteView payload);
    Status compute(const wire::DecodedRequest& request, const expert::RowSink& sink);
    static Status send_rows(net::Link& link, const wire::ComputeRequest& request, const expert::RowPart& part,
                            std::uint32_t compute_us);

    expert::Engine& engine_;
    ServerStats stats_;
    net::Wakeup wake_;
    net::Wakeup closed_;

    std::mutex inbox_mutex_;  // guards inbox_ and work_
    std::vector<Client> inbox_;
    std::deque<std::function<void()>> work_;

    // Of the data thread alone.
    std::vector<Client> clients_;
    RawFloats rows_;
    std::vector<expert::Pair> pairs_;
    RawFloats sums_;

    std::jthread thread_;  // last: starts when all else is there, ends first
};

}  // namespace linkcpp::worker
