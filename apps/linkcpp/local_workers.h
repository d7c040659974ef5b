// The workers that `linkcpp serve` starts on its own machine. They hold no state: one that dies is started again.
#pragma once

#include <cstdint>
#include <vector>

#include "base/error.h"
#include "net/join_line.h"
#include "process.h"
#include "restarts.h"

namespace linkcpp::cli {

class LocalWorkers {
  public:
    // `memory`: bytes that each may fill.
    LocalWorkers(unsigned n_workers, std::uint64_t memory) : n_workers_(n_workers), memory_(memory) {}

    // Errors: those of Process::start.
    Status start(const net::JoinLine& line);

    // Starts again what has died, by that line, after a pause that grows while it dies young. `serving`: llama-server
    // answers, so nothing that a worker does may end this process. Errors, before that: failed (one dies whenever it is
    // started).
    Status watch(const net::JoinLine& line, bool serving);

    bool empty() const { return workers_.empty(); }

  private:
    struct Worker {
        unsigned number;
        Process process;
        Restarts restarts;
    };
    Result<Process> start_one(unsigned number, const net::JoinLine& line) const;

    unsigned n_workers_;
    std::uint64_t memory_;
    std::vector<Worker> workers_;
};

}  // namespace linkcpp::cli
