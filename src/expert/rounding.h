// How a device rounds rows before it multiplies them by weights. ggml's kernels for quantised weights quantise the rows
// as well, each family in its own way (v0.4.0: type_traits_cpu[].vec_dot_type in ggml-cpu.c, quantize_row_*_ref in
// ggml-quants.c); those of graphics cards multiply in 16 bits. It is nearly all that parts one right device from
// another, so a device is measured by the truth under its own rounding.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace linkcpp::expert {

// Numbers reach files and frames: never reused.
enum class Rounding : std::uint8_t {
    none = 0,      // products of the rows as they are
    f16 = 1,       // rows and weights as 16-bit floats
    bf16 = 2,      // the same with 8 bits of mantissa
    q8_0 = 3,      // 8 bits a number, 32 numbers share a scale of 16 bits
    q8_wide = 4,   // the same with a scale of 32 bits
    q8_k = 5,      // 8 bits a number, 256 numbers share a scale of 32 bits
    f16_sums = 6,  // as f16, and products are added up in 16 bits, too: how, nobody can say but the device
};
inline constexpr std::array kRoundings{Rounding::none,    Rounding::f16,  Rounding::bf16,    Rounding::q8_0,
                                       Rounding::q8_wide, Rounding::q8_k, Rounding::f16_sums};
// Quantises rows in blocks.
constexpr bool is_block(Rounding rounding) {
    return rounding == Rounding::q8_0 || rounding == Rounding::q8_wide || rounding == Rounding::q8_k;
}
std::string_view to_string(Rounding rounding);
std::optional<Rounding> rounding_of(std::string_view name);

// Of the two kinds of rows in an FFN, whose weights may be of different types: what gate and up multiply, and what down
// does.
struct FfnRounding {
    Rounding input = Rounding::none;
    Rounding inner = Rounding::none;

    bool operator==(const FfnRounding&) const = default;
};
// For people: "q8_k", or "q8_k, q8_0".
std::string to_string(FfnRounding rounding);

// out.size() == row.size()
void round_row(Rounding rounding, std::span<const float> row, std::span<double> out);
// The largest distance between neighbouring values that a row's numbers can be rounded to; 0 where they are not. Two
// right devices may round a number that lies between two values to different ones.
double largest_step(Rounding rounding, std::span<const float> row);
// As a kernel with that rounding sees dequantised weights, in place.
void round_weights(Rounding rounding, std::span<float> weights);

}  // namespace linkcpp::expert
