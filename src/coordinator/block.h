// Recognising a layer's expert block in the graph that llama.cpp hands over.
//
// A block, as llama.cpp's build_moe_ffn() makes it: MUL_MAT_IDs by the layer's weights, what is between them, and
// behind them the tail: MUL(rows, weights), VIEW …, ADD …, out of which {n_embd, n_tokens} comes. What the manifest
// says of a layer makes the nodes that a worker would compute (expert/ffn.h); where llama.cpp's nodes are the same,
// down to their parameters, they are one step, computed where the experts are. Nothing else is ever taken for a block:
// whatever is not recognised is computed node by node, each product where the experts are, all that is between them
// here.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ggml-cpp.h>
#include <ggml.h>

#include "base/error.h"
#include "expert/ffn.h"
#include "model/moe.h"

namespace linkcpp::coordinator {

// True for tensors that lie in our buffers, or views of such.
using IsOurs = std::function<bool(const ggml_tensor*)>;

// Whether `op` belongs to an expert block: a product by one of our expert tensors, or something that grows out of such
// products (and, for a MUL, any weights) up to the sum over a token's experts. What llama.cpp asks with supports_op,
// also of tensors that it has not placed yet.
bool belongs_to_block(const ggml_tensor* op, const IsOurs& is_ours);

struct Block {
    std::uint32_t layer = 0;
    const ggml_tensor* rows = nullptr;  // {n_embd, 1 or n_used, n_tokens}, f32
    const ggml_tensor* ids = nullptr;   // {n_used, n_tokens}, i32
    ggml_tensor* out = nullptr;         // {n_embd, n_used, n_tokens}: where the experts' rows go

    // When a plain weighted sum over the first n_summed of a token's experts follows: what partial sums need.
    const ggml_tensor* weights = nullptr;  // {1, n_used, n_tokens}, f32; null: something else follows
    std::uint32_t n_summed = 0;
    ggml_tensor* sum = nullptr;           // {n_embd, n_tokens}
    std::vector<ggml_tensor*> sum_nodes;  // that lead from `out` to `sum`, itself included
};

// One step of a graph: a whole block, or one node.
struct Step {
    std::optional<Block> block;
    ggml_tensor* node = nullptr;
};

struct Plan {
    std::vector<Step> steps;
    // Layers whose block is another than the manifest says, and what their nodes look like. A block that is only cut
    // into pieces, by a program that looks at every node, is none.
    std::map<std::uint32_t, std::string> unknown;
};

// The weight's layer and role when `node` is a product by one of our weights.
std::optional<model::ExpertTensorName> parse_product(const ggml_tensor* node, const IsOurs& is_ours);

// Immutable after construction: any thread may plan.
class BlockFinder {
  public:
    explicit BlockFinder(const model::MoeModel& model);

    // Every node of the graph but views is in one step, or inside one's block.
    Plan plan(ggml_cgraph* graph, const IsOurs& is_ours) const;

  private:
    // What a layer's block looks like, from a made-up input on.
    struct Pattern {
        ggml_context_ptr context;
        ggml_tensor* rows = nullptr;
        ggml_tensor* ids = nullptr;
        ggml_tensor* out = nullptr;   // null: the layer's activation is unknown
        ggml_tensor* down = nullptr;  // the product that `out` is, or grows out of
    };
    class Match;
    bool is_described(std::uint32_t layer, ggml_tensor* down, const IsOurs& is_ours) const;

    std::map<std::uint32_t, Pattern> patterns_;
};

}  // namespace linkcpp::coordinator
