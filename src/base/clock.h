// Time. Code that waits or measures takes a Clock&, so that a test can turn the hands itself.
#pragma once

#include <chrono>

namespace linkcpp {

using Duration = std::chrono::nanoseconds;
using TimePoint = std::chrono::time_point<std::chrono::steady_clock, Duration>;

inline TimePoint steady_now() {
    return std::chrono::steady_clock::now();
}

class Clock {
  public:
    virtual ~Clock() = default;
    virtual TimePoint now() const = 0;
};

class SteadyClock final : public Clock {
  public:
    TimePoint now() const override { return steady_now(); }
};

// A clock that stands still until it is told to move.
class FakeClock final : public Clock {
  public:
    TimePoint now() const override { return now_; }
    void advance(Duration by) { now_ += by; }

  private:
    TimePoint now_{};
};

inline double to_seconds(Duration d) {
    return std::chrono::duration<double>(d).count();
}

inline Duration from_seconds(double seconds) {
    return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

// A duration for poll(2): rounded up, so that a caller never spins through the last millisecond; -1 is for ever.
inline int to_poll_ms(Duration d) {
    using std::chrono::milliseconds;
    if (d <= Duration::zero()) { return 0; }
    const auto ms = std::chrono::ceil<milliseconds>(d).count();
    return ms > 3'600'000 ? 3'600'000 : static_cast<int>(ms);
}

}  // namespace linkcpp
