// Serving: answers compute requests on data links with the engine's results. "These rows through these experts of this
// layer of this model" is all that a coordinator can ask for.
//
// Threads: the data thread reads, computes and answers. The pulse thread says on the links of those who wait that this
// process lives, while the data thread computes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
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
    std::atomic<std::uint64_t> expired{0};  // of these, requests that were too old when their turn came
    std::atomic<std::uint64_t> stale{0};    // … for another set of slices than this worker has
};

class Server {
  public:
    struct Limits {
        std::uint32_t frame_bytes = wire::kMaxComputeBytes;     // of one request
        std::size_t queued_bytes = net::Link::kMaxQueuedBytes;  // that wait to be written on one link
    };
    explicit Server(expert::Engine& engine);
    Server(expert::Engine& engine, const Limits& limits);
    ~Server();

    // From any thread. The link has passed its hello; `alive` is set to false when the server has let it go.
    // `id`: whose it is, for drop().
    void add(std::unique_ptr<net::Link> link, std::shared_ptr<std::atomic<bool>> alive, std::string id = {});
    // From any thread: that one's links are closed, after what is being computed.
    void drop(const std::string& id);
    // From any thread: `work` runs on the data thread, which alone may compute, between requests. One piece a turn, so
    // that requests wait for one piece at most.
    void post(std::function<void()> work);

    // From any thread: requests for these sets of slices are answered, others refused. What of a set is not held any
    // more is refused by itself.
    void set_epochs(std::vector<std::uint32_t> epochs);

    const ServerStats& stats() const { return stats_; }
    // Signalled when a link was let go.
    const net::Wakeup& on_closed() const { return closed_; }

  private:
    struct Client {
        std::unique_ptr<net::Link> link;
        std::shared_ptr<std::atomic<bool>> alive;
        std::string id;
    };

    using Lock = std::unique_lock<std::mutex>;
    // Of the data thread; `lock` holds links_mutex_ before and after, and not while anything is computed.
    void run(const std::stop_token& stop);
    void adopt();
    void work_one(Lock& lock);
    // False when the link must be closed.
    bool serve(net::Link& link, Lock& lock);
    bool knows(std::uint32_t epoch);
    Status answer(net::Link& link, ByteView payload, Lock& lock);
    Status compute(const wire::DecodedRequest& request, const expert::RowSink& sink);
    Status refuse(net::Link& link, const wire::ComputeRequest& request, wire::Outcome outcome,
                  std::uint32_t compute_us);
    // What is computed while it lives is computed without the lock, and who waits is told that this process lives.
    class AtWork;
    void pulse(const std::stop_token& stop);
    void send_pulses();
    // Something is being computed, or a request has come by half.
    bool is_awaited() const;
    static Status send_rows(net::Link& link, const wire::ComputeRequest& request, const expert::RowPart& part,
                            std::uint32_t compute_us);

    expert::Engine& engine_;
    Limits limits_;
    ServerStats stats_;
    net::Wakeup wake_;
    net::Wakeup closed_;

    std::mutex inbox_mutex_;  // guards the four below
    std::vector<Client> inbox_;
    std::deque<std::function<void()>> work_;
    std::vector<std::uint32_t> inbox_epochs_;
    std::vector<std::string> dropped_;

    std::mutex links_mutex_;  // guards the six below; held by the data thread but while it sleeps or computes
    std::vector<Client> clients_;
    const net::Link* asking_ = nullptr;  // whose request is being computed
    bool at_work_ = false;
    TimePoint worked_at_{};
    bool pulse_sleeps_ = false;
    std::condition_variable_any pulse_wanted_;

    // Of the data thread alone.
    std::vector<std::uint32_t> epochs_;
    RawFloats rows_;
    std::vector<expert::Pair> pairs_;
    RawFloats sums_;

    std::jthread thread_;  // last: start when all else is there, end first
    std::jthread pulse_thread_;
};

}  // namespace linkcpp::worker
