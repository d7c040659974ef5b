// For tests: a layer of the real shape with a few experts, its slices, and an engine that holds them, planted faults
// and all.
#pragma once

#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "expert/engine.h"
#include "model/manifest.h"
#include "model/synth.h"
#include "model/test_model.h"
#include "trust/probe.h"
#include "trust/shard_file.h"

namespace linkcpp::trust::testing {

struct TestLayer {
    explicit TestLayer(model::SynthOptions options, std::uint64_t seed = 1) {
        options.seed = seed;
        options.n_layer = 1;
        options.experts_only = true;
        const Status made = model::write_synthetic_model(options, folder / "m.gguf");
        if (!made) { ADD_FAILURE() << made.error().message; }
        shard = open_shard(folder / "m.gguf").value();
    }
    // The layer of Qwen3.5-122B-A10B with fewer experts.
    static model::SynthOptions real_shape() {
        model::SynthOptions options;
        options.n_expert = 16;
        options.n_expert_used = 8;
        options.n_embd = 3072;
        options.n_ff = 1024;
        options.gate_type = options.up_type = GGML_TYPE_Q4_K;
        options.down_type = GGML_TYPE_Q6_K;
        return options;
    }
    static model::SynthOptions small(ggml_type type) {
        model::SynthOptions options;
        options.n_expert = 6;
        options.n_expert_used = 2;
        options.n_embd = 512;
        options.n_ff = 256;
        options.gate_type = options.up_type = options.down_type = type;
        return options;
    }

    Bytes slice(std::uint32_t expert) const { return shard.read(expert).value(); }
    ProbeInput input(std::uint64_t seed = 1, std::uint32_t n_tokens = 12) const {
        return make_input(shard.layer, shard.experts, seed, n_tokens).value();
    }

    // An engine on the CPU that holds all experts as `change` has left them.
    std::unique_ptr<expert::Engine> engine(const std::function<void(std::uint32_t expert, Bytes& slice)>& change =
                                               [](std::uint32_t, Bytes&) {}) const {
        expert::load_backends();
        auto engine = expert::Engine::open(expert::choose_device(expert::devices(), "CPU").value(), 2).value();
        const auto source = [&](std::uint32_t, std::uint32_t expert, std::span<std::byte> to) -> Status {
            Bytes bytes = slice(expert);
            change(expert, bytes);
            std::ranges::copy(bytes, to.begin());
            return {};
        };
        const Status held = engine->hold(kModel, shard.layer, shard.experts, source);
        if (!held) { ADD_FAILURE() << held.error().message; }
        return engine;
    }
    ProbeRows rows(
        const ProbeInput& input,
        const std::function<void(std::uint32_t, Bytes&)>& change = [](std::uint32_t, Bytes&) {}) const {
        return run_probe(*engine(change), kModel, shard.layer, input).value();
    }

    static constexpr std::uint64_t kModel = 7;
    TestFolder folder;
    ShardFile shard;
};

}  // namespace linkcpp::trust::testing
