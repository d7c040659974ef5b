// Other workers of the swarm that offer what is in their stores (neighbour_server.h). Both sides are known by their
// keys, of which the hub tells.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/sha256.h"
#include "net/link.h"
#include "net/socket.h"
#include "store/inventory.h"
#include "store/slice_origin.h"

namespace linkcpp::store {

struct Neighbour {
    Digest key;
    std::string name;
    net::Address address;
};

// Those who are there now, and with which key to dial them. Thread-safe.
class Neighbourhood {
  public:
    explicit Neighbourhood(const net::TlsContext& tls) : tls_(tls) {}

    void set(std::vector<Neighbour> neighbours) {
        const std::lock_guard lock(mutex_);
        neighbours_ = std::move(neighbours);
    }
    std::vector<Neighbour> all() const {
        const std::lock_guard lock(mutex_);
        return neighbours_;
    }
    const net::TlsContext& tls() const { return tls_; }

  private:
    const net::TlsContext& tls_;
    mutable std::mutex mutex_;  // guards neighbours_
    std::vector<Neighbour> neighbours_;
};

// A link to one of them. One thread at a time; what it does ends soon after `stop` is requested.
class NeighbourLink : public SliceOrigin {
  public:
    // Errors: disconnected, timeout, corrupt (it has another key).
    static Result<std::unique_ptr<NeighbourLink>> dial(const Neighbour& neighbour, const net::TlsContext& tls,
                                                       std::stop_token stop);

    struct Has {
        Inventory::Bits bits;
        std::uint32_t n_transfers = 0;  // that it is busy with
    };
    // What it has of that model. Errors: those of fetch().
    Result<Has> ask(const Digest& model_id);

    Status fetch(const Digest& hash, std::uint64_t from, std::uint64_t n_bytes, const Take& take) override;

    const std::string& name() const { return link_->name(); }

  private:
    NeighbourLink(std::unique_ptr<net::Link> link, std::stop_token stop)
        : link_(std::move(link)), stop_(std::move(stop)) {}
    Result<net::Frame> next_frame();

    std::unique_ptr<net::Link> link_;
    std::stop_token stop_;
};

}  // namespace linkcpp::store
