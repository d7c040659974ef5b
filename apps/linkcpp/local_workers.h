// The workers that `linkcpp serve` starts on its own machine. They hold no state: one that dies is started again.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/error.h"
#include "kept_alive.h"
#include "net/join_line.h"

namespace linkcpp::cli {

class LocalWorkers {
  public:
    // `memory`: bytes that each may fill.
    LocalWorkers(unsigned n_workers, std::uint64_t memory) : n_workers_(n_workers), memory_(memory) {}

    // `line`: gives the line that lets them in now. Errors: those of Process::start.
    Status start(const std::function<net::JoinLine()>& line);

    // Starts again what has died. `serving`: llama-server answers, so nothing that a worker does may end this process.
    // Errors, before that: failed (one dies whenever it is started).
    Status watch(bool serving);

    bool empty() const { return workers_.empty(); }

  private:
    Result<Process> start_one(unsigned number, const net::JoinLine& line) const;

    unsigned n_workers_;
    std::uint64_t memory_;
    std::vector<KeptAlive> workers_;
};

}  // namespace linkcpp::cli
