#include "kept_alive.h"

#include <utility>

#include "base/log.h"

namespace linkcpp::cli {

KeptAlive::KeptAlive(Start start, Process process)
    : start_(std::move(start)), process_(std::move(process)), started_(steady_now()) {}

Result<KeptAlive> KeptAlive::run(Start start) {
    LINKCPP_TRY(Process process, start());
    return KeptAlive(std::move(start), std::move(process));
}

std::optional<int> KeptAlive::watch() {
    if (again_) { return std::nullopt; }
    const std::optional<int> status = process_.poll();
    if (!status) { return std::nullopt; }
    if (steady_now() - started_ < kShortLife) {
        ++n_short_lives_;
    } else {
        n_short_lives_ = 0;
        has_lived_ = true;
        backoff_.reset();
    }
    again_ = steady_now() + backoff_.next();
    return status;
}

bool KeptAlive::start_again() {
    if (!again_ || steady_now() < *again_) { return false; }
    auto process = start_();
    if (!process) {
        log_error("{}", process.error().message);
        again_ = steady_now() + backoff_.next();
        return false;
    }
    process_ = *std::move(process);
    started_ = steady_now();
    again_.reset();
    return true;
}

}  // namespace linkcpp::cli
