// Recognising a layer's expert block in the graph that llama.cpp hands over, and what is left to do behind the experts.
//
// A block, as llama.cpp's build_moe_ffn() makes it:
//
//   up   = MUL_MAT_ID(W_up,   h, ids)         {n_ff, n_used, n_tokens}
//   gate = MUL_MAT_ID(W_gate, h, ids)         … or both as one product and two VIEWs
//   act  = GLU(SWIGLU)(gate, up)
//   down = MUL_MAT_ID(W_down, act, ids)       {n_embd, n_used, n_tokens}
//   MUL(down, weights), VIEW …, ADD …         the tail: {n_embd, n_tokens} comes out
//
// Everything up to `down` is the experts' work; the tail stays here, in llama.cpp's own order of additions.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <ggml.h>

#include "base/error.h"
#include "model/moe.h"

namespace linkcpp::coordinator {

struct Block {
    std::uint32_t layer = 0;
    model::Activation activation = model::Activation::swiglu;
    const ggml_tensor* h = nullptr;    // {n_embd, 1, n_tokens}, f32
    const ggml_tensor* ids = nullptr;  // {n_used, n_tokens}, i32
    ggml_tensor* down = nullptr;       // {n_embd, n_used, n_tokens}: where the experts' rows go
    std::vector<ggml_tensor*> tail;    // nodes behind `down`, in order

    // When the tail is the plain weighted sum over the first n_summed of a token's experts: what partial sums need.
    const ggml_tensor* weights = nullptr;  // {1, n_used, n_tokens}, f32; null: it is another tail
    std::uint32_t n_summed = 0;
    ggml_tensor* sum = nullptr;  // {n_embd, n_tokens}
};

// True for tensors whose weight is an expert tensor in our buffers.
using IsOurs = std::function<bool(const ggml_tensor*)>;

// Whether `op` belongs to an expert block: a product by one of our expert tensors, or something that grows out of such
// products alone (and, for a MUL, any weights). What llama.cpp asks with supports_op.
bool belongs_to_block(const ggml_tensor* op, const IsOurs& is_ours);

// The blocks of a graph, in order. Every node belongs to one. Errors: unsupported, naming the node.
Result<std::vector<Block>> find_blocks(ggml_cgraph* graph, const IsOurs& is_ours);

// Computes one tail node on data in host memory, rounding as ggml's CPU backend does: one multiplication or addition,
// one rounding. Errors: unsupported.
Status compute_tail_node(ggml_tensor* node);

}  // namespace linkcpp::coordinator
