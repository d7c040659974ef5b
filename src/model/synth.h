// Synthetic models: any Mixture-of-Experts shape and quantisation with random weights whose outputs have unit scale.
//
// llama.cpp loads and runs them like real ones: all tensors of the architecture, a byte-level BPE vocabulary. The text
// that they write means nothing. The same options give the same bytes, on any number of threads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include <ggml.h>

#include "base/error.h"

namespace linkcpp::model {

struct SynthOptions {
    std::string architecture = "qwen3moe";  // or "qwen35moe", "olmoe"
    std::uint32_t n_layer = 4;
    std::uint32_t n_expert = 16;
    std::uint32_t n_expert_used = 4;
    std::uint32_t n_embd = 512;
    std::uint32_t n_ff = 256;       // of one routed expert
    std::uint32_t n_ff_shared = 0;  // of the shared expert, where the architecture has one; 0: as n_ff
    std::uint32_t n_head = 8;
    std::uint32_t n_head_kv = 2;  // olmoe: n_head whatever stands here
    std::uint32_t head_dim = 64;  // olmoe: n_embd / n_head whatever stands here
    std::uint32_t n_vocab = 4096;
    std::uint32_t n_ctx = 4096;
    // qwen35moe's layers without attention (gated delta net); every n-th layer has attention.
    std::uint32_t full_attention_interval = 4;
    std::uint32_t ssm_state = 64;   // of one head
    std::uint32_t ssm_n_group = 4;  // heads of keys
    std::uint32_t ssm_n_head = 8;   // heads of values, a multiple of ssm_n_group
    ggml_type gate_type = GGML_TYPE_Q4_K;
    ggml_type up_type = GGML_TYPE_Q4_K;
    ggml_type down_type = GGML_TYPE_Q4_K;
    // Of down in the layers that llama-quantize gives more bits in its mixtures ("Q4_K_M"), if any.
    std::optional<ggml_type> down_more_bits_type;
    bool merged_gate_up = false;            // qwen35moe only: one tensor of gate and up, of gate's type
    ggml_type dense_type = GGML_TYPE_Q8_0;  // attention, embeddings, output, shared expert
    std::uint64_t seed = 1;
    bool header_only = false;  // metadata and tensor table with holes for data: sparse, a few MB on disk
    // Real weights in embeddings, norms and routers, a page of each expert's tensors, holes in all else: a large model
    // on a small disk, whose routers choose, and no two of whose slices are the same.
    bool sparse = false;
    bool experts_only = false;  // only the routed experts' tensors (a bare layer for probes and benchmarks)
};

// Named shapes: "qwen3.5-122b-a10b" (48 layers), "qwen3.5-122b-a10b-layer" (layer 0's experts only: 256 experts, n_embd
// 3072, n_ff 1024, gate/up Q4_K, down Q6_K, 1.57 GB), "bench" (8 layers, 64 experts, 8 used, n_embd 1024, n_ff 512).
// Errors: not_found, listing the names.
Result<SynthOptions> synth_preset(std::string_view name);

// Whether llama-quantize's "more bits" rule names that layer (src/llama-quant.cpp, use_more_bits).
bool has_more_bits(std::uint32_t layer, std::uint32_t n_layer);

// With h of unit scale each routed expert's output has unit scale, and so has every other block's, roughly.
// `n_threads` 0: all processors. Replaces `out`.
// Errors: invalid (a shape that the quantisation's block size or the architecture does not allow), unsupported (a type
// or architecture that cannot be made), failed (disk).
Status write_synthetic_model(const SynthOptions& options, const std::filesystem::path& out, unsigned n_threads = 0);

}  // namespace linkcpp::model
