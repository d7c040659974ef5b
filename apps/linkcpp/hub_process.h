// The hub as a child process of `linkcpp serve`: should it crash, llama-server and the workers live on, and it is
// started again in the place where they know it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "kept_alive.h"
#include "net/join_line.h"
#include "net/socket.h"

namespace linkcpp::cli {

// What a hub tells whoever has started it, once its ports are open.
struct HubLines {
    net::JoinLine own;    // for what runs on this machine: it lets in all
    std::string printed;  // for other machines: it lets in workers; empty when that token was revoked
};

// In the hub's process: hands the lines to the one that started it. False when a person has, who reads them.
bool tell_parent(const HubLines& lines);

class HubProcess {
  public:
    // `arguments`: of `linkcpp serve --hub-only`, without addresses. Errors: those of Process::start.
    static Result<HubProcess> start(std::vector<std::string> arguments, net::Address listen, std::uint16_t https_port);

    // Starts it again when it has ended. Errors: failed (it ended before it was ever ready, for which it has said why).
    Status watch();
    // Once it has been ready; of the latest that was.
    const std::optional<HubLines>& lines() const { return lines_; }
    // Its exit status, when watch() has failed.
    int status() const { return status_; }

  private:
    // What it is started with; the ports are those of the first from then on.
    struct Place {
        std::vector<std::string> arguments;
        net::Address listen;
        std::uint16_t https_port;
    };
    HubProcess(std::shared_ptr<Place> place, KeptAlive hub) : place_(std::move(place)), hub_(std::move(hub)) {}
    static Result<Process> start_one(const Place& place);

    std::shared_ptr<Place> place_;  // its start knows it, too
    KeptAlive hub_;
    std::optional<HubLines> lines_;
    bool ready_ = false;  // the one that runs now
    int status_ = 0;
};

}  // namespace linkcpp::cli
