#include "model/random_weights.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace linkcpp::model {
namespace {

// SplitMix64's output function (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), by
// counter.
std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

class Random {
  public:
    Random(std::uint64_t key, std::uint64_t position) : state_(mix(key ^ mix(position + 1))) {}

    std::uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15u); }
    void fill(void* to, std::size_t n_bytes) {
        auto* at = static_cast<std::byte*>(to);
        for (; n_bytes >= 8; n_bytes -= 8, at += 8) { store_le(at, next()); }
        if (n_bytes > 0) {
            const std::uint64_t rest = next();
            std::memcpy(at, &rest, n_bytes);
        }
    }

  private:
    std::uint64_t state_;
};

// Mean 0, deviation 1, within ±3.47: a sum of four uniform numbers.
float near_normal(std::uint64_t bits) {
    const auto sum =
        static_cast<double>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
    const double deviation = 65536 * std::sqrt(4.0 / 12);
    return static_cast<float>((sum - 2 * 65535.0) / deviation);
}

// Scales differ from block to block: a factor from 0.75 to 1.25, mean square 1 + 1/48.
constexpr double kFactorMeanSquare = 1 + 1.0 / 48;
double factor(std::uint64_t bits) {
    return 0.75 + static_cast<double>(bits & 0xffff) / 131072;
}

void store_half(std::byte* to, double value) {
    store_le(to, ggml_fp32_to_fp16(static_cast<float>(value)));
}

// The layouts below are those of ggml's src/ggml-common.h.

// half d; int8 q[32]: d q.
void fill_q8_0(std::byte* block, Random& random, double deviation) {
    constexpr double kMeanSquare = (255.0 * 255 - 1) / 12;  // of -127 to 127
    const double d = deviation / std::sqrt(kMeanSquare * kFactorMeanSquare);
    store_half(block, d * factor(random.next()));
    random.fill(block + 2, 32);
    for (int i = 2; i < 34; ++i) {
        if (block[i] == std::byte{0x80}) { block[i] = std::byte{0}; }  // -128, which ggml never writes
    }
}

// half d; 32 nibbles q: d (q - 8). A sign for each d keeps the mean at 0.
void fill_q4_0(std::byte* block, Random& random, double deviation) {
    constexpr double kMeanSquare = (16.0 * 16 - 1) / 12 + 0.25;
    const std::uint64_t bits = random.next();
    const double d = deviation / std::sqrt(kMeanSquare * kFactorMeanSquare) * factor(bits);
    store_half(block, bits >> 63 != 0 ? -d : d);
    random.fill(block + 2, 16);
}

// half d, dmin; 8 times 6-bit scale s and minimum m, packed; quants q: d s q - dmin m.
// With dmin = d c, where c is the middle of the quants, and m = s + e: d (s (q - c) - c e), mean 0.
void fill_k_scales(std::byte* block, Random& random, double deviation, double middle, double quants_mean_square) {
    constexpr double kScaleMeanSquare = 44 * 44 + (32.0 * 32 - 1) / 12 + 0.25;  // s from 28 to 59
    constexpr double kErrorMeanSquare = 7.5;                                    // e from -4 to 4, never 0
    const double mean_square = quants_mean_square * kScaleMeanSquare + middle * middle * kErrorMeanSquare;
    const double d = deviation / std::sqrt(mean_square * kFactorMeanSquare) * factor(random.next());
    store_half(block, d);
    store_half(block + 2, d * middle);

    std::uint8_t scale[8];
    std::uint8_t minimum[8];
    std::uint64_t bits = random.next();
    for (int i = 0; i < 8; ++i, bits >>= 8) {
        scale[i] = static_cast<std::uint8_t>(28 + (bits & 31));
        const int error = static_cast<int>(bits >> 5 & 7) - 4;
        minimum[i] = static_cast<std::uint8_t>(scale[i] + error + (error >= 0 ? 1 : 0));
    }
    std::uint8_t packed[12];
    for (int i = 0; i < 4; ++i) {
        packed[i] = static_cast<std::uint8_t>(scale[i] | scale[i + 4] >> 4 << 6);
        packed[i + 4] = static_cast<std::uint8_t>(minimum[i] | minimum[i + 4] >> 4 << 6);
        packed[i + 8] = static_cast<std::uint8_t>((scale[i + 4] & 15) | (minimum[i + 4] & 15) << 4);
    }
    std::memcpy(block + 4, packed, sizeof packed);
}

void fill_q4_k(std::byte* block, Random& random, double deviation) {
    fill_k_scales(block, random, deviation, 7.5, (16.0 * 16 - 1) / 12);
    random.fill(block + 16, 128);
}

void fill_q5_k(std::byte* block, Random& random, double deviation) {
    fill_k_scales(block, random, deviation, 15.5, (32.0 * 32 - 1) / 12);
    random.fill(block + 16, 160);
}

// 256 quants of 6 bits; int8 scale s[16]; half d: d s (q - 32).
void fill_q6_k(std::byte* block, Random& random, double deviation) {
    constexpr double kQuantsMeanSquare = (64.0 * 64 - 1) / 12 + 0.25;
    constexpr double kScaleMeanSquare = 95.5 * 95.5 + (64.0 * 64 - 1) / 12;  // |s| from 64 to 127
    random.fill(block, 192);
    random.fill(block + 192, 16);
    for (int i = 192; i < 208; ++i) {
        const int bits = std::to_integer<int>(block[i]);
        const int scale = 64 + (bits & 63);
        block[i] = static_cast<std::byte>(bits < 128 ? scale : -scale);
    }
    const double d = deviation / std::sqrt(kQuantsMeanSquare * kScaleMeanSquare * kFactorMeanSquare);
    store_half(block + 208, d * factor(random.next()));
}

using FillBlock = void (*)(std::byte* block, Random& random, double deviation);
FillBlock block_filler(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0: return fill_q4_0;
        case GGML_TYPE_Q8_0: return fill_q8_0;
        case GGML_TYPE_Q4_K: return fill_q4_k;
        case GGML_TYPE_Q5_K: return fill_q5_k;
        case GGML_TYPE_Q6_K: return fill_q6_k;
        default: return nullptr;
    }
}

}  // namespace

std::uint64_t key_of(std::uint64_t seed, std::string_view name) {
    std::uint64_t hash = mix(seed + 0x9e3779b97f4a7c15u);
    for (const char c : name) { hash = mix(hash ^ static_cast<unsigned char>(c)); }
    return hash;
}

Status RandomWeights::check() const {
    if (type < 0 || type >= GGML_TYPE_COUNT || ggml_blck_size(type) == 0) {
        return fail(ErrorKind::invalid, "type: expected one of GGUF's, got {}", static_cast<int>(type));
    }
    const bool is_float = type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
    const bool for_activations = type == GGML_TYPE_Q8_1 || type == GGML_TYPE_Q8_K;
    if (!is_float && (!ggml_is_quantized(type) || for_activations || ggml_quantize_requires_imatrix(type))) {
        return fail(
            ErrorKind::unsupported,
            "type {}: expected one that can be made of random numbers, got one that is no type for weights or needs "
            "an importance matrix; take q4_K or q8_0",
            ggml_type_name(type));
    }
    if (n_columns <= 0 || n_columns % ggml_blck_size(type) != 0) {
        return fail(ErrorKind::invalid, "type {}: expected rows of a multiple of {} elements, got {}",
                    ggml_type_name(type), ggml_blck_size(type), n_columns);
    }
    return {};
}

void RandomWeights::fill(std::int64_t first_row, std::span<std::byte> to) const {
    const std::uint64_t n_rows = to.size() / row_bytes();
    const auto row_of = [&](std::uint64_t i) { return static_cast<std::uint64_t>(first_row) + i; };
    if (const FillBlock fill_block = block_filler(type)) {
        const std::uint64_t block_bytes = ggml_type_size(type);
        for (std::uint64_t i = 0; i < n_rows; ++i) {
            Random random(key, row_of(i));
            const auto row = to.subspan(i * row_bytes(), row_bytes());
            for (std::uint64_t at = 0; at < row.size(); at += block_bytes) { fill_block(&row[at], random, deviation); }
        }
        return;
    }
    std::vector<float> values(static_cast<std::size_t>(n_columns));
    for (std::uint64_t i = 0; i < n_rows; ++i) {
        Random random(key, row_of(i));
        for (float& value : values) { value = static_cast<float>(mean + deviation * near_normal(random.next())); }
        std::byte* row = &to[i * row_bytes()];
        if (type == GGML_TYPE_F32) {
            std::memcpy(row, values.data(), row_bytes());
        } else if (type == GGML_TYPE_F16) {
            ggml_fp32_to_fp16_row(values.data(), reinterpret_cast<ggml_fp16_t*>(row), n_columns);
        } else if (type == GGML_TYPE_BF16) {
            ggml_fp32_to_bf16_row(values.data(), reinterpret_cast<ggml_bf16_t*>(row), n_columns);
        } else {
            ggml_quantize_chunk(type, values.data(), row, 0, 1, n_columns, nullptr);
        }
    }
}

}  // namespace linkcpp::model
