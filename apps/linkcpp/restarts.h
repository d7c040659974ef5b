// When a child process that has ended is started again: soon, and later each time while it dies young.
#pragma once

#include <optional>

#include "base/backoff.h"
#include "base/clock.h"

namespace linkcpp::cli {

class Restarts {
  public:
    explicit Restarts(TimePoint started) : started_(started) {}

    // It has ended: call once, or again and again until it is started. True the first time.
    bool ended(TimePoint now) {
        if (again_) { return false; }
        if (now - started_ < kShortLife) {
            ++n_short_lives_;
        } else {
            n_short_lives_ = 0;
            backoff_.reset();
        }
        again_ = now + backoff_.next();
        return true;
    }
    bool due(TimePoint now) const { return again_ && now >= *again_; }
    void started(TimePoint now) {
        again_.reset();
        started_ = now;
    }
    // It could not be started.
    void failed(TimePoint now) { again_ = now + backoff_.next(); }
    // So many times in a row it ended soon after its start.
    int n_short_lives() const { return n_short_lives_; }

    static constexpr int kMaxShortLives = 3;  // of one that has never done anything else it is said to be hopeless

  private:
    static constexpr Duration kShortLife = std::chrono::seconds(5);
    Backoff backoff_{std::chrono::milliseconds(100), std::chrono::seconds(25)};
    TimePoint started_;
    std::optional<TimePoint> again_;
    int n_short_lives_ = 0;
};

}  // namespace linkcpp::cli
