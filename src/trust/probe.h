// The probe: a fixed, seeded input through the experts of one layer on one device. Who has the slices can make the same
// input anywhere and say what must come out (truth.h); two devices compare by what came out (compare.h).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "expert/engine.h"
#include "model/moe.h"

namespace linkcpp::trust {

// What is computed of the input, each in the shape of a request that workers serve: kernels differ from shape to shape.
// Numbers reach files and frames: never reused.
enum class Part : std::uint8_t {
    sums = 1,     // {n_embd, n_tokens}: weighted sums, all tokens in one request
    batch = 2,    // {n_embd, n_pairs}: a row a pair, all in one request
    single = 3,   // {n_embd, n_pairs}: a row a pair, a request a token
    crowd = 4,    // {n_embd, n_tokens}: every token through the first pair's expert, in one request
    gate = 5,     // {n_ff, n_pairs}: products by one weight alone, all pairs in one request
    up = 6,       // {n_ff, n_pairs}
    gate_up = 7,  // {2 n_ff, n_pairs}
    down = 8,     // {n_embd, n_pairs}: of rows of its own, not of what gate and up give
};
std::string_view to_string(Part part);

struct ProbeInput {
    std::uint64_t seed = 0;
    std::uint32_t n_tokens = 0;
    std::uint32_t n_used = 0;         // experts a token
    std::vector<float> rows;          // {n_embd, n_tokens}
    std::vector<float> inner;         // {n_ff, n_pairs}: what down alone multiplies
    std::vector<expert::Pair> pairs;  // token by token, weights that add up to 1; `row` is the token

    std::size_t n_pairs() const { return pairs.size(); }
};

inline constexpr std::uint32_t kMaxProbeTokens = 4096;
inline constexpr std::size_t kMaxProbePairs = 32'768;

// The same on every machine. Each of `experts` (at least one; ids of the model) is chosen about equally often, as many
// a token as the model uses, or as there are. Rows have mean 0 and deviation 1. Errors: invalid (no experts, no tokens
// or too many).
Result<ProbeInput> make_input(const model::MoeLayer& layer, std::span<const std::uint16_t> experts, std::uint64_t seed,
                              std::uint32_t n_tokens);

// The experts that it is about, ascending.
std::vector<std::uint16_t> used_experts(const ProbeInput& input);

// The parts that such a layer has: of an unknown activation its products alone.
std::vector<Part> parts_of(const model::MoeLayer& layer);
// Numbers in a part's rows and how many rows it has.
struct PartShape {
    std::size_t n = 0;
    std::size_t n_rows = 0;
};
PartShape shape_of(Part part, const model::MoeLayer& layer, const ProbeInput& input);
// The expert that a row of a part is about, and the input row that it comes from. Not of sums.
struct PartRow {
    std::uint16_t expert = 0;
    std::span<const float> input;
};
PartRow row_of(Part part, std::size_t row, const model::MoeLayer& layer, const ProbeInput& input);
// The product that a part is, or nothing for whole FFNs.
std::optional<model::Role> product_of(Part part);

using ProbeRows = std::map<Part, std::vector<float>>;

// `engine` holds the experts of `layer`, under `model`. Errors: those of Engine::compute().
Result<std::vector<float>> run_part(expert::Engine& engine, std::uint64_t model, const model::MoeLayer& layer,
                                    const ProbeInput& input, Part part);
// All of them.
Result<ProbeRows> run_probe(expert::Engine& engine, std::uint64_t model, const model::MoeLayer& layer,
                            const ProbeInput& input);

}  // namespace linkcpp::trust
