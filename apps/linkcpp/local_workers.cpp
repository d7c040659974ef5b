#include "local_workers.h"

#include <algorithm>

#include "base/log.h"
#include "base/platform.h"
#include "hub_file.h"

namespace linkcpp::cli {

Status LocalWorkers::start(const net::JoinLine& line) {
    for (unsigned i = 1; i <= n_workers_; ++i) {
        LINKCPP_TRY(Process process, start_one(i, line));
        workers_.push_back({i, std::move(process), Restarts(std::chrono::steady_clock::now())});
    }
    return {};
}

Status LocalWorkers::watch(const net::JoinLine& line, bool serving) {
    const TimePoint now = std::chrono::steady_clock::now();
    for (Worker& worker : workers_) {
        const auto status = worker.process.poll();
        if (!status) { continue; }
        worker.restarts.ended(now);
        if (worker.restarts.n_short_lives() >= Restarts::kMaxShortLives && !serving) {
            return fail(ErrorKind::failed, "local worker {} ends (status {}) whenever it is started; see above",
                        worker.number, *status);
        }
        if (!worker.restarts.due(now)) { continue; }
        log_warn("local worker {} ended with status {}; starting it again", worker.number, *status);
        auto process = start_one(worker.number, line);
        if (!process) {
            log_error("{}", process.error().message);
            worker.restarts.failed(now);
            continue;
        }
        worker.process = *std::move(process);
        worker.restarts.started(now);
    }
    return {};
}

Result<Process> LocalWorkers::start_one(unsigned number, const net::JoinLine& line) const {
    const unsigned n_threads = std::max(1u, n_processors() / n_workers_);
    ProcessOptions process;
    process.arguments = {(executable_dir() / "linkcpp").string(),
                         "join",
                         "--name",
                         fmt::format("local-{}", number),
                         "--memory",
                         std::to_string(memory_),
                         "--threads",
                         std::to_string(n_threads)};
    // The join line holds a secret: the environment is this user's alone, a command line is everybody's.
    process.environment = short_spin();
    process.environment["LINKCPP_HUB"] = line.text();
    process.own_group = true;
    return Process::start(process);
}

}  // namespace linkcpp::cli
