// The coordinator's control plane: registers with the hub, learns model and routes, and lets workers' data links in.
// One thread of its own, the control thread; it reconnects by itself, and dispatch goes on while the hub is away.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/refusals.h"
#include "coordinator/dispatcher.h"
#include "coordinator/routes.h"
#include "model/manifest.h"
#include "net/control_link.h"
#include "net/identity.h"
#include "net/join_line.h"
#include "net/link.h"
#include "net/socket.h"
#include "net/wakeup.h"

namespace linkcpp::coordinator {

struct HubClientOptions {
    net::JoinLine hub;
    net::Address listen{"127.0.0.1", 0};  // data links over TLS
    std::string advertise;                // where workers reach that; empty: as it is
    bool unix_socket = true;              // workers on this machine use one
    bool local_experts = true;
    std::filesystem::path model;    // for local experts; empty: what the hub says, when it is on this machine
    unsigned n_threads = 0;         // of local experts
    std::uint64_t local_bytes = 0;  // memory for local experts; 0: half of what is free then
    std::string process;            // for people
    std::size_t max_callers = 64;   // data links that are not let in yet; of more the oldest gives way
    Duration hello_time = std::chrono::seconds(5);  // until one must have said who it is
};

class HubClient {
  public:
    // Opens the listeners and starts the control thread. `dispatcher` outlives this object.
    static Result<std::unique_ptr<HubClient>> start(HubClientOptions options, Dispatcher& dispatcher);
    ~HubClient();
    // Asks the control thread to end and waits for that, but not for long: it may be dialling a hub that does not
    // answer. False when it has not ended: then this object must not be destroyed.
    bool stop(Duration timeout);
    const std::filesystem::path& unix_path() const { return unix_path_; }

    // Waits until the hub has sent the model and the first routes, with a line of progress every few seconds.
    // Errors: timeout, invalid (wrong key or token), what else kept it from connecting.
    Result<std::shared_ptr<const model::Manifest>> wait_for_model(Duration timeout);

    // See AskHub (dispatcher.h).
    Result<wire::fb::VerdictT> ask(wire::fb::DisputeT dispute, Duration wait);

  private:
    struct Caller {  // a data link that has not said hello yet
        std::unique_ptr<net::Link> link;
        std::optional<std::uint32_t> uid;  // of a Unix socket
        TimePoint since{};
        bool done = false;
    };

    HubClient(HubClientOptions options, Dispatcher& dispatcher, net::Identity identity, net::TlsContext tls,
              net::Listener tcp, net::Listener unix_listener, std::filesystem::path unix_path);

    void run(const std::stop_token& stop);
    Result<std::unique_ptr<net::Link>> connect();
    Status session(net::Link& hub, const std::stop_token& stop);
    Status handle(net::Link& hub, const wire::ControlT& message);
    Status take_manifest(const wire::fb::ManifestT& message);
    Status take_routes(const wire::fb::RoutesT& message);
    // A hub that has just been started again knows of no worker what it can do: until it does, or for a while, what its
    // predecessor said goes on counting, but for workers that are in quarantine now.
    void choose_routes();
    Status send_notices(net::Link& hub);
    void open_local_experts();
    Status report(net::Link& hub, std::uint64_t sequence);
    Status send_disputes(net::Link& hub);
    void take_verdict(const wire::fb::VerdictT& verdict);
    // One turn of the data links' side: accepts, greets, hands over; waits at most `timeout`. `hub` may be null.
    void turn(net::Link* hub, Duration timeout);
    void accept(net::Listener& listener, bool encrypted);
    void greet(Caller& caller);
    void fail_start(const Error& error);

    HubClientOptions options_;
    Dispatcher& dispatcher_;
    net::Identity identity_;
    net::TlsContext tls_;
    net::Listener tcp_;
    net::Listener unix_;
    std::filesystem::path unix_path_;
    net::Wakeup stop_wakeup_;

    // Of the control thread alone.
    std::vector<Caller> callers_;
    Refusals refusals_;
    TimePoint accept_again_{};
    std::shared_ptr<const Routes> routes_;  // the hub's last word, which says who may dial
    std::shared_ptr<const Routes> used_;    // what the dispatcher goes by
    TimePoint hold_until_{};
    wire::fb::WelcomeT welcome_;

    std::mutex mutex_;  // guards the four below
    std::condition_variable changed_;
    std::shared_ptr<const model::Manifest> manifest_;
    Digest model_id_;
    bool have_routes_ = false;
    Error last_error_;
    bool hopeless_ = false;  // last_error_ will not go away by trying again

    std::mutex disputes_mutex_;  // guards the four below
    std::condition_variable verdict_;
    std::deque<wire::fb::DisputeT> disputes_;  // not sent yet
    std::map<std::uint64_t, std::optional<wire::fb::VerdictT>> awaited_;
    std::uint64_t next_dispute_ = 1;
    net::Wakeup dispute_wakeup_;

    std::atomic<bool> ended_{false};
    std::jthread thread_;  // last
};

}  // namespace linkcpp::coordinator
