#include "expert/half.h"

#include <cstring>
#include <vector>

#include <ggml.h>

namespace linkcpp::expert {

void halves_to_floats(ByteView from, std::span<float> to) {
    std::vector<ggml_fp16_t> halves(to.size());
    std::memcpy(halves.data(), from.data(), halves.size() * sizeof(ggml_fp16_t));
    ggml_fp16_to_fp32_row(halves.data(), to.data(), static_cast<std::int64_t>(to.size()));
}

void floats_to_halves(std::span<const float> from, std::span<std::byte> to) {
    std::vector<ggml_fp16_t> halves(from.size());
    ggml_fp32_to_fp16_row(from.data(), halves.data(), static_cast<std::int64_t>(from.size()));
    std::memcpy(to.data(), halves.data(), halves.size() * sizeof(ggml_fp16_t));
}

}  // namespace linkcpp::expert
