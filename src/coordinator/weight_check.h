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
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <ggml.h>

#include "base/error.h"
#include "model/manifest.h"

namespace linkcpp::coordinator {

class WeightCheck {
  public:
    // `salt`: chooses the experts whose bytes are looked at.
    WeightCheck(std::shared_ptr<const model::Manifest> manifest, std::uint32_t salt)
        : manifest_(std::move(manifest)), salt_(salt) {}

    // llama.cpp asks where to put an expert tensor of a model that it is about to load. Whether it may be the served
    // model's: of that name, type and shape, and none that came before it in that model was another's.
    bool claims(const ggml_tensor* tensor);
    // llama.cpp makes room for an expert tensor; what was known of its bytes is forgotten.
    // Errors: invalid (the model that is served has no such tensor, or the model that is being loaded has others that
    // it has not), unsupported (a LoRA adapter on experts).
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
        std::optional<model::ExpertTensorName> name;  // nothing: not an expert tensor's
        const model::MoeLayer* layer = nullptr;
        const model::ExpertTensor* tensor = nullptr;

        // A bias or scale of the file that no expert uses.
        bool is_unused() const { return layer != nullptr && tensor == nullptr && !model::is_weight(name->role); }
    };
    Place find(std::string_view tensor) const;
    Sample& sample_of(const Place& place);
    Status finish(const model::MoeLayer& layer, Layer& state) const;

    std::uint32_t sampled_expert(const model::MoeLayer& layer) const;

    std::shared_ptr<const model::Manifest> manifest_;
    std::uint32_t salt_;
    mutable std::mutex mutex_;  // guards what follows
    std::map<std::uint32_t, Layer> layers_;
    // The model about to be loaded: what has been asked of it, in the order of its layers.
    std::set<std::string, std::less<>> asked_;
    std::uint32_t asked_layer_ = 0;
    bool is_another_ = false;
};

}  // namespace linkcpp::coordinator
