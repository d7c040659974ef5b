// Offers the slices of this machine's store to other workers of the swarm (neighbour.h). Who is no worker of the swarm
// is hung up on. One thread of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <stop_token>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/refusals.h"
#include "base/sha256.h"
#include "net/link.h"
#include "net/socket.h"
#include "net/wakeup.h"
#include "store/inventory.h"
#include "store/slice_store.h"
#include "wire/control.h"

namespace linkcpp::store {

class NeighbourServer {
  public:
    struct Limits {
        std::size_t links = 64;                         // at a time
        std::size_t strangers = 16;                     // of these, not known yet; the oldest gives way
        Duration hello_time = std::chrono::seconds(5);  // until they must be
    };
    // What is there of a model; null for one that nothing is known of.
    using FindInventory = std::function<std::shared_ptr<const Inventory>(const Digest& model_id)>;

    // Listens and starts. `tls`, `store` and `refusals` outlive it; `find` is called on its thread. Errors: invalid
    // (the port is in use).
    static Result<std::unique_ptr<NeighbourServer>> start(const net::Address& address, const net::TlsContext& tls,
                                                          const SliceStore& store, const Limits& limits,
                                                          Refusals& refusals, FindInventory find);
    ~NeighbourServer();

    // From any thread: whose keys are let in from now on; others' links end.
    void admit(std::set<Digest> keys);
    const net::Address& address() const { return listener_.address(); }
    // From any thread: bytes of slices that were sent.
    std::uint64_t bytes_sent() const { return bytes_sent_; }

  private:
    struct Guest {
        std::unique_ptr<net::Link> link;
        std::string from;
        TimePoint since;
        bool known = false;
        UniqueFd file;  // of the slice that is being sent
        std::uint64_t next = 0;
        std::uint64_t end = 0;

        bool is_sending() const { return next < end; }
    };
    NeighbourServer(net::Listener listener, const net::TlsContext& tls, const SliceStore& store, const Limits& limits,
                    Refusals& refusals, FindInventory find);

    void run(const std::stop_token& stop);
    void accept();
    // What has come, and what is to go. An error ends the link.
    Status serve(Guest& guest);
    Status handle(Guest& guest, const net::Frame& frame);
    Status begin(Guest& guest, const wire::fb::WantT& want);
    Status send_piece(Guest& guest);
    bool is_admitted(const Digest& key) const;

    net::Listener listener_;
    const net::TlsContext& tls_;
    const SliceStore& store_;
    Limits limits_;
    Refusals& refusals_;
    FindInventory find_;
    net::Wakeup wake_;
    std::atomic<std::uint64_t> bytes_sent_{0};
    mutable std::mutex mutex_;  // guards admitted_
    std::set<Digest> admitted_;
    std::list<Guest> guests_;  // of its thread alone
    std::jthread thread_;
};

}  // namespace linkcpp::store
