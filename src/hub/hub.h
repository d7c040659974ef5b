// The hub: the control plane. Knows the model's manifest, the workers and what they hold; decides the placement; hands
// out slices; tells coordinators who holds what, and workers which coordinators to dial.
//
// Threads: the caller of run() is the hub thread and owns everything but what is marked; HTTPS has its own (http.h),
// and the judge (judge.h).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stop_token>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/refusals.h"
#include "hub/access.h"
#include "hub/admission.h"
#include "hub/http.h"
#include "hub/judge.h"
#include "hub/swarm.h"
#include "model/gguf_file.h"
#include "model/manifest.h"
#include "net/control_link.h"
#include "net/identity.h"
#include "net/join_line.h"
#include "net/link.h"
#include "net/socket.h"
#include "net/wakeup.h"

namespace linkcpp::hub {

// Against strangers, and peers who have too much of everything.
struct HubLimits {
    std::size_t peers = 1024;                            // connections to the hub's port
    std::size_t per_address = 256;                       // of these, from one address
    std::size_t strangers = 32;                          // … that have not said yet who they are; the oldest gives way
    Duration hello_time = std::chrono::seconds(5);       // until a stranger must have said it
    std::size_t message_bytes = wire::kMaxControlBytes;  // of a peer's, once it is let in
    std::size_t queued_bytes = 64u << 20;                // that wait for one peer, before it is given up
    std::size_t https_requests = 80;                     // at a time
    std::size_t https_per_address = 48;  // connections to HTTPS from one address that have shown no token yet
};

struct HubOptions {
    std::filesystem::path model;
    net::Address listen{"127.0.0.1", 7070};
    std::uint16_t https_port = 7071;
    std::string advertised_host;        // in the join line; empty: the listening one
    std::set<std::string> own_workers;  // names of those that whoever starts this hub starts, too
    Swarm::Options swarm;
    Admission::Options admission;
    HubLimits limits;
    Duration heartbeat = std::chrono::seconds(1);
    Duration silence = std::chrono::seconds(10);  // a peer that says nothing for so long is gone
};

class Hub {
  public:
    // Reads (or makes) manifest, key and token; opens both ports. Starts no thread that outlives the call. Errors:
    // those of GgufFile, read_moe, Listener.
    static Result<std::unique_ptr<Hub>> make(HubOptions options);
    ~Hub();

    // Serves until `stop` is requested.
    Status run(const std::stop_token& stop);

    // For other machines, with the token that lets workers in; when that was revoked, without one. Before run() only:
    // the operator may change it then.
    net::JoinLine join_line() const;
    // For what this process starts, and for this user's programs on this machine.
    net::JoinLine own_line() const;
    // The secret of whoever runs this hub: it opens what a join line does not.
    const std::string& operator_token() const { return operator_token_; }

    // From any thread: the status as JSON, with the workers' counters as of now (waits for them at most 300 ms).
    std::string status_json();
    // From any thread but the hub's: what the operator wants (http.h). Errors: not_found, invalid, timeout.
    Result<std::string> operate(Command command, const Arguments& arguments);

  private:
    struct Peer {
        std::unique_ptr<net::Link> link;
        std::string from;
        TimePoint since{};
        TimePoint heard{};
        wire::fb::Role role = wire::fb::Role::none;  // none: has not said hello yet
        std::string id;
        std::string https_token;
        wire::fb::HelloT hello;      // of a coordinator
        std::string name;            // of a worker
        std::string slices_address;  // of a worker: where its neighbours fetch slices; empty: nowhere
        wire::fb::StatsT stats;
        std::uint64_t answered = 0;  // the latest question that it has answered with its stats
        bool gone = false;
    };

    Hub(HubOptions options, model::GgufFile file, model::Manifest manifest, net::Identity identity, net::TlsContext tls,
        net::Listener listener, Access access, const std::filesystem::path& state_dir);

    void accept();
    // Whether one more from that address may come; makes room among strangers.
    bool may_come(const std::string& from);
    void serve(Peer& peer);
    Status handle(Peer& peer, wire::ControlT& message);
    Status welcome(Peer& peer, wire::fb::HelloT& hello);
    Status welcome_coordinator(Peer& peer);
    void drop(Peer& peer, const Error& error);
    void note_unknown(const wire::fb::StatsT& stats);
    // For `linkcpp status`: what has happened. `worker`: an id, or nothing.
    void note_event(const std::string& worker, const std::string& text, const Peer* by = nullptr);
    void send_routes();
    void send_coordinators();
    void send_neighbours();
    wire::fb::CoordinatorsT coordinators() const;
    void replan();
    void probe_workers();
    void take_judgements();
    void take_change(const Admission::Change& change);
    void take_ruling(const JudgedDispute& judged);
    void quarantine(const std::string& worker, const std::string& why);
    void tell_quarantined(const std::string& worker);
    void save_trust() const;
    void save_placement();
    void make_calls();
    Result<std::string> run_command(Command command, const Arguments& arguments);
    std::string list_tokens() const;
    net::JoinLine line_of(const JoinToken& token) const;
    Result<std::string> make_token(const Arguments& arguments);
    Result<std::string> rotate_token(const std::string& name);
    Result<std::string> revoke_token(const std::string& name, bool members);
    Result<std::string> revoke(const std::string& member, bool revoked);
    // Who has that key is gone.
    void shut_out(const std::string& key);
    Status save_access();
    // The tokens that open HTTPS are those of now.
    void end_tokens();
    Result<std::string> clear(const std::string& worker);
    Result<std::string> drain(const std::string& worker, bool drained);
    void heartbeat();
    void answer_status();
    std::string make_status() const;
    template <class Message>
    void send(Peer& peer, Message message);

    HubOptions options_;
    model::GgufFile file_;
    model::Manifest manifest_;
    std::string manifest_json_;
    Digest model_id_;
    net::Identity identity_;
    net::TlsContext tls_;
    net::Listener listener_;
    Access access_;
    UniqueFd state_lock_;
    std::filesystem::path access_path_;
    std::string own_secret_;
    Tokens tokens_;
    std::string operator_token_;
    Tokens operator_tokens_;
    std::filesystem::path trust_path_;
    std::filesystem::path placement_path_;
    std::uint64_t n_placements_saved_ = 0;
    Swarm swarm_;
    Admission admission_;
    std::unique_ptr<Judge> judge_;  // while run() does
    std::vector<std::unique_ptr<Peer>> peers_;
    struct AuditSum {
        std::uint64_t pairs = 0;
        std::uint64_t wrong = 0;
    };
    void add_audits(std::map<std::string, AuditSum>& sums, const wire::fb::StatsT& stats) const;
    std::map<std::string, AuditSum> past_audits_;  // of workers: by coordinators that are gone, and by the hub itself
    struct Event {
        std::int64_t time = 0;
        std::string worker;  // name
        std::string text;
        std::string by;  // the program that says so; empty: the hub
    };
    std::deque<Event> events_;
    Refusals refusals_;
    std::set<std::string> computed_for_;  // programs, those that are gone, too
    bool dispute_failed_ = false;
    TimePoint started_;
    TimePoint next_heartbeat_{};
    TimePoint accept_again_{};
    bool routes_changed_ = false;
    bool neighbours_changed_ = false;
    std::map<std::uint32_t, std::string>
        unknown_layers_;  // computed one product at a time by some coordinator, and why
    net::Wakeup wake_;

    std::mutex calls_mutex_;                    // guards calls_
    std::vector<std::function<void()>> calls_;  // to be made on the hub thread

    std::mutex status_mutex_;  // guards the four below
    std::condition_variable status_ready_;
    std::uint64_t status_wanted_ = 0;  // number of the last question asked
    std::uint64_t status_done_ = 0;    // … answered
    std::string status_;
    std::uint64_t status_asked_ = 0;  // hub thread: question that the peers were asked to answer
    TimePoint status_deadline_{};

    std::unique_ptr<HttpServer> http_;  // last: uses all of the above
};

}  // namespace linkcpp::hub
