#include "local_workers.h"

#include <algorithm>

#include "base/log.h"
#include "base/platform.h"
#include "commands.h"
#include "hub_file.h"

namespace linkcpp::cli {

std::string local_worker_name(unsigned number) {
    return fmt::format("local-{}", number);
}

Status LocalWorkers::start(const std::function<net::JoinLine()>& line) {
    for (unsigned i = 1; i <= n_workers_; ++i) {
        LINKCPP_TRY(KeptAlive worker, KeptAlive::run([this, i, line] { return start_one(i, line()); }));
        workers_.push_back(std::move(worker));
    }
    return {};
}

Status LocalWorkers::watch(bool serving) {
    for (std::size_t i = 0; i < workers_.size(); ++i) {
        KeptAlive& worker = workers_[i];
        if (const auto status = worker.watch()) {
            if (*status == kNotLetIn) {
                if (shut_out_.insert(i).second) {
                    log_warn(
                        "the hub does not let local worker {} in, and goes on without it; if it was revoked, "
                        "`linkcpp revoke --undo {}` lets it in again",
                        i + 1, local_worker_name(static_cast<unsigned>(i + 1)));
                }
            } else if (worker.is_hopeless() && !serving) {
                return fail(ErrorKind::failed, "local worker {} ends (status {}) whenever it is started; see above",
                            i + 1, *status);
            } else {
                log_warn("local worker {} ended with status {}; starting it again", i + 1, *status);
            }
        }
        worker.start_again();
        if (worker.has_settled()) { shut_out_.erase(i); }
    }
    return {};
}

Result<Process> LocalWorkers::start_one(unsigned number, const net::JoinLine& line) const {
    const unsigned n_threads = std::max(1u, n_processors() / n_workers_);
    ProcessOptions process;
    process.arguments = {(executable_dir() / "linkcpp").string(),
                         "join",
                         "--name",
                         local_worker_name(number),
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
