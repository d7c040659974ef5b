#include "model/backbone_stamp.h"

#include <algorithm>
#include <string_view>

namespace linkcpp::model {
namespace {

constexpr std::string_view kMagic = "linkcpp backbone";
constexpr std::size_t kExpertAt = 16;
constexpr std::size_t kSliceAt = 24;

}  // namespace

std::uint32_t sampled_expert(std::uint32_t layer, std::uint32_t n_expert) {
    return static_cast<std::uint32_t>((std::uint64_t{layer} * 2654435761u + 1) % n_expert);
}

std::array<std::byte, BackboneStamp::kBytes> encode(const BackboneStamp& stamp) {
    std::array<std::byte, BackboneStamp::kBytes> bytes{};
    std::ranges::copy(as_bytes(kMagic), bytes.begin());
    store_le(bytes.data() + kExpertAt, stamp.expert);
    std::ranges::copy(stamp.slice.bytes, bytes.begin() + kSliceAt);
    return bytes;
}

std::optional<BackboneStamp> decode_backbone_stamp(ByteView tensor) {
    if (tensor.size() < BackboneStamp::kBytes || as_text(tensor.first(kMagic.size())) != kMagic) {
        return std::nullopt;
    }
    BackboneStamp stamp;
    stamp.expert = load_le<std::uint32_t>(tensor.data() + kExpertAt);
    std::ranges::copy(tensor.subspan(kSliceAt, stamp.slice.bytes.size()), stamp.slice.bytes.begin());
    return stamp;
}

}  // namespace linkcpp::model
