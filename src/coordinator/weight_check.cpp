#include "coordinator/weight_check.h"

#include <algorithm>
#include <cstring>

#include "model/backbone_stamp.h"

namespace linkcpp::coordinator {
namespace {

std::unexpected<Error> another_model(std::string_view tensor) {
    return fail(
        ErrorKind::invalid,
        "{}: its bytes are not those of the model that the hub serves: another model of the same shape, or a "
        "backbone that `linkcpp backbone` has not made; give this program the model that `linkcpp status` names "
        "(a draft model beside it must differ from it in its experts' types or shapes)",
        tensor);
}

// Of the same type and shape.
bool is_like(const ggml_tensor* tensor, const model::ExpertTensor& expected) {
    return tensor->type == expected.type && std::ranges::equal(expected.ne, std::span(tensor->ne, 3));
}

}  // namespace

bool WeightCheck::claims(const ggml_tensor* tensor) {
    const std::string_view name = ggml_get_name(tensor);
    const Place place = find(name);
    if (!place.name) { return false; }
    const std::uint32_t block = place.name->layer % model::kSecondSet;
    const std::lock_guard lock(mutex_);
    // llama.cpp asks once for each tensor of a model, block by block.
    if (block < asked_layer_ || asked_.contains(name)) {
        asked_.clear();
        is_another_ = false;
    }
    asked_.emplace(name);
    asked_layer_ = block;
    const bool described = place.is_unused() || (place.tensor != nullptr && is_like(tensor, *place.tensor));
    is_another_ = is_another_ || !described;
    return !is_another_;
}

Status WeightCheck::announce(const ggml_tensor* tensor) {
    const std::string_view name = ggml_get_name(tensor);
    if (name.find(".lora_") != std::string_view::npos) {
        return fail(ErrorKind::unsupported,
                    "{}: LoRA adapters on routed experts are not supported; merge the adapter into "
                    "the model (llama.cpp's llama-export-lora) and serve that",
                    name);
    }
    const Place place = find(name);
    const model::ExpertTensor* expected = place.tensor;
    if (place.is_unused()) { return {}; }
    if (expected == nullptr) {
        return fail(ErrorKind::invalid,
                    "{}: the model that the hub serves ({}) has no such tensor; give this program the "
                    "model that `linkcpp status` names",
                    name, manifest_->model.name);
    }
    if (!is_like(tensor, *expected)) {
        return fail(ErrorKind::invalid,
                    "{}: the hub serves {} of {{{}, {}, {}}}, this program loads {} of {{{}, {}, {}}}: it is "
                    "another model or another quantisation; give it the one that `linkcpp status` names (a draft "
                    "model loaded after that one: `linkcpp exec --other-models here`)",
                    name, ggml_type_name(expected->type), expected->ne[0], expected->ne[1], expected->ne[2],
                    ggml_type_name(tensor->type), tensor->ne[0], tensor->ne[1], tensor->ne[2]);
    }
    const std::lock_guard lock(mutex_);
    if (is_another_) {
        return fail(ErrorKind::invalid,
                    "{}: the model that is being loaded has some experts like those of the model that the hub serves, "
                    "and others; beside that one only models can be loaded whose experts all differ from its own in "
                    "type or shape",
                    name);
    }
    layers_[place.layer->layer].verified = false;
    sample_of(place) = {};
    return {};
}

std::uint32_t WeightCheck::sampled_expert(const model::MoeLayer& layer) const {
    return (model::sampled_expert(layer.layer, layer.n_expert) + salt_ % layer.n_expert) % layer.n_expert;
}

WeightCheck::Place WeightCheck::find(std::string_view tensor) const {
    const auto parsed = model::parse_expert_tensor_name(tensor);
    const model::MoeLayer* layer = parsed ? manifest_->model.find(parsed->layer) : nullptr;
    return {parsed, layer, layer != nullptr ? layer->find(parsed->role) : nullptr};
}

WeightCheck::Sample& WeightCheck::sample_of(const Place& place) {
    std::vector<Sample>& samples = layers_[place.layer->layer].samples;
    samples.resize(place.layer->tensors.size());
    return samples[static_cast<std::size_t>(place.tensor - place.layer->tensors.data())];
}

Status WeightCheck::add(std::string_view tensor, std::size_t offset, ByteView bytes) {
    const Place place = find(tensor);
    if (place.is_unused()) { return {}; }
    if (place.tensor == nullptr) { return another_model(tensor); }
    const auto& [name, layer, described] = place;
    const std::lock_guard lock(mutex_);
    Sample& sample = sample_of(place);
    if (const auto stamp = offset == 0 ? model::decode_backbone_stamp(bytes) : std::nullopt) {
        const Digest* expected = manifest_->slice(layer->layer, stamp->expert);
        if (stamp->expert != model::sampled_expert(layer->layer, layer->n_expert) || expected == nullptr ||
            stamp->slice != *expected) {
            return another_model(tensor);
        }
        sample.stamped = true;
    } else {
        // The part of these bytes that lies in the sampled expert's slab.
        const std::size_t begin = sampled_expert(*layer) * described->slab_bytes;
        const std::size_t from = std::max(begin, offset);
        const std::size_t to = std::min(begin + described->slab_bytes, offset + bytes.size());
        if (from >= to) { return {}; }
        sample.slab.resize(described->slab_bytes);
        std::memcpy(sample.slab.data() + (from - begin), bytes.data() + (from - offset), to - from);
        sample.n_bytes += to - from;
    }
    return finish(*layer, layers_[layer->layer]);
}

Status WeightCheck::finish(const model::MoeLayer& layer, Layer& state) const {
    // A backbone holds stamps in the place of weights; its biases and scales are the model's own.
    bool stamped = true;
    for (std::size_t i = 0; i < state.samples.size(); ++i) {
        stamped = stamped && (state.samples[i].stamped || !model::is_weight(layer.tensors[i].role));
    }
    if (stamped) {
        state.verified = true;
        return {};
    }
    Sha256 hash;
    for (std::size_t i = 0; i < state.samples.size(); ++i) {
        if (state.samples[i].n_bytes < layer.tensors[i].slab_bytes) { return {}; }  // not all there yet
        hash.add(state.samples[i].slab);
    }
    const std::uint32_t expert = sampled_expert(layer);
    const Digest digest = hash.finish();
    for (Sample& sample : state.samples) { sample = {}; }
    if (digest != *manifest_->slice(layer.layer, expert)) { return another_model(layer.tensors.front().name); }
    state.verified = true;
    return {};
}

Status WeightCheck::verified(std::uint32_t layer) const {
    const std::lock_guard lock(mutex_);
    const auto found = layers_.find(layer);
    if (found != layers_.end() && found->second.verified) { return {}; }
    return fail(
        ErrorKind::invalid,
        "layer {}: it is not certain that this program has loaded the model that the hub serves: not all of its "
        "experts' tensors, biases and scales included, came to the plugin; no token is computed with it",
        model::layer_name(layer));
}

}  // namespace linkcpp::coordinator
