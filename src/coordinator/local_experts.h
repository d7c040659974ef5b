// The coordinator's own experts: computed from the model file, mapped, for slices that no worker holds.
#pragma once

#include <filesystem>
#include <memory>
#include <set>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "expert/engine.h"
#include "model/gguf_file.h"
#include "model/manifest.h"

namespace linkcpp::coordinator {

// One thread at a time.
class LocalExperts {
  public:
    // Errors: those of GgufFile, invalid (the file is another model than the manifest's), unsupported (no CPU device).
    static Result<std::unique_ptr<LocalExperts>> open(const std::filesystem::path& path,
                                                      const model::Manifest& manifest, unsigned n_threads);

    // As Engine::compute_rows(). A slice's hash is checked before it computes for the first time.
    // Errors: corrupt (the file's bytes are not those of the manifest), failed.
    Status compute_rows(std::uint32_t layer, std::span<const float> rows, std::span<const expert::Pair> pairs,
                        std::span<float> out);

  private:
    LocalExperts(const model::Manifest& manifest, model::GgufFile file) : manifest_(manifest), file_(std::move(file)) {}
    Status hold(const model::MoeLayer& layer);
    Status verify(const model::MoeLayer& layer, std::uint32_t expert);
    Result<std::vector<ByteView>> tensors(const model::MoeLayer& layer) const;

    const model::Manifest& manifest_;
    model::GgufFile file_;
    std::vector<MappedFile> mapped_;  // one a split
    std::set<std::uint32_t> held_;
    std::set<std::pair<std::uint32_t, std::uint32_t>> verified_;
    std::unique_ptr<expert::Engine> engine_;  // last: reads the mappings
};

}  // namespace linkcpp::coordinator
