// What is done when an answer does not come: how long a holder may take, when its work is given to another as well,
// when it is given up, and when it is asked again. Every such rule of the data path is here. Pure: the time is an
// argument, nothing is read or written. One thread.
//
//   a holder is   when                                                       its work
//   good          it answers in time, or owes nothing                        stays
//   late          it lives, and is behind its own measure                    goes to another holder, too: the first
//                                                                            answer counts
//   hung          it owes an answer and gives no sign of life                goes to others; the link is given up
//   stuck         it gives signs of life, and no answer for very long        goes to others; the link is given up
//   dead          its connection was reset or closed                         goes to others
//   corrupt       what it sends contradicts what it was asked                goes to others; the link is given up
//   resting       for a while after a failure, longer after each in a row    others, or this program, do it if they can
//
// Signs of life are bytes that move on the link, and pulses, which a worker sends from a thread of its own while it
// owes an answer: so a worker that computes for long is told from one that is stopped.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "base/clock.h"

namespace linkcpp::coordinator {

struct Patience {
    Duration hang = std::chrono::seconds(1);    // without a sign of life, while an answer is owed
    Duration stuck = std::chrono::seconds(10);  // without an answer, beyond several times what the work should take
    // An answer is late when it is so far behind the holder's own measure, or several times its usual scatter, or as
    // much as it should have taken, whichever is most.
    Duration late = std::chrono::milliseconds(20);
    // The share of requests whose work may be given to another as well because they are late.
    double twice = 0.1;
    // How long a call goes on in which work was lost or finds no holder, and no answer comes.
    Duration coverage = std::chrono::milliseconds(1500);
};

enum class Fault : std::uint8_t {
    dead,
    hung,
    stuck,
    corrupt,
    refused,
    moved,  // it holds other slices than this program was told: no fault of its own, unless it goes on
};
inline constexpr std::size_t kFaults = 6;
std::string_view to_string(Fault fault);

// One holder, across its links.
class HolderWatch {
  public:
    explicit HolderWatch(const Patience& patience) : patience_(patience) {}

    // ---- what happens
    void connected(TimePoint now);
    // `n_rows`: of its answer.
    void sent(std::uint64_t id, double units, std::size_t n_rows, TimePoint now);
    // A sign of life.
    void heard(TimePoint now) { heard_ = now; }
    // Rows of an answer came, `first` to first + n - 1, computed in so long. unknown: the request is not outstanding,
    // or these rows have come before.
    enum class Rows : std::uint8_t { unknown, more_to_come, last };
    Rows rows_came(std::uint64_t id, std::size_t first, std::size_t n, std::uint64_t compute_us, TimePoint now);
    // The request was refused. False when it is not outstanding.
    bool refused(std::uint64_t id, Fault fault, TimePoint now);
    // The holder's clock when it sent something that was read now.
    void clock_read(std::uint64_t clock_us, TimePoint now);
    // Its link is gone, and with it all that was outstanding.
    void lost(Fault fault, TimePoint now);
    // Nobody has read what it sent since the last call, which ended so long ago.
    void away(Duration pause);

    // ---- what to do
    // It owes answers.
    bool busy() const { return !outstanding_.empty(); }
    // hung or stuck: give its link up. Only after everything that has come was read.
    std::optional<Fault> to_give_up(TimePoint now) const;
    bool is_late(std::uint64_t id, TimePoint now) const;
    bool is_late(TimePoint now) const;
    // Neither resting nor late: others come after it.
    bool preferred(TimePoint now) const { return !rests(now) && !is_late(now); }
    bool rests(TimePoint now) const { return rests_until_ != TimePoint{} && now < rests_until_; }
    // When one of these verdicts may change; nothing: not without an event.
    std::optional<TimePoint> next(TimePoint now) const;
    // From when on nobody wants the answer to a request sent now, by the holder's clock; 0 while that is not known.
    std::uint64_t deadline_us(double units, TimePoint now) const;

    // ---- what it is like
    // Of computing (0: not measured yet), and what an answer takes beyond that. Both fade while nothing new is
    // measured: who was slow for a moment is given something to do again, now and then.
    double us_per_unit(TimePoint now) const { return us_per_unit_ * freshness(now); }
    double wait_us(TimePoint now) const { return wait_us_ * freshness(now); }
    // Of that, what is more than chance, and than what this program does between two holders: by the rest nobody is
    // preferred, or two equal holders would get unequal shares.
    double sure_wait_us(TimePoint now) const;
    int failures_in_a_row() const { return n_failures_; }
    std::uint64_t count(Fault fault) const { return counts_.at(static_cast<std::size_t>(fault)); }

  private:
    struct Outstanding {
        std::uint64_t id = 0;
        double units = 0;
        std::size_t n_rows = 0;
        TimePoint sent{};
        TimePoint expected{};  // its end; not measured: `sent`
        std::size_t received = 0;
        std::uint64_t compute_us = 0;
        bool timed = true;  // somebody was there to see when it came
    };
    void measure(const Outstanding& request, TimePoint now);
    void finish(std::vector<Outstanding>::iterator request, TimePoint now);
    TimePoint late_at(const Outstanding& request) const;
    TimePoint stuck_at(const Outstanding& request) const;
    Duration expected_for(double units) const;
    double freshness(TimePoint now) const;  // of the measures: from 1 down to 0
    void fail(Fault fault, TimePoint now);

    Patience patience_;
    std::vector<Outstanding> outstanding_;  // in the order in which they were sent, which is that of the answers
    TimePoint heard_{};
    TimePoint answered_{};       // last
    TimePoint working_since_{};  // on what is outstanding first, as far as is known
    double us_per_unit_ = 0;
    double wait_us_ = 0;
    double scatter_us_ = 0;
    std::optional<std::int64_t> clock_offset_us_;  // of the holder's clock before this one, or a little more
    int n_failures_ = 0;
    TimePoint rests_until_{};
    std::array<std::uint64_t, kFaults> counts_{};
};

// How much may be done twice: a share of what is done, saved up to a few.
class TwiceBudget {
  public:
    explicit TwiceBudget(double share) : share_(share), saved_(share > 0 ? kMost : 0) {}
    void earn() { saved_ = saved_ + share_ < kMost ? saved_ + share_ : (share_ > 0 ? kMost : 0); }
    bool spend() {
        if (saved_ < 1) { return false; }
        saved_ -= 1;
        return true;
    }

  private:
    static constexpr double kMost = 16;
    double share_;
    double saved_;
};

// Of one call: how long there has been work that nobody does.
class Stall {
  public:
    explicit Stall(Duration patience) : patience_(patience) {}
    void begin(TimePoint now) { since_ = since_ == TimePoint{} ? now : since_; }
    void end() { since_ = {}; }
    bool is_over(TimePoint now) const { return since_ != TimePoint{} && now - since_ > patience_; }

  private:
    Duration patience_;
    TimePoint since_{};
};

}  // namespace linkcpp::coordinator
