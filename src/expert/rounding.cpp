#include "expert/rounding.h"

#include <algorithm>
#include <cmath>

#include <ggml.h>

namespace linkcpp::expert {
namespace {

constexpr std::array<std::string_view, kRoundings.size()> kNames{"none",    "f16",  "bf16",    "q8_0",
                                                                 "q8_wide", "q8_k", "f16_sums"};

float to_half(float value) {
    return ggml_fp16_to_fp32(ggml_fp32_to_fp16(value));
}

float to_bf16(float value) {
    return ggml_bf16_to_fp32(ggml_fp32_to_bf16(value));
}

// To an even number between two.
float nearest(float value) {
    return std::nearbyint(value);
}

constexpr std::size_t block_of(Rounding rounding) {
    return rounding == Rounding::q8_k ? 256 : 32;
}

// One block of Q8_0 or Q8_1: the scale's rounding is not that of the quants.
void round_block_of_32(std::span<const float> from, std::span<double> to, bool wide) {
    float largest = 0;
    for (const float x : from) { largest = std::max(largest, std::abs(x)); }
    const float scale = largest / 127;
    const float inverse = scale != 0 ? 1 / scale : 0;
    const double factor = wide ? scale : to_half(scale);
    for (std::size_t i = 0; i < from.size(); ++i) { to[i] = factor * static_cast<double>(nearest(from[i] * inverse)); }
}

// One block of Q8_K: the number that is largest in size, sign and all, becomes -127.
void round_block_of_256(std::span<const float> from, std::span<double> to) {
    float largest = 0;
    for (const float x : from) {
        if (std::abs(x) > std::abs(largest)) { largest = x; }
    }
    if (largest == 0) {
        std::ranges::fill(to, 0.0);
        return;
    }
    const float inverse = -127 / largest;
    const double factor = 1 / inverse;
    for (std::size_t i = 0; i < from.size(); ++i) {
        to[i] = factor * static_cast<double>(std::min(127.0f, nearest(from[i] * inverse)));
    }
}

}  // namespace

std::string_view to_string(Rounding rounding) {
    const auto number = static_cast<std::size_t>(rounding);
    return number < kNames.size() ? kNames[number] : "unknown";
}

std::string to_string(FfnRounding rounding) {
    std::string text(to_string(rounding.input));
    if (rounding.inner != rounding.input) { text.append(", ").append(to_string(rounding.inner)); }
    return text;
}

std::optional<Rounding> rounding_of(std::string_view name) {
    const auto found = std::ranges::find(kNames, name);
    if (found == kNames.end()) { return {}; }
    return kRoundings[static_cast<std::size_t>(found - kNames.begin())];
}

void round_row(Rounding rounding, std::span<const float> row, std::span<double> out) {
    switch (rounding) {
        case Rounding::none: std::ranges::copy(row, out.begin()); return;
        case Rounding::f16:
        case Rounding::f16_sums: std::ranges::transform(row, out.begin(), to_half); return;
        case Rounding::bf16: std::ranges::transform(row, out.begin(), to_bf16); return;
        case Rounding::q8_0:
        case Rounding::q8_wide:
        case Rounding::q8_k: break;
    }
    const std::size_t block = block_of(rounding);
    for (std::size_t begin = 0; begin < row.size(); begin += block) {
        const std::size_t n = std::min(block, row.size() - begin);
        if (rounding == Rounding::q8_k) {
            round_block_of_256(row.subspan(begin, n), out.subspan(begin, n));
        } else {
            round_block_of_32(row.subspan(begin, n), out.subspan(begin, n), rounding == Rounding::q8_wide);
        }
    }
}

double largest_step(Rounding rounding, std::span<const float> row) {
    float largest = 0;
    for (const float x : row) { largest = std::max(largest, std::abs(x)); }
    switch (rounding) {
        case Rounding::none: return 0;
        case Rounding::f16:
        case Rounding::f16_sums: return static_cast<double>(largest) * 0x1p-10;
        case Rounding::bf16: return static_cast<double>(largest) * 0x1p-7;
        case Rounding::q8_0:
        case Rounding::q8_wide:
        case Rounding::q8_k: return static_cast<double>(largest) / 127;
    }
    return 0;
}

void round_weights(Rounding rounding, std::span<float> weights) {
    if (rounding == Rounding::f16 || rounding == Rounding::f16_sums) {
        std::ranges::transform(weights, weights.begin(), to_half);
    }
    if (rounding == Rounding::bf16) { std::ranges::transform(weights, weights.begin(), to_bf16); }
}

}  // namespace linkcpp::expert
