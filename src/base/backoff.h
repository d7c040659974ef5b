// Trying again, later each time: the pause doubles with each failure up to a limit, and is stretched or shortened by
// chance, so that many who have lost the same thing at the same time do not all come back at the same time.
#pragma once

#include <algorithm>
#include <random>

#include "base/clock.h"

namespace linkcpp {

class Backoff {
  public:
    // `jitter`: each pause is between 1 - jitter and 1 + jitter times what it would be.
    Backoff(Duration first, Duration max, double jitter = 0.25, std::uint32_t seed = std::random_device{}())
        : first_(first), max_(max), jitter_(jitter), random_(seed) {}

    // After a failure: how long to wait before the next try.
    Duration next() {
        const Duration pause = std::min<Duration>(first_ * (1ll << std::min(n_failures_, kMaxDoublings)), max_);
        ++n_failures_;
        if (jitter_ <= 0) { return pause; }
        const double times = std::uniform_real_distribution<double>(1 - jitter_, 1 + jitter_)(random_);
        return std::chrono::duration_cast<Duration>(pause * times);
    }
    // After a success.
    void reset() { n_failures_ = 0; }
    int n_failures() const { return n_failures_; }

  private:
    static constexpr int kMaxDoublings = 20;
    Duration first_;
    Duration max_;
    double jitter_;
    int n_failures_ = 0;
    std::minstd_rand random_;
};

}  // namespace linkcpp
