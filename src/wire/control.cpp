#include "wire/control.h"

#include <algorithm>

namespace linkcpp::wire {
namespace {

constexpr std::uint32_t kMaxLayer = 1u << 16;
constexpr std::size_t kMaxDepth = 8;
constexpr std::size_t kMaxTables = 1u << 20;

}  // namespace

std::vector<std::string> features() {
    return {"exact", "partial", "f16", "probe", "pulse"};
}

Bytes encode_control(const ControlT& control) {
    flatbuffers::FlatBufferBuilder builder(1024);
    fb::FinishControlBuffer(builder, fb::Control::Pack(builder, &control));
    const auto* begin = reinterpret_cast<const std::byte*>(builder.GetBufferPointer());
    return {begin, begin + builder.GetSize()};
}

Result<std::unique_ptr<ControlT>> decode_control(ByteView payload) {
    // FlatBuffers reads aligned numbers in place; a frame's payload may lie anywhere.
    std::vector<std::uint64_t> aligned((payload.size() + 7) / 8);
    if (!payload.empty()) { std::memcpy(aligned.data(), payload.data(), payload.size()); }
    const auto* data = reinterpret_cast<const std::uint8_t*>(aligned.data());
    flatbuffers::Verifier verifier(data, payload.size(), kMaxDepth, kMaxTables);
    if (payload.size() < 8 || !fb::VerifyControlBuffer(verifier)) {
        return fail(ErrorKind::corrupt, "control message: {} bytes that are not one", payload.size());
    }
    std::unique_ptr<ControlT> control(fb::GetControl(data)->UnPack());
    if (control->body.value == nullptr) {
        return fail(ErrorKind::unsupported, "control message: kind {} is not known to this release",
                    static_cast<int>(control->body.type));
    }
    return control;
}

Result<Digest> decode_digest(const std::vector<std::uint8_t>& bytes) {
    Digest digest;
    if (bytes.size() != digest.bytes.size()) {
        return fail(ErrorKind::corrupt, "digest: expected 32 bytes, got {}", bytes.size());
    }
    std::ranges::copy(std::as_bytes(std::span(bytes)), digest.bytes.begin());
    return digest;
}

std::vector<std::uint8_t> encode_digest(const Digest& digest) {
    const auto* begin = reinterpret_cast<const std::uint8_t*>(digest.bytes.data());
    return {begin, begin + digest.bytes.size()};
}

std::size_t n_slices(const SliceSet& slices) {
    std::size_t n = 0;
    for (const LayerExperts& layer : slices) { n += layer.experts.size(); }
    return n;
}

Result<SliceSet> decode_slices(const std::vector<std::unique_ptr<fb::LayerSlicesT>>& slices) {
    SliceSet set;
    for (const auto& entry : slices) {
        if (!entry || entry->layer >= kMaxLayer || (!set.empty() && entry->layer <= set.back().layer)) {
            return fail(ErrorKind::corrupt, "slice set: layers are not ascending");
        }
        // adjacent_find with >=: a pair that does not strictly ascend
        if (std::ranges::adjacent_find(entry->experts, std::greater_equal<>()) != entry->experts.end()) {
            return fail(ErrorKind::corrupt, "slice set: experts of layer {} are not ascending", entry->layer);
        }
        set.push_back({entry->layer, entry->experts});
    }
    return set;
}

std::vector<std::unique_ptr<fb::LayerSlicesT>> encode_slices(const SliceSet& slices) {
    std::vector<std::unique_ptr<fb::LayerSlicesT>> encoded;
    for (const LayerExperts& layer : slices) {
        auto entry = std::make_unique<fb::LayerSlicesT>();
        entry->layer = layer.layer;
        entry->experts = layer.experts;
        encoded.push_back(std::move(entry));
    }
    return encoded;
}

}  // namespace linkcpp::wire
