// One expert FFN as nodes of a ggml graph: the nodes that llama.cpp's build_moe_ffn() makes between the experts' input
// and the multiplication by the router's weights (v0.4.0, src/llama-graph.cpp). The engine computes what is built here,
// and the coordinator compares what is built here with the graph that llama.cpp hands over: equal nodes, equal bits.
#pragma once

#include <map>

#include <ggml.h>

#include "model/moe.h"

namespace linkcpp::expert {

using FfnTensors = std::map<model::Role, ggml_tensor*>;

// More nodes and tensors than any FFN has.
inline constexpr std::size_t kMaxFfnNodes = 64;

// {n_out, n_used, n_tokens}: the product by one weight. `rows`: {n_in, 1 or n_used, n_tokens}, ids: {n_used, n_tokens}.
ggml_tensor* build_product(ggml_context* context, const FfnTensors& tensors, model::Role role, ggml_tensor* rows,
                           ggml_tensor* ids);

// {n_embd, n_used, n_tokens}. `tensors` holds those of layer.tensors. Null where the activation is unknown.
ggml_tensor* build_ffn(ggml_context* context, const model::MoeLayer& layer, const FfnTensors& tensors,
                       ggml_tensor* rows, ggml_tensor* ids);

}  // namespace linkcpp::expert
