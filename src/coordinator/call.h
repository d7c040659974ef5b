// One layer's dispatch: what the dispatcher does between being asked and answering. On llama.cpp's calling thread
// alone; call.cpp holds how pairs are shared out, sent, taken back from holders that fail, and put together,
// call_audit.cpp how some of them are checked.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "coordinator/dispatcher.h"

namespace linkcpp::coordinator {

class Dispatcher::Call {
  public:
    Call(Dispatcher& owner, const Work& work, wire::Mode mode, std::span<float> out)
        : d_(owner), work_(work), mode_(mode), out_(out), stall_(owner.options_.patience.coverage) {}
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    // Errors: disconnected (nobody can compute an expert), invalid (what the graph asks for is not in the model).
    Status run();

  private:
    // ---- from pairs to requests
    Status check_sizes() const;
    // The pairs, expert by expert, those with the most work first.
    Status make_tasks();
    // The holder that would finish a task first; in partial mode by load alone, so that the groups that are summed
    // together follow from the placement and never from timing.
    Holder* choose(const Task& task) const;
    // Whether a request with that alone is within what the holder's link takes.
    bool takes(const Holder& holder, const Task& task) const;
    // All pairs of one expert: its task.
    Task whole_task(std::uint16_t expert) const;
    // Its pairs have come, from whoever was first.
    bool is_done(const Task& task) const;
    // Somebody is at it.
    bool is_in_work(const Task& task) const;
    double units_of(const Task& task) const;
    // Requests for what was chosen; gives those whose holder is lost on the way back.
    using Chosen = std::vector<std::pair<Holder*, std::vector<Task>>>;
    static std::vector<Task>& tasks_for(Chosen& chosen, Holder* holder);
    // Microseconds a unit; an unmeasured holder is taken to be as fast as the fastest.
    double speed_of(const Holder& holder, TimePoint time) const;
    Status assign();
    std::uint32_t epoch_of(const Holder& holder) const;
    // At most: tokens that several pairs share are sent once.
    std::size_t bytes_for(std::size_t n_pairs) const;
    wire::RowType row_type() const { return mode_ == wire::Mode::partial ? d_.options_.row_type : wire::RowType::f32; }
    // `is_second`: somebody else is at it already, and late.
    void send_all(Holder& holder, std::vector<Task> tasks, bool is_second = false);
    void send(Holder& holder, std::vector<Task> tasks, bool is_second);
    Status write(net::Link& link, const wire::ComputeRequest& header, std::span<const wire::Pair> pairs,
                 std::span<const std::uint32_t> rows);
    // The pairs of the request's tasks in the order in which they are sent; fills in its positions, rows and units.
    std::vector<wire::Pair> list_pairs(Request& request) const;
    // Each pair has a row of its own, numbered as its position; else those of one token share the token's.
    bool has_own_rows() const { return work_.slot_stride != 0; }
    std::uint32_t n_all_rows() const { return has_own_rows() ? work_.n_tokens * work_.n_used : work_.n_tokens; }
    std::uint32_t row_of(std::uint32_t position) const { return has_own_rows() ? position : position / work_.n_used; }
    const float* row_data(std::uint32_t row) const;
    // The rows of pairs, one for each.
    std::vector<float> gather(std::span<const std::uint32_t> positions) const;
    void copy_rows(std::span<const std::uint32_t> rows, const wire::ComputeRequest& header,
                   std::span<std::byte> to) const;

    // ---- what goes wrong (recovery.h has the rules)
    // The holder's link is given up; what it had goes back to be assigned anew.
    void lose(Holder& holder, Fault fault, const Error& error);
    void give_back(Request& request, const Holder* refused_by);
    // To be assigned anew, unless it is done or somebody else is at it.
    void put_back(Task task);
    // Links that have come in the place of others that work was sent on.
    void take_next_links();
    void give_up();
    // Work that is late is given to others, too.
    void ask_others();
    void ask_others(std::uint64_t id);
    // Requests whose work somebody else has done are waited for no more.
    void forget_done();

    // ---- audit
    // Another's row of a pair that some holder computes.
    struct Check {
        std::uint16_t expert = 0;
        const Holder* by = nullptr;  // null: this program
        std::vector<float> row;      // empty: it has not come, or nobody can compute it
    };
    // Draws among the pairs of a task that `holder` was chosen for, and chooses who computes those again.
    void draw_checks(const Task& task, const Holder* holder, Chosen& chosen);
    Status compute_checks();
    // Compares all that was drawn; what a holder that computes wrong has done is to be done again.
    Status settle_checks();
    // The same for partial sums: a sum is checked when one of its pairs was drawn.
    Status settle_sums();
    Status compute_sum(const wire::fb::DisputeT& dispute, std::vector<float>& sum);
    // Another's result (`check` has none where nobody else could compute it) and the worker's, which are apart or may
    // be: asks for the truth, and takes the consequences.
    Status rule_on(wire::fb::DisputeT dispute, const Check& check, std::span<const float> row, Holder& worker);
    struct Ruling {
        wire::fb::VerdictT verdict;
        bool here = false;   // by this program
        bool later = false;  // the hub rules, and nobody waits for it
    };
    // Whether the slices that this program has checked with are the model's. Where not it checks no more.
    bool checks_with_model(const wire::fb::DisputeT& dispute);
    Result<Ruling> ask(const wire::fb::DisputeT& dispute, bool must_wait) const;
    Result<wire::fb::VerdictT> judge_here(const wire::fb::DisputeT& dispute) const;
    // What claim i of a verdict means for who made it; null: this program.
    void take_verdict(const wire::fb::VerdictT& verdict, std::size_t i, Holder* holder, std::uint16_t expert);
    wire::fb::DisputeT dispute_about(std::uint32_t position) const;
    void accuse(Holder& holder, const std::string& why);
    void count_audit(const Holder& worker, bool right);
    std::uint16_t expert_at(std::uint32_t position) const;

    // ---- from answers to the result
    Status compute_local();
    // One pair's row has come, `by` null: from here. In exact mode to its place, in partial mode into the token's sum.
    void deliver(std::uint32_t position, const std::byte* row, Holder* by);
    Status await();
    // Writes and reads what is ready, waiting at most `timeout` for the first of it.
    Status progress(Duration timeout);
    Status serve(Holder& holder);
    Status read_answers(Holder& holder);
    Status take(Holder& holder, const wire::DecodedAnswer& answer);
    std::size_t n_rows_of(const Request& request) const;
    void take_rows(Request& request, const wire::DecodedAnswer& answer);
    // Partial sums are added when all are there, in an order that does not depend on who was first.
    void add_partial_sums();

    struct PartialSums {
        Holder* by;
        std::uint16_t first_expert;
        std::vector<std::uint32_t> positions;  // of the pairs, in the order in which they were added
        std::vector<std::uint32_t> tokens;
        RawFloats rows;
    };

    Dispatcher& d_;
    const Work& work_;
    wire::Mode mode_;
    std::span<float> out_;
    std::size_t layer_ = 0;
    double units_a_pair_ = 1;
    std::vector<Task> todo_;   // not assigned
    std::vector<Task> local_;  // to be computed here
    std::map<std::uint64_t, Request> requests_;
    std::vector<PartialSums> partial_;
    std::map<std::uint32_t, Check> checks_;  // by position
    std::vector<Task> local_checks_;         // to be computed here
    std::vector<Holder*> answered_by_;       // by position; exact mode
    std::set<std::uint32_t> drawn_;          // positions; partial mode
    std::vector<bool> delivered_;            // by position; exact mode
    std::set<std::uint16_t> summed_;         // experts; partial mode
    Stall stall_;
};

}  // namespace linkcpp::coordinator
