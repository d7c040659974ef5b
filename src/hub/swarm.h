// The swarm as the hub sees it: who has joined, who should hold what, who holds what already, and has proven it. No
// I/O; one thread.
//
// A slice is routed to a worker that has loaded it and has computed right with what it holds (admission.h).
//
// Moving slices is done in two steps, so that nothing is ever given away before somebody else has it: a worker is first
// assigned its share and what it has that nobody else has yet; once all shares are loaded, its share alone. What it has
// is what it says when it joins: it may have computed on while this hub, or the one before, was away.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/sha256.h"
#include "model/manifest.h"
#include "plan/placement.h"
#include "wire/control.h"

namespace linkcpp::hub {

struct WorkerRecord {
    std::string id;
    wire::fb::HelloT hello;  // as it joined; its token is emptied
    bool connected = false;
    TimePoint left_at{};  // when not connected
    TimePoint seen_at{};
    std::uint32_t epoch = 0;        // of `assigned`
    std::uint32_t told_epoch = 0;   // of the last assignment that it has heard of: coordinators go by that
    std::uint32_t ready_epoch = 0;  // of the last assignment that it has loaded
    plan::Holdings share;           // what placement gives it
    plan::Holdings assigned;        // what it was told to hold: its share, and perhaps more for a while
    bool heard = false;             // it has said what it holds: before that nothing is assigned
    plan::Holdings ready;           // what it has said that it holds
    plan::Holdings proven;          // of these, what it was admitted for
    bool quarantined = false;       // it has computed wrong: it is given nothing
    bool drained = false;           // its operator wants it empty
    bool must_assign = false;       // also if nothing has changed
    wire::fb::ShardT shard;         // its last report
    int n_failures = 0;             // to load, in a row
    TimePoint retry_at{};           // after a failure: until then others get its slices
    wire::fb::StatsT stats;
};

// What a hub that is started again knows of a worker from before.
struct RememberedWorker {
    std::string id;
    std::string name;
    std::uint64_t memory_bytes = 0;
    bool drained = false;
    plan::Holdings share;
};

class Swarm {
  public:
    struct Options {
        std::uint32_t n_replicas = 1;
        // Epochs count from here. A hub that was started again begins above all that it gave out before (by the clock),
        // or it would take a worker's word about an old assignment for one about a new.
        std::uint32_t first_epoch = 1;
        unsigned expected_workers = 0;                     // do not place before so many have joined …
        Duration patience = std::chrono::seconds(20);      // … or this has passed since the first
        Duration settle = std::chrono::milliseconds(200);  // wait for others who join at the same time
        Duration retry =
            std::chrono::seconds(20);  // before a worker that could not load is asked again; then twice that, …
        Duration grace = std::chrono::seconds(15);  // a worker that comes back within it finds its share untouched
        Duration restart_grace = std::chrono::seconds(30);  // the same after the hub itself was started again
    };

    Swarm(const model::Manifest& manifest, const Digest& model_id, Options options);

    // Before anybody joins: what was placed before this hub was started again. Who does not come back in time loses it.
    void remember(std::vector<RememberedWorker> workers, TimePoint now);
    void joined(const std::string& id, const wire::fb::HelloT& hello, TimePoint now);
    void left(const std::string& id, TimePoint now);
    // For good: nobody waits for it.
    void said_goodbye(const std::string& id, TimePoint now);
    // True when the routes have changed.
    bool reported(const std::string& id, const wire::fb::ShardT& shard, TimePoint now);
    void reported(const std::string& id, const wire::fb::StatsT& stats, TimePoint now);

    // It has passed the probe with what it held under that epoch. True when what is routable has changed.
    bool admitted(const std::string& id, std::uint32_t epoch);
    // It could not be probed: treated as one that cannot load.
    void failed(const std::string& id, const std::string& why, TimePoint now);
    // It has computed wrong, or may serve again.
    void set_quarantined(const std::string& id, bool quarantined, TimePoint now);

    // It is to be emptied, or filled again; what nobody else has it keeps until somebody has. False: it is so already.
    bool set_drained(const std::string& id, bool drained, TimePoint now);
    // The id of the worker of that name, id, or beginning of an id of six digits at least. Errors: not_found, invalid
    // (fits several).
    Result<std::string> find(std::string_view worker) const;

    // Places anew when it is time to. The ids of connected workers whose assignment has changed.
    std::vector<std::string> replan(TimePoint now);
    // Grows with each placement.
    std::uint64_t n_placements() const { return n_placements_; }
    // When to call replan() next; nothing waits: far away.
    TimePoint next_replan(TimePoint now) const;

    wire::fb::AssignT assignment(const std::string& id) const;
    wire::fb::RoutesT routes() const;
    std::uint64_t missing_slices() const;  // without a live holder
    // Slices have been placed, and whoever was given some has loaded them and was admitted, or failed to.
    bool settled() const;
    // Of what it holds, what it was not admitted for.
    plan::Holdings unproven(const WorkerRecord& worker) const;
    std::uint64_t total_slices() const;

    const std::map<std::string, WorkerRecord>& workers() const { return workers_; }
    const Options& options() const { return options_; }

  private:
    wire::SliceSet to_slices(const plan::Holdings& holdings) const;
    // When to place, if that is to be done.
    TimePoint place_at() const;
    plan::Holdings routable(const WorkerRecord& worker) const;
    // What it says it holds of this model.
    plan::Holdings said(const WorkerRecord& worker, const wire::fb::ShardT& shard) const;
    void ask_again_later(WorkerRecord& worker, const std::string& why, TimePoint now);
    // What it should hold now: its share, and what it has that no other worker who should have it has proven yet.
    plan::Holdings wanted(const WorkerRecord& worker) const;
    // It has not loaded, or not shown, what it was assigned.
    bool is_under_way(const WorkerRecord& worker) const;
    plan::Holdings up_to(std::uint64_t bytes, const plan::Holdings& first, const plan::Holdings& then) const;

    const model::MoeModel& model_;
    Digest model_id_;
    Options options_;
    std::map<std::string, WorkerRecord> workers_;
    bool must_place_ = false;   // membership has changed
    bool must_assign_ = false;  // somebody became ready
    bool placed_ = false;
    std::uint64_t n_placements_ = 0;
    TimePoint changed_at_{};
    TimePoint first_join_{};
};

}  // namespace linkcpp::hub
