// The workers that `linkcpp serve` starts on its own machine. They hold no state: one that dies is started again.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "kept_alive.h"
#include "net/join_line.h"

namespace linkcpp::cli {

// "local-1": what a local worker is called, counted from 1.
std::string local_worker_name(unsigned number);

class LocalWorkers {
  public:
    // `memory`: bytes that each may fill.
    LocalWorkers(unsigned n_workers, std::uint64_t memory) : n_workers_(n_workers), memory_(memory) {}

    // `line`: gives the line that lets them in now. Errors: those of Process::start.
    Status start(const std::function<net::JoinLine()>& line);

    // Starts again what has died. `serving`: llama-server answers, so nothing that a worker does may end this process.
    // One that the hub does not let in ends nothing either, and is started again: its operator may have thought better
    // of it. Errors, before that: failed (one dies whenever it is started).
    Status watch(bool serving);

    // That may hold something, now or once they have loaded it.
    std::size_t n_hoped_for() const { return workers_.size() - shut_out_.size(); }

  private:
    Result<Process> start_one(unsigned number, const net::JoinLine& line) const;

    unsigned n_workers_;
    std::uint64_t memory_;
    std::vector<KeptAlive> workers_;
    std::set<std::size_t> shut_out_;  // positions of those that the hub has refused
};

}  // namespace linkcpp::cli
