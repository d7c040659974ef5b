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
    struct Options {
        unsigned n_threads = 0;          // 0: all processors
        std::uint64_t memory_bytes = 0;  // what experts may fill; the least recently used make room, one is kept
        // What is computed is only compared with what somebody else has: bytes that are not the model's show in that,
        // and need not be looked for beforehand.
        bool only_compares = false;
    };
    // Errors: those of GgufFile, invalid (the file is another model than the manifest's), unsupported (no CPU device).
    static Result<std::unique_ptr<LocalExperts>> open(const std::filesystem::path& path,
                                                      const model::Manifest& manifest, Options options);

    // One expert's whole FFN, or the product by one of its weights, on rows {n_in, n_rows}; out: {n_out, n_rows}.
    // Errors: corrupt (the file's bytes are not those of the manifest), failed.
    Status compute(std::uint32_t layer, std::optional<model::Role> product, std::uint32_t expert,
                   std::span<const float> rows, std::span<float> out);
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

    LocalExperts(const model::Manifest& manifest, model::GgufFile file, Options options)
        : manifest_(manifest), file_(std::move(file)), options_(options) {}
    // The engine's number of a slice, loaded if it is not there.
    Result<std::uint32_t> hold(const model::MoeLayer& layer, std::uint32_t expert);

    const model::Manifest& manifest_;
    model::GgufFile file_;
    Options options_;
    std::uint64_t held_bytes_ = 0;
    std::uint32_t next_key_ = 0;
    std::list<Held> held_;  // the most recently used first
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::list<Held>::iterator> index_;
    std::unique_ptr<expert::Engine> engine_;
};

}  // namespace linkcpp::coordinator
