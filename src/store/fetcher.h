// Brings slices into a store, several at a time, while others are already loaded from there: from neighbours that have
// them, and from the hub.
//
// Where many fetch the same, the hub's line is what is short: then it is asked for what no neighbour has yet, the
// rarest first and by chance among those, and all else goes from neighbour to neighbour. Where the hub is quicker than
// they are, it is asked for anything.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <stop_token>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/backoff.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/sha256.h"
#include "net/socket.h"
#include "store/inventory.h"
#include "store/neighbour.h"
#include "store/slice_origin.h"
#include "store/slice_store.h"

namespace linkcpp::store {

// A hub's HTTPS side.
struct Origin {
    net::Address address;
    Digest fingerprint;
    std::string token;
};

// Thread-safe. Fetches until it is destroyed, or until there is nothing left to do.
class Fetcher {
  public:
    struct Slice {
        Digest hash;
        std::uint64_t n_bytes = 0;
        std::size_t index = 0;  // in the manifest's order
    };
    // What the store lacks, in that order, as far as may be. `inventory`: of the model; is told what comes. `store` and
    // `neighbourhood` outlive it. Starts at once.
    Fetcher(const SliceStore& store, Origin hub, const Neighbourhood& neighbourhood,
            std::shared_ptr<Inventory> inventory, const std::vector<Slice>& slices);
    ~Fetcher();
    Fetcher(const Fetcher&) = delete;
    Fetcher& operator=(const Fetcher&) = delete;

    // Waits until the slice is in the store; at once for one that is not fetched here. Errors: overloaded (it cannot be
    // kept there, the text says why: whoever wants it fetches it for himself), failed (`stop`), else why it was not to
    // be had after many attempts.
    Status wait(const Digest& hash, const std::stop_token& stop);

    struct State {
        std::uint64_t n_bytes = 0;           // fetched, of total_bytes
        std::uint64_t total_bytes = 0;       // that the store lacked
        std::uint64_t from_neighbours = 0;   // of n_bytes
        std::uint64_t bytes_per_second = 0;  // of the last seconds
    };
    State state() const;

  private:
    enum class Stage { waiting, under_way, here, not_kept, failed };
    struct Item {
        Slice slice;
        Stage stage = Stage::waiting;
        TimePoint not_before{};
        std::uint64_t n_counted = 0;  // in state_.n_bytes
        bool only_hub = false;        // a neighbour has sent something else
        Error error;
    };
    // How one attempt ended.
    struct Outcome {
        Status status;
        bool on_disk = false;  // it is the disk's fault
    };
    // What is known of a neighbour.
    struct Known {
        Inventory::Bits bits;
        TimePoint asked_at{};
        TimePoint not_before{};  // it is left alone until then
        bool taken = false;      // one thread is at it
        double cost = 0;         // the less, the sooner it is asked again: how far and how busy it was
    };
    void run_hub(const std::stop_token& stop);
    void run_neighbours(const std::stop_token& stop);
    // With one of them, for as long as that is of use. False: it is of none.
    bool visit(const Neighbour& neighbour, const std::stop_token& stop);
    std::optional<Neighbour> choose_neighbour();
    Item* next_of_hub(TimePoint now);
    Item* next_of(const Known& known, TimePoint now);
    Item* rarest(TimePoint now, const Known* at, std::size_t& n_holders);
    std::size_t holders(std::size_t index, TimePoint now) const;
    // One item from its choice to its end; `lock` is let go of meanwhile. Nothing: `stop` was requested.
    std::optional<Outcome> attempt(std::unique_lock<std::mutex>& lock, SliceOrigin& from, Item& item, bool is_neighbour,
                                   const std::stop_token& stop);
    Outcome fetch(SliceOrigin& from, Item& item, bool is_neighbour);
    void settle(Item& item, const Outcome& outcome, bool is_neighbour);
    void count(Item& item, std::uint64_t n_bytes, bool is_neighbour);
    void note_rate(std::optional<double>& rate, std::uint64_t n_bytes, Duration time);

    const SliceStore& store_;
    Origin hub_;
    const Neighbourhood& neighbourhood_;
    std::shared_ptr<Inventory> inventory_;
    mutable std::mutex mutex_;  // guards what follows
    std::condition_variable_any changed_;
    std::deque<Item> items_;
    std::unordered_map<Digest, Item*> by_hash_;
    std::size_t n_open_ = 0;  // items that are not settled
    Backoff backoff_;
    std::map<Digest, Known> known_;
    TimePoint neighbour_was_useful_{};
    std::optional<double> hub_rate_;  // bytes a second of one transfer
    std::optional<double> neighbour_rate_;
    std::minstd_rand random_;
    State state_;
    struct Sample {
        TimePoint time;
        std::uint64_t n_bytes;
    };
    mutable std::deque<Sample> samples_;

    std::vector<std::jthread> threads_;  // last: they use all of the above
};

}  // namespace linkcpp::store
