// The coordinator's own experts, for slices that no worker holds: read from the model file, checked by their hash, and
// kept in memory as far as that goes. Nothing is mapped: what somebody does to the file later cannot change or end
// anything.
#pragma once

#include <filesystem>
#include <list>
#include <map>
#include <memory>
#include <optional>

#include "base/error.h"
#include "expert/engine.h"
#include "model/gguf_file.h"
#include "model/manifest.h"

namespace linkcpp::coordinator {

// One thread at a time.
class LocalExperts {
  public:
    // `memory_bytes`: what experts may fill; the least recently used make room. At least one is kept.
    // Errors: those of GgufFile, invalid (the file is another model than the manifest's), unsupported (no CPU device).
    static Result<std::unique_ptr<LocalExperts>> open(const std::filesystem::path& path,
                                                      const model::Manifest& manifest, unsigned n_threads,
                                                      std::uint64_t memory_bytes);

    // One expert's whole FFN, or the product by one of its weights, on rows {n_in, n_rows}; out: {n_out, n_rows}.
    // Errors: corrupt (the file's bytes are not those of the manifest), failed.
    // `passing`: it is needed only once, and makes no other expert go.
    Status compute(std::uint32_t layer, std::optional<model::Role> product, std::uint32_t expert,
                   std::span<const float> rows, std::span<float> out, bool passing = false);
    // A slice whose bytes are those of the manifest. Errors: as above, not_found.
    Result<Bytes> slice(std::uint32_t layer, std::uint32_t expert) const;

    std::uint64_t held_bytes() const { return held_bytes_; }

  private:
    struct Held {
        std::uint32_t layer;
        std::uint32_t expert;
        std::uint32_t key;  // the engine's number for it
        std::uint64_t bytes;
    };
    using Place = std::list<Held>::iterator;

    LocalExperts(const model::Manifest& manifest, model::GgufFile file, std::uint64_t memory_bytes)
        : manifest_(manifest), file_(std::move(file)), memory_bytes_(memory_bytes) {}
    // A slice, loaded if it is not there.
    Result<Place> hold(const model::MoeLayer& layer, std::uint32_t expert, bool passing);
    void drop(Place place);

    const model::Manifest& manifest_;
    model::GgufFile file_;
    std::uint64_t memory_bytes_;
    std::uint64_t held_bytes_ = 0;
    std::uint32_t next_key_ = 0;
    std::list<Held> held_;  // the most recently used first
    std::map<std::pair<std::uint32_t, std::uint32_t>, Place> index_;
    std::unique_ptr<expert::Engine> engine_;
};

}  // namespace linkcpp::coordinator
