// Admission: a worker serves what it was given only after it has computed right with it, on its own device. It shows
// that by a probe (trust/probe.h) of slices that it holds and of an input that nobody can know before; it is probed
// again whenever it has loaded something, has come back, and at intervals, each time with slices that were looked at
// longest ago. A worker that computes wrong is quarantined until its operator clears it. No I/O; one thread.
//
// What a round of probes costs is bounded, so it looks at some slices of each kind of layer: the bytes of all of them
// have their hashes, and a device that computes wrong does so with every slice of a kind.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/clock.h"
#include "hub/swarm.h"
#include "model/moe.h"
#include "plan/placement.h"
#include "trust/probe.h"
#include "trust/truth.h"
#include "wire/control.h"

namespace linkcpp::hub {

enum class Trust : std::uint8_t { unproven, admitted, quarantined };
std::string_view to_string(Trust trust);

// A worker in the eyes of admission; times are those of the wall, in seconds since 1970, 0 for never.
struct TrustRecord {
    std::string name;
    Trust trust = Trust::unproven;
    std::int64_t since = 0;           // of this state
    std::int64_t served_since = 0;    // when it was admitted for the first time, whatever has become of it since
    std::int64_t last_good = 0;       // when its work was found right the last time
    std::int64_t in_doubt_since = 0;  // quarantined: its work since then may have been wrong
    std::string why;                  // quarantined or not admitted: what was wrong
    std::uint64_t n_probes = 0;       // judged, since it joined
    plan::Holdings probed;            // slices that it was found right with since it joined
    std::string rounding;             // for people: how it rounds (expert/rounding.h)
    // Of the last probe the row nearest to its tolerance.
    std::string worst_part;
    double worst_l2 = 0;
    double tolerance_l2 = 0;
    std::vector<std::string> driver;  // as of its last probe
};

// A probe whose rows have all come.
struct ProbeAnswer {
    std::string worker;
    std::uint64_t sequence = 0;
    const model::MoeLayer* layer = nullptr;
    trust::ProbeInput input;
    trust::ProbeRows rows;
    bool first = false;  // it waits to be admitted: judge with all there is
};

class Admission {
  public:
    struct Options {
        Duration interval = std::chrono::minutes(2);  // between probes of a worker that is admitted
        Duration patience = std::chrono::minutes(3);  // for a probe's rows; some devices compile their kernels first
        std::uint64_t n_weights = 30'000'000;         // that one round looks at, about
    };

    // What has become of a worker.
    enum class Outcome : std::uint8_t {
        pending,
        admitted,  // for what it holds under `epoch`
        failed,    // it gave no rows: `why`
        wrong,     // they were wrong: it is quarantined
    };
    struct Change {
        std::string worker;
        Outcome outcome = Outcome::pending;
        std::uint32_t epoch = 0;
        std::string why;
    };

    // `seed`: of what is probed, unknown to all workers.
    Admission(const model::MoeModel& model, Options options, std::uint64_t seed);

    // What is known from before this hub was started: who is in quarantine, and since when each has served.
    void restore(std::map<std::string, TrustRecord> known);
    void joined(const std::string& worker, const std::string& name);
    void left(const std::string& worker);

    // What to ask now, of whom: at most one probe of a worker is under way.
    std::vector<std::pair<std::string, wire::fb::ProbeT>> due(const Swarm& swarm, TimePoint now);
    // When to call due() and overdue() next.
    TimePoint next(TimePoint now) const;
    // Whoever has not answered in time.
    std::vector<Change> overdue(TimePoint now);

    // Rows of a worker. All of them there: the answer to be judged. `change`: it gave an error, or nonsense.
    std::optional<ProbeAnswer> received(const std::string& worker, wire::fb::ProbeRowsT& rows, std::int64_t wall,
                                        Change& change);
    // The judgement of an answer.
    Change judged(const std::string& worker, std::uint64_t sequence, const Result<trust::Findings>& findings,
                  TimePoint now, std::int64_t wall);

    // A row of its work was found wrong; also of one that is away now. False when it is in quarantine already.
    bool quarantine(const std::string& worker, const std::string& why, std::int64_t wall);
    // The operator trusts it again: by id, at least six digits of its beginning, or name. Errors: not_found, invalid
    // (fits several).
    Result<std::string> clear(std::string_view worker, std::int64_t wall);

    bool is_quarantined(const std::string& worker) const;
    const std::map<std::string, TrustRecord>& records() const { return records_; }

  private:
    struct Round {
        std::uint32_t epoch = 0;
        bool first = false;
        std::vector<wire::fb::ProbeT> left;  // not asked yet
        std::optional<ProbeAnswer> asked;    // what has come of the one that is under way
        TimePoint deadline{};
    };

    Round make_round(const WorkerRecord& worker, const plan::Holdings& unproven);
    wire::fb::ProbeT make_probe(std::size_t layer, const plan::ExpertSet& held, const plan::ExpertSet& probed,
                                std::size_t n_layers);

    const model::MoeModel& model_;
    Options options_;
    std::mt19937_64 random_;
    std::vector<std::size_t> kind_;  // of each layer: the first layer that is like it
    std::uint64_t next_sequence_ = 1;
    std::map<std::string, TrustRecord> records_;  // those who are here, and those in quarantine
    std::map<std::string, Round> rounds_;
    std::map<std::string, TimePoint> next_round_;  // of those that are admitted
    std::map<std::string, std::size_t> next_layer_;
};

}  // namespace linkcpp::hub
