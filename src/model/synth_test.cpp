#include "model/synth.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "model/manifest.h"
#include "model/random_weights.h"
#include "model/slicer.h"
#include "model/test_model.h"

namespace linkcpp::model {
namespace {

std::vector<float> dequantised(ggml_type type, ByteView bytes, std::int64_t n) {
    std::vector<float> values(static_cast<std::size_t>(n));
    if (type == GGML_TYPE_F32) {
        std::memcpy(values.data(), bytes.data(), bytes.size());
    } else {
        ggml_get_type_traits(type)->to_float(bytes.data(), values.data(), n);
    }
    return values;
}

double mean_of(const std::vector<float>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double scale_of(const std::vector<float>& values) {
    double sum = 0;
    for (const float value : values) { sum += static_cast<double>(value) * value; }
    return std::sqrt(sum / static_cast<double>(values.size()));
}

constexpr ggml_type kTypes[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q4_0,  GGML_TYPE_Q4_1,
                                GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_Q2_K,  GGML_TYPE_Q3_K,
                                GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS};

TEST(RandomWeights, have_mean_zero_and_the_deviation_asked_for) {
    for (const ggml_type type : kTypes) {
        const RandomWeights weights{.type = type, .n_columns = 1024, .deviation = 0.03, .key = 5};
        ASSERT_TRUE(weights.check()) << ggml_type_name(type);
        constexpr std::int64_t kRows = 256;
        Bytes bytes(kRows * weights.row_bytes());
        weights.fill(0, bytes);
        const auto values = dequantised(type, bytes, kRows * 1024);
        // 262,144 values: the mean's own deviation is 0.2 % of theirs. ggml's coarse types shrink what they round.
        const double tolerance = type == GGML_TYPE_Q2_K ? 0.1 : 0.02;
        EXPECT_NEAR(scale_of(values), 0.03, 0.03 * tolerance) << ggml_type_name(type);
        EXPECT_NEAR(mean_of(values), 0, 0.03 * 0.01) << ggml_type_name(type);
    }
}

TEST(RandomWeights, use_all_of_a_quantised_type_s_fields) {
    for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K}) {
        const RandomWeights weights{.type = type, .n_columns = 256, .deviation = 1, .key = 9};
        Bytes bytes(512 * weights.row_bytes());
        weights.fill(0, bytes);
        const std::uint64_t block = ggml_type_size(type);
        for (std::uint64_t at = 0; at < block; ++at) {
            std::set<std::byte> seen;
            for (std::uint64_t i = at; i < bytes.size(); i += block) { seen.insert(bytes[i]); }
            EXPECT_GT(seen.size(), 1) << ggml_type_name(type) << " byte " << at;
        }
        EXPECT_TRUE(ggml_validate_row_data(type, bytes.data(), bytes.size())) << ggml_type_name(type);
    }
}

TEST(RandomWeights, rows_do_not_depend_on_who_makes_them) {
    for (const ggml_type type : kTypes) {
        const RandomWeights weights{.type = type, .n_columns = 512, .deviation = 1, .key = 3};
        Bytes whole(10 * weights.row_bytes());
        weights.fill(0, whole);
        Bytes part(4 * weights.row_bytes());
        weights.fill(5, part);
        EXPECT_TRUE(std::ranges::equal(part, std::span(whole).subspan(5 * weights.row_bytes(), part.size())));
    }
}

TEST(RandomWeights, types_that_cannot_be_made_are_refused) {
    EXPECT_EQ((RandomWeights{.type = GGML_TYPE_Q4_K, .n_columns = 100}.check().error().kind), ErrorKind::invalid);
    EXPECT_EQ((RandomWeights{.type = GGML_TYPE_Q4_K, .n_columns = 0}.check().error().kind), ErrorKind::invalid);
    EXPECT_EQ((RandomWeights{.type = GGML_TYPE_COUNT, .n_columns = 256}.check().error().kind), ErrorKind::invalid);
    for (const ggml_type type : {GGML_TYPE_I32, GGML_TYPE_Q8_1, GGML_TYPE_Q8_K, GGML_TYPE_IQ2_XXS}) {
        EXPECT_EQ((RandomWeights{.type = type, .n_columns = 256}.check().error().kind), ErrorKind::unsupported);
    }
}

class Synth : public ::testing::Test {
  protected:
    GgufFile make(const SynthOptions& options, std::string_view name = "m.gguf", unsigned n_threads = 0) const {
        const Status status = write_synthetic_model(options, folder / name, n_threads);
        EXPECT_TRUE(status) << status.error().message;
        return GgufFile::open(folder / name).value();
    }

    ErrorKind error_of(const SynthOptions& options) const {
        const Status status = write_synthetic_model(options, folder / "bad.gguf");
        EXPECT_FALSE(status);
        EXPECT_FALSE(std::filesystem::exists(folder / "bad.gguf"));
        return status ? ErrorKind::failed : status.error().kind;
    }

    static SynthOptions small() {
        SynthOptions options;
        options.n_layer = 2;
        options.n_expert = 4;
        options.n_expert_used = 2;
        options.n_embd = 256;
        options.n_head = 4;
        options.n_vocab = 400;
        return options;
    }

    TestFolder folder;
};

// h of unit scale through one expert, in double precision.
std::vector<float> expert_output(const GgufFile& file, const MoeLayer& layer, std::uint32_t expert) {
    const auto weights = [&](Role role) {
        const ExpertTensor& tensor = *layer.find(role);
        Bytes slab(tensor.slab_bytes);
        EXPECT_TRUE(file.read(*file.find(tensor.name), expert * tensor.slab_bytes, slab));
        return dequantised(tensor.type, slab, tensor.ne[0] * tensor.ne[1]);
    };
    const auto product = [](const std::vector<float>& matrix, const std::vector<float>& x) {
        std::vector<float> y(matrix.size() / x.size());
        for (std::size_t i = 0; i < y.size(); ++i) {
            y[i] = static_cast<float>(std::inner_product(
                x.begin(), x.end(), matrix.begin() + static_cast<std::ptrdiff_t>(i * x.size()), 0.0));
        }
        return y;
    };
    std::mt19937 random(expert + 1);
    std::normal_distribution<float> normal;
    std::vector<float> h(layer.n_embd);
    for (float& value : h) { value = normal(random); }
    std::vector<float> gate = product(weights(Role::gate), h);
    const std::vector<float> up = product(weights(Role::up), h);
    for (std::size_t i = 0; i < gate.size(); ++i) { gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i]; }
    return product(weights(Role::down), gate);
}

TEST_F(Synth, an_expert_s_output_has_unit_scale) {
    for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K}) {
        SynthOptions options = small();
        options.n_embd = 512;
        options.n_ff = 512;
        options.gate_type = options.up_type = options.down_type = type;
        options.experts_only = true;
        const GgufFile file = make(options);
        const MoeModel model = read_moe(file).value();
        std::vector<float> all;
        for (std::uint32_t expert = 0; expert < 4; ++expert) {
            const auto output = expert_output(file, model.layers[1], expert);
            all.insert(all.end(), output.begin(), output.end());
        }
        EXPECT_NEAR(scale_of(all), 1, 0.15) << ggml_type_name(type);  // 4 vectors: silu(g) u varies with h
    }
}

TEST_F(Synth, the_same_options_give_the_same_bytes_on_any_number_of_threads) {
    make(small(), "a.gguf", 1);
    make(small(), "b.gguf", 5);
    EXPECT_EQ(testing::read_bytes(folder / "a.gguf"), testing::read_bytes(folder / "b.gguf"));
}

TEST_F(Synth, every_expert_is_different) {
    std::set<Digest> digests;
    std::size_t n = 0;
    for (const std::uint64_t seed : {1, 2}) {
        SynthOptions options = small();
        options.seed = seed;
        const Manifest manifest = make_manifest(make(options)).value();
        for (const auto& layer : manifest.slices) {
            digests.insert(layer.begin(), layer.end());
            n += layer.size();
        }
    }
    EXPECT_EQ(n, 16);
    EXPECT_EQ(digests.size(), n);
}

TEST_F(Synth, every_architecture_has_its_shapes) {
    for (const char* architecture : {"qwen3moe", "qwen35moe", "olmoe"}) {
        SynthOptions options = small();
        options.architecture = architecture;
        options.n_layer = 4;
        const GgufFile file = make(options);
        const auto moe = read_moe(file);
        ASSERT_TRUE(moe) << moe.error().message;
        EXPECT_EQ(moe->layers.size(), 4);
        EXPECT_EQ(moe->layers[0].n_ff, options.n_ff);
        EXPECT_EQ(moe->layers[0].n_expert_used, 2);
        EXPECT_EQ(file.architecture(), architecture);
    }
    EXPECT_NE(GgufFile::open(folder / "m.gguf")->find("output_norm.weight"), nullptr);
}

TEST_F(Synth, gate_and_up_can_be_merged) {
    SynthOptions options = small();
    options.architecture = "qwen35moe";
    options.merged_gate_up = true;
    EXPECT_EQ(read_moe(make(options))->layers[0].tensors[0].role, Role::gate_up);
    options.architecture = "qwen3moe";
    EXPECT_EQ(error_of(options), ErrorKind::invalid);
}

TEST_F(Synth, types_may_differ_between_projections_and_layers) {
    SynthOptions options = small();
    options.n_layer = 8;
    options.gate_type = GGML_TYPE_Q8_0;
    options.up_type = GGML_TYPE_F16;
    options.down_type = GGML_TYPE_Q4_K;
    options.down_more_bits_type = GGML_TYPE_Q6_K;
    const MoeModel model = read_moe(make(options)).value();
    for (const MoeLayer& layer : model.layers) {
        EXPECT_EQ(layer.find(Role::gate)->type, GGML_TYPE_Q8_0);
        EXPECT_EQ(layer.find(Role::up)->type, GGML_TYPE_F16);
        EXPECT_EQ(layer.find(Role::down)->type, has_more_bits(layer.layer, 8) ? GGML_TYPE_Q6_K : GGML_TYPE_Q4_K);
    }
}

TEST_F(Synth, header_only_files_are_sparse_and_complete) {
    SynthOptions options = synth_preset("qwen3.5-122b-a10b").value();
    options.header_only = true;
    const GgufFile file = make(options);
    struct stat info{};
    ASSERT_EQ(::stat((folder / "m.gguf").c_str(), &info), 0);
    EXPECT_LT(info.st_blocks * 512, 12 << 20);
    EXPECT_NEAR(static_cast<double>(file.file_bytes()), 74e9, 1e9);  // as the public listings say

    // The numbers of the real model: see its GGUF's log, and 3072 x 1024 weights of 4.5 and 6.5625 bits.
    const MoeModel model = read_moe(file).value();
    EXPECT_EQ(model.layers.size(), 48);
    EXPECT_EQ(model.layers[0].slice_bytes(), 6'119'424);
    EXPECT_EQ(model.layers[0].n_expert * model.layers[0].slice_bytes(), 1'566'572'544);
    EXPECT_EQ(std::ranges::count_if(
                  model.layers, [](const MoeLayer& layer) { return layer.find(Role::down)->type == GGML_TYPE_Q6_K; }),
              24);
    EXPECT_EQ(check_has_experts(file).error().kind, ErrorKind::invalid);
}

TEST_F(Synth, sparse_models_have_a_page_of_each_expert_and_what_routers_need) {
    SynthOptions options;
    options.architecture = "qwen35moe";
    options.n_layer = 2;
    options.n_embd = 1024;
    options.n_ff = 1024;
    options.n_expert = 16;
    const GgufFile whole = make(options);
    std::map<std::string, Bytes> expected;
    for (const TensorInfo& tensor : whole.tensors()) {
        expected[tensor.name].resize(tensor.n_bytes);
        ASSERT_TRUE(whole.read(tensor, 0, expected[tensor.name]));
    }
    options.sparse = true;
    const GgufFile sparse = make(options);
    struct stat info{};
    ASSERT_EQ(::stat((folder / "m.gguf").c_str(), &info), 0);
    EXPECT_LT(info.st_blocks * 512, static_cast<std::int64_t>(sparse.file_bytes() / 3));
    ASSERT_EQ(sparse.file_bytes(), whole.file_bytes());
    for (const TensorInfo& tensor : sparse.tensors()) {
        Bytes bytes(tensor.n_bytes);
        ASSERT_TRUE(sparse.read(tensor, 0, bytes));
        // What is there is what the whole model has.
        const Bytes& all = expected[tensor.name];
        const auto fits = [](std::byte here, std::byte there) { return here == std::byte{0} || here == there; };
        EXPECT_TRUE(std::ranges::equal(bytes, all, fits)) << tensor.name;
        const bool is_router = tensor.name.ends_with("ffn_gate_inp.weight");
        if (is_router || tensor.name == "token_embd.weight") { EXPECT_EQ(bytes, all) << tensor.name; }
    }
    const Manifest manifest = make_manifest(sparse).value();
    std::set<Digest> different;
    for (const auto& layer : manifest.slices) { different.insert(layer.begin(), layer.end()); }
    EXPECT_EQ(different.size(), 32);
}

TEST_F(Synth, the_layer_preset_is_layer_0_of_the_whole) {
    SynthOptions layer = synth_preset("qwen3.5-122b-a10b-layer").value();
    SynthOptions whole = synth_preset("qwen3.5-122b-a10b").value();
    layer.header_only = whole.header_only = true;
    EXPECT_EQ(read_moe(make(layer, "layer.gguf"))->layers[0], read_moe(make(whole, "whole.gguf"))->layers[0]);
    EXPECT_EQ(make(layer, "layer.gguf").tensors().size(), 3);
}

TEST_F(Synth, unknown_presets_are_answered_with_the_names) {
    const auto preset = synth_preset("no-such");
    ASSERT_FALSE(preset);
    EXPECT_EQ(preset.error().kind, ErrorKind::not_found);
    EXPECT_NE(preset.error().message.find("qwen3.5-122b-a10b-layer"), std::string::npos);
}

TEST_F(Synth, impossible_options_are_refused) {
    const auto with = [](auto change) {
        SynthOptions options = small();
        change(options);
        return options;
    };
    using O = SynthOptions;
    EXPECT_EQ(error_of(with([](O& o) { o.architecture = "llama"; })), ErrorKind::unsupported);
    EXPECT_EQ(error_of(with([](O& o) { o.n_ff = 100; })), ErrorKind::invalid);
    EXPECT_EQ(error_of(with([](O& o) { o.n_embd = 255; })), ErrorKind::invalid);
    EXPECT_EQ(error_of(with([](O& o) { o.n_embd = 0; })), ErrorKind::invalid);
    EXPECT_EQ(error_of(with([](O& o) { o.n_layer = 0; })), ErrorKind::invalid);
    EXPECT_EQ(error_of(with([](O& o) { o.n_expert = 5000; })), ErrorKind::invalid);
    EXPECT_EQ(error_of(with([](O& o) { o.n_expert_used = 5; })), ErrorKind::invalid);
    EXPECT_EQ(error_of(with([](O& o) { o.n_vocab = 10; })), ErrorKind::invalid);
    EXPECT_EQ(error_of(with([](O& o) { o.n_head_kv = 3; })), ErrorKind::invalid);
    EXPECT_EQ(error_of(with([](O& o) { o.n_head = 0; })), ErrorKind::invalid);
    EXPECT_EQ(error_of(with([](O& o) { o.head_dim = 100; })), ErrorKind::invalid);
    EXPECT_EQ(error_of(with([](O& o) { o.gate_type = GGML_TYPE_IQ1_S; })), ErrorKind::unsupported);
    EXPECT_EQ(error_of(with([](O& o) {
                  o.architecture = "qwen35moe";
                  o.ssm_n_group = 3;
              })),
              ErrorKind::invalid);
    EXPECT_EQ(error_of(with([](O& o) {
                  o.architecture = "olmoe";
                  o.n_head = 3;
              })),
              ErrorKind::invalid);
}

}  // namespace
}  // namespace linkcpp::model
