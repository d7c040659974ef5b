// A child process that is started again when it has ended: soon, and later each time while it dies young.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "base/backoff.h"
#include "base/clock.h"
#include "process.h"

namespace linkcpp::cli {

class KeptAlive {
  public:
    using Start = std::function<Result<Process>()>;

    // The first start. Errors: those of `start`.
    static Result<KeptAlive> run(Start start);

    // To be called now and then. The exit status of a child that has ended since the last call.
    std::optional<int> watch();
    // After watch(): starts it again if it has ended and it is time to. What keeps it from being started is logged, and
    // tried again later. True when a new one runs.
    bool start_again();

    Process& process() { return process_; }
    TimePoint started() const { return started_; }
    // It runs, and has for longer than one that dies young.
    bool has_settled() const { return !again_ && steady_now() - started_ >= kShortLife; }
    // It has ended soon after its start each time, and that several times.
    bool is_hopeless() const { return !has_lived_ && n_short_lives_ >= kMaxShortLives; }

  private:
    KeptAlive(Start start, Process process);

    static constexpr Duration kShortLife = std::chrono::seconds(5);
    static constexpr int kMaxShortLives = 3;
    Start start_;
    Process process_;
    Backoff backoff_{std::chrono::milliseconds(100), std::chrono::seconds(25)};
    TimePoint started_;
    std::optional<TimePoint> again_;  // it has ended: when it is started again
    int n_short_lives_ = 0;
    bool has_lived_ = false;  // for longer than that, once
};

}  // namespace linkcpp::cli
