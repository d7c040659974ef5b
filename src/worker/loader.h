// Loading: brings the engine to hold exactly what the hub assigned. A slice that it holds already is moved, one that
// the store has is read, others are fetched into the store first, ahead of their turn. One thread of its own, the
// loader thread, and the fetcher's; a newer assignment replaces one that is still under way.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/progress.h"
#include "expert/engine.h"
#include "model/manifest.h"
#include "net/wakeup.h"
#include "store/fetcher.h"
#include "store/https_client.h"
#include "store/slice_store.h"
#include "wire/control.h"

namespace linkcpp::worker {

struct Assignment {
    std::uint32_t epoch = 0;
    std::shared_ptr<const model::Manifest> manifest;
    Digest model_id;
    wire::SliceSet slices;
    store::Origin origin;  // where slices come from: the hub's HTTPS side
};

struct LoadState {
    wire::fb::ShardState state = wire::fb::ShardState::empty;
    std::uint32_t epoch = 0;
    std::size_t n_slices = 0;
    std::uint64_t bytes = 0;       // held
    std::uint64_t done_bytes = 0;  // of total_bytes, while loading
    std::uint64_t total_bytes = 0;
    store::Fetcher::State fetching;  // of the slices that the store lacks
    std::string error;               // why it has failed; or what else its user should know
    Digest model_id;                 // of what is held
    wire::SliceSet held;             // that is computed with, also while other slices are loading
};

class Loader {
  public:
    // All outlive it. `maps`: slices are computed with where they lie in the store, not copied to memory.
    Loader(expert::Engine& engine, const store::SliceStore& store, const store::Neighbourhood& neighbourhood, bool maps)
        : engine_(engine), store_(store), neighbourhood_(neighbourhood), maps_(maps) {}
    ~Loader();

    // From one thread. Starts at once.
    void load(Assignment assignment);
    // From any thread.
    LoadState state() const;
    // From any thread: what the store has of that model; null when it is not the one that was assigned last.
    std::shared_ptr<const store::Inventory> inventory(const Digest& model_id) const;
    // Signalled when an assignment is loaded or has failed.
    const net::Wakeup& on_done() const { return done_; }

  private:
    Status run(const std::stop_token& stop, const Assignment& assignment);
    using Wanted = std::map<std::uint32_t, std::vector<std::uint16_t>>;  // experts, ascending, by layer
    void start_fetching(const Assignment& assignment, const Wanted& wanted);
    void set_fetcher(std::unique_ptr<store::Fetcher> fetcher);
    Status load_layer(const std::stop_token& stop, const Assignment& assignment, const model::MoeLayer& layer,
                      std::span<const std::uint16_t> experts);
    void publish_held();
    Status read_slice(const std::stop_token& stop, const Assignment& assignment, std::uint32_t layer,
                      std::uint32_t expert, std::span<std::byte> to);
    Status from_store(const Digest& hash, std::span<std::byte> to) const;
    Status fetch(const Digest& hash, std::span<std::byte> to);
    void note(std::string text);

    expert::Engine& engine_;
    const store::SliceStore& store_;
    const store::Neighbourhood& neighbourhood_;
    bool maps_;
    net::Wakeup done_;
    mutable std::mutex mutex_;  // guards state_ and inventory_
    LoadState state_;
    std::shared_ptr<store::Inventory> inventory_;

    // Of the loader thread alone.
    Digest model_id_;
    bool serves_ = false;  // it held something when this assignment came
    Wanted held_;
    std::mutex client_mutex_;  // guards client_ while slices are read by several threads
    std::unique_ptr<store::HttpsClient> client_;
    std::optional<Progress> progress_;  // drawn with mutex_ held

    std::unique_ptr<store::Fetcher> fetcher_;  // made and ended by the loader thread, with mutex_ held
    std::jthread thread_;
};

}  // namespace linkcpp::worker
