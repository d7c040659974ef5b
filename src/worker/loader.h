// Loading: brings the engine to hold exactly what the hub assigned, fetching slices that the store lacks. One thread of
// its own, the loader thread; a newer assignment replaces one that is still under way.
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
#include "expert/engine.h"
#include "model/manifest.h"
#include "net/wakeup.h"
#include "store/https_client.h"
#include "store/slice_store.h"
#include "wire/control.h"

namespace linkcpp::worker {

// Where slices come from: the hub's HTTPS side.
struct SliceOrigin {
    net::Address address;
    Digest fingerprint;
    std::string token;
};

struct Assignment {
    std::uint32_t epoch = 0;
    std::shared_ptr<const model::Manifest> manifest;
    Digest model_id;
    wire::SliceSet slices;
    SliceOrigin origin;
};

struct LoadState {
    wire::fb::ShardState state = wire::fb::ShardState::empty;
    std::uint32_t epoch = 0;
    std::size_t n_slices = 0;
    std::uint64_t bytes = 0;       // held
    std::uint64_t done_bytes = 0;  // of total_bytes, while loading
    std::uint64_t total_bytes = 0;
    std::string error;    // why it has failed; or what else its user should know
    Digest model_id;      // of what is held
    wire::SliceSet held;  // that is computed with, also while other slices are loading
};

class Loader {
  public:
    Loader(expert::Engine& engine, const store::SliceStore& store) : engine_(engine), store_(store) {}
    ~Loader();

    // From one thread. Starts at once.
    void load(Assignment assignment);
    // From any thread.
    LoadState state() const;
    // Signalled when an assignment is loaded or has failed.
    const net::Wakeup& on_done() const { return done_; }

  private:
    Status run(const std::stop_token& stop, const Assignment& assignment);
    Status load_layer(const std::stop_token& stop, const Assignment& assignment, const model::MoeLayer& layer,
                      std::span<const std::uint16_t> experts);
    void publish_held();
    Status read_slice(const std::stop_token& stop, const Assignment& assignment, std::uint32_t layer,
                      std::uint32_t expert, std::span<std::byte> to);

    expert::Engine& engine_;
    const store::SliceStore& store_;
    net::Wakeup done_;
    mutable std::mutex mutex_;  // guards state_
    LoadState state_;

    // Of the loader thread alone.
    Digest model_id_;
    std::map<std::uint32_t, std::vector<std::uint16_t>> held_;
    std::unique_ptr<store::HttpsClient> client_;

    std::jthread thread_;
};

}  // namespace linkcpp::worker
