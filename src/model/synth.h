// Synthetic models: any Mixture-of-Experts shape and quantisation with random weights whose outputs have unit scale.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include <ggml.h>

#include "base/error.h"

namespace linkcpp::model {

struct SynthOptions {
    std::string architecture = "qwen3moe";  // or "qwen35moe", "olmoe"
    std::uint32_t n_layer = 4;
    std::uint32_t n_expert = 16;
    std::uint32_t n_expert_used = 4;
    std::uint32_t n_embd = 512;
    std::uint32_t n_ff = 256;          // of one routed expert
    std::uint32_t n_ff_shared = 0;     // of the shared expert, where the architecture has one
    std::uint32_t n_head = 8;
    std::uint32_t n_head_kv = 2;
    std::uint32_t head_dim = 64;
    std::uint32_t n_vocab = 4096;
    std::uint32_t n_ctx = 4096;
    ggml_type gate_type = GGML_TYPE_Q4_K;
    ggml_type up_type = GGML_TYPE_Q4_K;
    ggml_type down_type = GGML_TYPE_Q4_K;
    ggml_type dense_type = GGML_TYPE_Q8_0;  // attention, embeddings, output, shared expert
    std::uint64_t seed = 1;
    bool header_only = false;   // metadata and tensor table with holes for data: sparse, a few MB on disk
    bool experts_only = false;  // only the routed experts' tensors (a bare layer for probes and benchmarks)
};

// Named shapes: "qwen3.5-122b-a10b" (48 layers), "qwen3.5-122b-a10b-layer" (layer 0 only: 256 experts, n_embd 3072,
// n_ff 1024, gate/up Q4_K, down Q6_K, 1.57 GB), "bench" (8 layers, 64 experts, 8 used, n_embd 1024, n_ff 512).
// Errors: not_found, listing the names.
Result<SynthOptions> synth_preset(std::string_view name);

// Errors: invalid (a shape that the quantisation's block size or the architecture does not allow), failed (disk).
Status write_synthetic_model(const SynthOptions& options, const std::filesystem::path& out);

}  // namespace linkcpp::model
