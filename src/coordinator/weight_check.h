// Is the model that llama.cpp loads the one whose experts the workers hold? Names, types and shapes of all expert
// tensors, and of the bytes a sample: one expert a layer, by its hash in the manifest, or what a backbone says it was
// made from. Two fine-tunes of one model differ in nothing else.
//
// From any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include <ggml.h>

#include "base/error.h"
#include "model/manifest.h"

namespace linkcpp::coordinator {

class WeightCheck {
  public:
    explicit WeightCheck(std::shared_ptr<const model::Manifest> manifest) : manifest_(std::move(manifest)) {}

    // Whether the served model has an expert tensor of that name, type and shape.
    bool describes(const ggml_tensor* tensor) const;
    // llama.cpp makes room for an expert tensor; what was known of its bytes is forgotten.
    // Errors: invalid (the model that is served has no such tensor), unsupported (a LoRA adapter on experts).
    Status announce(const ggml_tensor* tensor);
    // The tensor's bytes from `offset` on; what is needed of them is copied. Errors: invalid (another model's).
    Status add(std::string_view tensor, std::size_t offset, ByteView bytes);
    // Errors: invalid (the layer's bytes were another model's, or have not come).
    Status verified(std::uint32_t layer) const;

  private:
    struct Sample {
        Bytes slab;  // of the sampled expert
        std::size_t n_bytes = 0;
        bool stamped = false;  // a backbone's tensor, made from the right model
    };
    struct Layer {
        std::vector<Sample> samples;  // of MoeLayer::tensors
        bool verified = false;
    };
    // The served model's tensor of that name; null where it has none.
    struct Place {
        const model::MoeLayer* layer = nullptr;
        const model::ExpertTensor* tensor = nullptr;
    };
    Place find(std::string_view tensor) const;
    // A bias or scale of the file that no expert uses.
    static bool is_unused(const Place& place, std::string_view tensor);
    Sample& sample_of(const Place& place);
    Status finish(const model::MoeLayer& layer, Layer& state) const;

    std::shared_ptr<const model::Manifest> manifest_;
    mutable std::mutex mutex_;  // guards layers_
    std::map<std::uint32_t, Layer> layers_;
};

}  // namespace linkcpp::coordinator
