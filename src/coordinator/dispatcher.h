// Dispatch and combine: sends each (token, expert, weight) pair of a layer to a holder of that expert and puts what
// comes back where it belongs. Exact: nothing is skipped, whoever fails; without any holder the call fails.
//
// All pairs of one expert in one call go to the same holder: its kernels then see the batch that one process would see.
//
// In exact mode a share of the pairs is audited: computed again by another holder of the expert, else by the
// coordinator itself, and compared before the layer's result is given out. Who is found wrong gets no more work, and
// what it has done for the layer is done again. Where nobody else can compute a pair the hub is told of it, and rules
// when it can.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "coordinator/auditor.h"
#include "coordinator/local_experts.h"
#include "coordinator/recovery.h"
#include "coordinator/routes.h"
#include "model/manifest.h"
#include "net/link.h"
#include "wire/compute.h"
#include "wire/control.h"

namespace linkcpp::coordinator {

struct DispatchOptions {
    wire::Mode mode = wire::Mode::exact;
    wire::RowType row_type = wire::RowType::f32;  // f16 in partial mode only
    Patience patience;
    double audit = 0.001;  // share of the pairs that is computed again; 1: none is used that was not
    // How long a call waits for the hub's ruling on rows that are apart.
    Duration ruling_wait = std::chrono::seconds(10);
    std::uint32_t max_frame = wire::kMaxComputeBytes;  // bytes of one part of an answer
};

struct DispatchStats {
    std::atomic<std::uint64_t> layers{0};    // blocks and lone products
    std::atomic<std::uint64_t> products{0};  // of these, products computed one at a time
    std::atomic<std::uint64_t> requests{0};
    std::atomic<std::uint64_t> rows{0};
    std::atomic<std::uint64_t> pairs{0};
    std::atomic<std::uint64_t> local_pairs{0};
    std::atomic<std::uint64_t> retries{0};  // pairs that had to be sent again
    std::atomic<std::uint64_t> failures{0};
    std::atomic<std::uint64_t> late{0};         // answers, or parts, that nobody waited for any more
    std::atomic<std::uint64_t> twice{0};        // requests whose work was given to another, too, because they were late
    std::atomic<std::uint64_t> twice_first{0};  // of these, those where the other was first
    std::atomic<std::uint64_t> compute_us{0};   // what workers say they have computed for
    std::atomic<std::uint64_t> bytes_in{0};
    std::atomic<std::uint64_t> bytes_out{0};
    std::atomic<std::uint64_t> audits{0};     // pairs computed again and compared
    std::atomic<std::uint64_t> rulings{0};    // of these, those that were apart, so that the truth had to be asked
    std::atomic<std::uint64_t> unchecked{0};  // drawn for an audit, and nobody else could compute them
};

// A worker as it looks from here.
struct LinkReport {
    wire::fb::LinkCondition condition = wire::fb::LinkCondition::none;
    double wait_us = 0;
    std::array<std::uint64_t, kFaults> faults{};
};

struct Notice {
    std::string worker;  // id
    std::string text;
};

struct AuditCount {
    std::uint64_t pairs = 0;
    std::uint64_t wrong = 0;
};

// One layer's work. The row of token t and slot s begins at rows + t * token_stride + s * slot_stride: with slot_stride
// 0 all experts of a token share its row. ids and weights of a token begin at t * their stride. Strides in elements.
struct Work {
    std::uint32_t layer = 0;
    std::optional<model::Role> product;  // nothing: the experts' whole FFN
    std::uint32_t n_in = 0;
    std::uint32_t n_out = 0;
    std::uint32_t n_tokens = 0;
    std::uint32_t n_used = 0;
    const float* rows = nullptr;
    std::size_t token_stride = 0;
    std::size_t slot_stride = 0;
    const std::int32_t* ids = nullptr;
    std::size_t ids_stride = 0;
    const float* weights = nullptr;  // partial sums only
    std::size_t weights_stride = 0;
    std::uint32_t n_summed = 0;  // partial sums only: the first so many of a token's experts
};

// Asks the hub who is right, from llama.cpp's calling thread; waits for the verdict for so long, and not at all for 0:
// then the verdict is empty. Errors: timeout, disconnected (the hub is away).
using AskHub = std::function<Result<wire::fb::VerdictT>(wire::fb::DisputeT dispute, Duration wait)>;

class Dispatcher {
  public:
    explicit Dispatcher(DispatchOptions options);

    // Control thread: what the hub says, and links whose workers have been admitted.
    void set_manifest(std::shared_ptr<const model::Manifest> manifest, const Digest& id);
    void set_routes(std::shared_ptr<const Routes> routes);
    // `checker`: computes audits only, beside what workers do at the time.
    void set_local(std::unique_ptr<LocalExperts> local, std::unique_ptr<LocalExperts> checker);
    void add_link(std::string worker, std::unique_ptr<net::Link> link);
    // Before the first call.
    void set_ask_hub(AskHub ask) { ask_hub_ = std::move(ask); }

    // Calling thread of llama.cpp; calls from several threads wait for each other.
    // out: {n_out, n_used, n_tokens}, one row a pair. Errors: disconnected (nobody can compute an expert; says which).
    Status compute_rows(const Work& work, std::span<float> out);
    // out: {n_out, n_tokens}, weighted sums; of work whose experts share their token's row.
    Status compute_sums(const Work& work, std::span<float> out);

    // From any thread.
    const DispatchStats& stats() const { return stats_; }
    const DispatchOptions& options() const { return options_; }
    // Layers that are computed one product at a time, and what their nodes look like. The first note of a layer counts.
    void note_unknown(std::uint32_t layer, const std::string& nodes);
    std::map<std::uint32_t, std::string> unknown() const;
    // Audits of each worker, by id.
    std::map<std::string, AuditCount> audits() const;
    // How each worker looks from here, by id; as of a moment ago.
    std::map<std::string, LinkReport> links() const;
    // What has happened to workers since the last call of this.
    std::vector<Notice> take_notices();
    // Whether every slice has a holder with a link, or the coordinator computes what has none. `missing`: how many have
    // none; `to_come`: of these, how many are held by workers whose link is not there yet.
    bool covered(std::size_t* missing = nullptr, std::size_t* to_come = nullptr);
    std::size_t n_quarantined();

  private:
    struct Holder {
        explicit Holder(const Patience& patience) : watch(patience) {}

        std::string id;
        std::string name;
        std::unique_ptr<net::Link> link;
        std::unique_ptr<net::Link> next_link;  // it has dialled again; taken when the old one is given up
        HolderWatch watch;
        double load = 0;  // of the current call
        // It has computed wrong: not used before the hub has given it another set of slices.
        bool distrusted = false;
        std::uint32_t distrusted_epoch = 0;

        std::uint64_t past_bytes_in = 0;  // of links that are gone
        std::uint64_t past_bytes_out = 0;

        bool was_at_fault = false;  // and has not answered since
        TimePoint late_noted{};

        bool usable() const { return link != nullptr && !distrusted; }
        void drop_link();
        // The link that has come since, if any, in the place of the present one. What was asked on that is forgotten.
        void take_next_link(TimePoint now);
    };
    // Pairs of one expert: positions (token * n_used + slot), ascending.
    struct Task {
        std::uint16_t expert = 0;
        std::vector<std::uint32_t> positions;
        // Who has refused it in this call, and under which epoch: with other slices it may do it.
        std::vector<std::pair<const Holder*, std::uint32_t>> failed;
        bool is_check = false;  // its rows are compared, not used
    };
    struct Request {
        Holder* holder = nullptr;
        std::vector<Task> tasks;
        std::vector<std::uint32_t> positions;  // one a pair, in the request's order
        std::vector<std::uint32_t> rows;       // which rows go out: tokens, or positions where each pair has its own
        double units = 0;
        std::size_t received = 0;  // rows that have come
        bool is_check = false;
        bool asked_twice = false;  // its work was given to another as well, or nobody else can do it
        bool is_second = false;    // it is that other's
        RawFloats sums;            // partial mode: {n_out, rows.size()}
        TimePoint sent{};
    };
    class Call;
    friend class Call;

    void refresh();
    Status compute(const Work& work, wire::Mode mode, std::span<float> out);
    // Into the log, and for the hub.
    void note(const Holder& holder, LogLevel level, std::string text);
    void note_links();

    DispatchOptions options_;
    DispatchStats stats_;

    mutable std::mutex notes_mutex_;  // guards the four below
    std::map<std::uint32_t, std::string> unknown_;
    std::map<std::string, AuditCount> audits_;
    std::map<std::string, LinkReport> links_;
    std::vector<Notice> notices_;
    TimePoint links_noted_{};  // of the calling thread

    std::mutex inbox_mutex_;  // guards the inbox_*
    std::vector<std::pair<std::string, std::unique_ptr<net::Link>>> inbox_links_;
    std::shared_ptr<const Routes> inbox_routes_;
    std::shared_ptr<const model::Manifest> inbox_manifest_;
    Digest inbox_model_id_;
    std::unique_ptr<LocalExperts> inbox_local_;
    std::unique_ptr<LocalExperts> inbox_checker_;
    std::atomic<bool> inbox_full_{false};

    // One call at a time. It is held across I/O on purpose: a second caller could do nothing but wait.
    std::mutex call_mutex_;
    std::shared_ptr<const Routes> routes_;
    std::shared_ptr<const model::Manifest> manifest_;
    Digest model_id_;
    std::unique_ptr<LocalExperts> local_;
    std::unique_ptr<LocalExperts> checker_;
    std::vector<std::unique_ptr<Holder>> holders_;  // those with a link
    std::vector<Holder*> by_route_;                 // routes_->workers[i] → holder, or null
    std::uint64_t next_request_ = 1;
    TwiceBudget twice_;
    TimePoint last_call_ended_{};
    Auditor auditor_;
    AskHub ask_hub_;
    RawBytes head_;  // of the request being written
};

}  // namespace linkcpp::coordinator
