#include "coordinator/block.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include <ggml-backend.h>
#include <ggml-cpp.h>
#include <gtest/gtest.h>

#include "coordinator/cpu_node.h"
#include "expert/device.h"

namespace linkcpp::coordinator {
namespace {

constexpr std::int64_t kEmbd = 64;
constexpr std::int64_t kFf = 32;
constexpr std::int64_t kExperts = 8;
constexpr std::int64_t kUsed = 3;
constexpr std::int64_t kTokens = 5;

bool is_expert_weight(const ggml_tensor* t) {
    return std::string_view(ggml_get_name(t)).find("_exps") != std::string_view::npos;
}

using model::Activation;
using model::Role;

model::MoeLayer describe(std::uint32_t number, const model::ActivationOf& activation, const std::vector<Role>& roles) {
    model::MoeLayer layer;
    layer.layer = number;
    layer.n_expert = kExperts;
    layer.n_expert_used = kUsed;
    layer.n_embd = kEmbd;
    layer.n_ff = kFf;
    layer.activation = activation;
    for (const Role role : roles) {
        layer.tensors.push_back({.role = role,
                                 .name = model::expert_tensor_name(number, role),
                                 .type = GGML_TYPE_F32,
                                 .ne = model::shape_of(layer, role),
                                 .slab_bytes = *model::slab_bytes_of(layer, role, GGML_TYPE_F32)});
    }
    return layer;
}

constexpr std::uint32_t kUnknown = 9;

// Layer 0 has gate and up apart, layer 1 merged, others what their activation needs; layer kUnknown nobody has
// described.
model::MoeModel a_model() {
    const std::vector<Role> separate{Role::gate, Role::up, Role::down};
    model::MoeModel model;
    model.layers = {
        describe(0, {Activation::swiglu, {}}, separate),
        describe(1, {Activation::swiglu, {}}, {Role::gate_up, Role::down}),
        describe(2, {Activation::swiglu_oai, {1.702f, 7}},
                 {Role::gate, Role::up, Role::down, Role::gate_bias, Role::up_bias, Role::down_bias}),
        describe(3, {Activation::geglu, {}},
                 {Role::gate_up, Role::down, Role::gate_up_bias, Role::up_scale, Role::down_scale}),
        describe(4, {Activation::situ, {4, 25}}, separate),
        describe(5, {Activation::swiglu_limited, {7, 0}}, separate),
        describe(6, {Activation::relu_squared, {}}, {Role::up, Role::down}),
        describe(kUnknown, {Activation::unknown, {}}, separate),
    };
    return model;
}

// Graphs like those of llama.cpp's build_moe_ffn(), with random data in the tensors that come from outside.
class BlockTest : public testing::Test {
  protected:
    void SetUp() override {
        context_.reset(ggml_init({.mem_size = 64u << 20, .mem_buffer = nullptr, .no_alloc = false}));
        graph_ = ggml_new_graph(context_.get());
        h = input(GGML_TYPE_F32, kEmbd, 1, kTokens);
        ids = ggml_new_tensor_2d(context_.get(), GGML_TYPE_I32, kUsed, kTokens);
        weights = input(GGML_TYPE_F32, 1, kUsed, kTokens);
    }

    ggml_tensor* input(ggml_type type, std::int64_t a, std::int64_t b, std::int64_t c) {
        ggml_tensor* t = ggml_new_tensor_3d(context_.get(), type, a, b, c);
        std::normal_distribution<float> normal;
        for (std::int64_t i = 0; i < ggml_nelements(t); ++i) { ggml_get_data_f32(t)[i] = normal(random_); }
        return t;
    }

    ggml_tensor* product(const std::string& name, std::int64_t in, std::int64_t out, ggml_tensor* rows) {
        ggml_tensor* weight = ggml_new_tensor_3d(context_.get(), GGML_TYPE_F32, in, out, kExperts);
        ggml_set_name(weight, name.c_str());
        return ggml_mul_mat_id(context_.get(), weight, rows, ids);
    }

    static std::string name(int layer, std::string_view what) {
        return "blk." + std::to_string(layer) + ".ffn_" + std::string(what) + "_exps.weight";
    }

    ggml_tensor* activated(int layer, bool merged) {
        ggml_context* c = context_.get();
        if (!merged) {
            ggml_tensor* up = product(name(layer, "up"), kEmbd, kFf, h);
            ggml_tensor* gate = product(name(layer, "gate"), kEmbd, kFf, h);
            return ggml_swiglu_split(c, gate, up);
        }
        ggml_tensor* both = product(name(layer, "gate_up"), kEmbd, 2 * kFf, h);
        const auto half = [&](std::size_t i) {
            return ggml_view_3d(c, both, kFf, both->ne[1], both->ne[2], both->nb[1], both->nb[2], i * kFf * 4);
        };
        return ggml_swiglu_split(c, half(0), half(1));
    }

    // down, and the weighted sum behind it.
    ggml_tensor* finish(int layer, ggml_tensor* rows) {
        ggml_context* c = context_.get();
        ggml_tensor* weighted = ggml_mul(c, product(name(layer, "down"), kFf, kEmbd, rows), weights);
        ggml_tensor* sum = nullptr;
        for (std::int64_t i = 0; i < kUsed; ++i) {
            ggml_tensor* view = ggml_view_2d(c, weighted, kEmbd, kTokens, weighted->nb[2], i * weighted->nb[1]);
            ggml_build_forward_expand(graph_, view);
            sum = sum == nullptr ? view : ggml_add(c, sum, view);
            ggml_build_forward_expand(graph_, sum);
        }
        return sum;
    }

    // A whole block of a described layer, as a worker would compute it.
    ggml_tensor* ffn(const model::MoeLayer& layer) {
        expert::FfnTensors tensors;
        for (const model::ExpertTensor& of : layer.tensors) {
            tensors[of.role] = input(GGML_TYPE_F32, of.ne[0], of.ne[1], of.ne[2]);
            ggml_set_name(tensors[of.role], of.name.c_str());
        }
        return expert::build_ffn(context_.get(), layer, tensors, h, ids);
    }

    Plan plan() { return finder_.plan(graph_, is_expert_weight); }

    // The products of layer 0 are one at a time.
    void expect_unknown(ggml_tensor* last) {
        ggml_build_forward_expand(graph_, last);
        const Plan found = plan();
        for (const Step& step : found.steps) { EXPECT_FALSE(step.block); }
        EXPECT_TRUE(found.unknown.contains(0));
    }

    const BlockFinder finder_{a_model()};
    std::mt19937 random_{3};
    ggml_context_ptr context_;
    ggml_cgraph* graph_ = nullptr;
    ggml_tensor* h = nullptr;
    ggml_tensor* ids = nullptr;
    ggml_tensor* weights = nullptr;
};

TEST_F(BlockTest, a_swiglu_block_is_found_with_its_inputs_and_its_sum) {
    for (const std::uint32_t layer : {0u, 1u}) {
        ggml_graph_clear(graph_);
        ggml_tensor* sum = finish(static_cast<int>(layer), activated(static_cast<int>(layer), layer == 1));
        const Plan found = plan();
        EXPECT_TRUE(found.unknown.empty());
        // The block, and behind it a MUL and the ADDs.
        ASSERT_EQ(found.steps.size(), 1u + kUsed);
        ASSERT_TRUE(found.steps[0].block);
        const Block& block = *found.steps[0].block;
        EXPECT_EQ(block.layer, layer);
        EXPECT_EQ(block.rows, h);
        EXPECT_EQ(block.ids, ids);
        EXPECT_EQ(block.weights, weights);
        EXPECT_EQ(block.n_summed, kUsed);
        EXPECT_EQ(block.sum, sum);
        EXPECT_EQ(found.steps[1].node->src[0], block.out);
        EXPECT_EQ(found.steps.back().node, sum);
    }
}

TEST_F(BlockTest, every_described_block_is_one_step) {
    for (const model::MoeLayer& layer : a_model().layers) {
        if (layer.layer == kUnknown) { continue; }
        for (const std::int64_t n_rows : {std::int64_t{1}, kUsed}) {
            ggml_graph_clear(graph_);
            h = input(GGML_TYPE_F32, kEmbd, n_rows, kTokens);  // weights first: rows that differ by expert
            ggml_tensor* out = ffn(layer);
            ggml_build_forward_expand(graph_, out);
            const Plan found = plan();
            ASSERT_EQ(found.steps.size(), 1u) << "layer " << layer.layer;
            ASSERT_TRUE(found.steps[0].block);
            EXPECT_EQ(found.steps[0].block->layer, layer.layer);
            EXPECT_EQ(found.steps[0].block->out, out);
            EXPECT_EQ(found.steps[0].block->rows, h);
            EXPECT_EQ(found.steps[0].block->weights, nullptr);
            for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
                EXPECT_TRUE(belongs_to_block(ggml_graph_node(graph_, i), is_expert_weight))
                    << ggml_op_desc(ggml_graph_node(graph_, i)) << " of layer " << layer.layer;
            }
        }
    }
}

TEST_F(BlockTest, two_layers_in_one_graph_are_two_blocks) {
    finish(0, activated(0, false));
    finish(1, activated(1, true));
    const Plan found = plan();
    ASSERT_EQ(found.steps.size(), 2u * (1 + kUsed));
    EXPECT_EQ(found.steps[0].block->layer, 0u);
    EXPECT_EQ(found.steps[1 + kUsed].block->layer, 1u);
}

TEST_F(BlockTest, another_tail_is_computed_here_and_never_taken_for_a_weighted_sum) {
    ggml_context* c = context_.get();
    ggml_tensor* down = product(name(0, "down"), kFf, kEmbd, activated(0, false));
    ggml_tensor* weighted = ggml_mul(c, down, weights);
    const auto view = [&](std::int64_t i) {
        return ggml_view_2d(c, weighted, kEmbd, kTokens, weighted->nb[2], i * weighted->nb[1]);
    };
    ggml_build_forward_expand(graph_, ggml_add(c, view(1), view(0)));  // not from left to right
    const Plan backwards = plan();
    ASSERT_TRUE(backwards.steps[0].block);
    EXPECT_EQ(backwards.steps[0].block->weights, nullptr);
    EXPECT_EQ(backwards.steps.size(), 3u);
    // Somebody else reads a row before it is summed: it must be computed.
    ggml_graph_clear(graph_);
    ggml_build_forward_expand(graph_, ggml_add(c, view(0), view(1)));
    ggml_build_forward_expand(graph_, ggml_sqr(c, view(1)));
    EXPECT_EQ(plan().steps[0].block->weights, nullptr);
}

TEST_F(BlockTest, what_differs_from_the_description_is_computed_one_product_at_a_time) {
    ggml_context* c = context_.get();
    ggml_tensor* up = product(name(0, "up"), kEmbd, kFf, h);
    ggml_tensor* gate = product(name(0, "gate"), kEmbd, kFf, h);
    const auto down_of = [&](ggml_tensor* rows) { return product(name(0, "down"), kFf, kEmbd, rows); };
    expect_unknown(down_of(ggml_geglu_split(c, gate, up)));
    ggml_graph_clear(graph_);
    expect_unknown(down_of(ggml_swiglu_split(c, up, gate)));  // gate and up swapped
    ggml_graph_clear(graph_);
    ggml_tensor* other_rows = product(name(0, "up"), kEmbd, kFf, input(GGML_TYPE_F32, kEmbd, 1, kTokens));
    expect_unknown(down_of(ggml_swiglu_split(c, gate, other_rows)));
    ggml_graph_clear(graph_);
    ggml_tensor* own_ids = ids;
    ids = ggml_new_tensor_2d(c, GGML_TYPE_I32, kUsed, kTokens);
    expect_unknown(down_of(ggml_swiglu_split(c, gate, up)));  // other experts for down
    ids = own_ids;
    ggml_graph_clear(graph_);
    ggml_tensor* clamped = ggml_swiglu_clamp(c, gate, up, 3);
    expect_unknown(down_of(clamped));
    ggml_graph_clear(graph_);
    ggml_tensor* twice = ggml_swiglu_split(c, gate, up);
    expect_unknown(down_of(ggml_add(c, twice, twice)));
}

// By a program that looks at every node, or reads one: computed in pieces, but nobody needs to be taught what it is.
TEST_F(BlockTest, a_block_in_pieces_is_computed_so_and_known) {
    ggml_context* c = context_.get();
    ggml_tensor* activated_rows = activated(0, false);
    ggml_tensor* down = product(name(0, "down"), kFf, kEmbd, activated_rows);
    ggml_build_forward_expand(graph_, ggml_sqr(c, activated_rows));
    ggml_build_forward_expand(graph_, down);
    const Plan read = plan();
    EXPECT_EQ(read.steps.size(), 5u);
    for (const Step& step : read.steps) { EXPECT_FALSE(step.block); }
    EXPECT_TRUE(read.unknown.empty());
    for (ggml_tensor* piece : {activated_rows, down}) {
        ggml_graph_clear(graph_);
        ggml_graph_add_node(graph_, piece);
        const Plan cut = plan();
        ASSERT_EQ(cut.steps.size(), 1u);
        EXPECT_EQ(cut.steps[0].node, piece);
        EXPECT_TRUE(cut.unknown.empty());
    }
}

TEST_F(BlockTest, parameters_are_part_of_the_description) {
    ggml_context* c = context_.get();
    ggml_tensor* up = product(name(5, "up"), kEmbd, kFf, h);
    ggml_tensor* gate = product(name(5, "gate"), kEmbd, kFf, h);
    for (const float limit : {7.0f, 6.0f}) {
        ggml_graph_clear(graph_);
        ggml_tensor* activated =
            ggml_mul(c, ggml_clamp(c, ggml_silu(c, gate), -INFINITY, limit), ggml_clamp(c, up, -limit, limit));
        ggml_build_forward_expand(graph_, product(name(5, "down"), kFf, kEmbd, activated));
        EXPECT_EQ(plan().steps.front().block.has_value(), limit == 7.0f);
    }
}

TEST_F(BlockTest, a_layer_that_nobody_has_described_is_named_by_its_nodes) {
    finish(kUnknown, activated(kUnknown, false));
    const Plan found = plan();
    for (const Step& step : found.steps) { EXPECT_FALSE(step.block); }
    ASSERT_TRUE(found.unknown.contains(kUnknown));
    const std::string& text = found.unknown.at(kUnknown);
    EXPECT_NE(text.find("MUL_MAT_ID(up of "), std::string::npos) << text;
    EXPECT_NE(text.find("SWIGLU"), std::string::npos) << text;
}

TEST_F(BlockTest, only_what_grows_out_of_experts_alone_belongs_to_a_block) {
    ggml_context* c = context_.get();
    ggml_tensor* sum = finish(0, activated(0, false));
    const auto belongs = [](const ggml_tensor* t) { return belongs_to_block(t, is_expert_weight); };
    EXPECT_TRUE(belongs(sum));
    ggml_tensor* residual = input(GGML_TYPE_F32, kEmbd, kTokens, 1);
    EXPECT_FALSE(belongs(ggml_add(c, sum, residual)));
    EXPECT_FALSE(belongs(ggml_add(c, residual, sum)));
    EXPECT_FALSE(belongs(ggml_mul(c, residual, sum)));
    EXPECT_FALSE(belongs(ggml_mul(c, sum, residual)));
    EXPECT_FALSE(belongs(ggml_scale(c, sum, 2)));
    EXPECT_FALSE(belongs(ggml_rms_norm(c, sum, 1e-5f)));
    EXPECT_FALSE(belongs(residual));
    EXPECT_FALSE(belongs(ggml_silu(c, residual)));
    EXPECT_FALSE(belongs(ggml_get_rows(c, residual, ggml_new_tensor_1d(c, GGML_TYPE_I32, 1))));
}

// While it loads, llama.cpp asks for a place for each tensor with an operation that has no past.
TEST_F(BlockTest, biases_and_scales_find_a_place) {
    ggml_context* c = context_.get();
    ggml_tensor* bias = input(GGML_TYPE_F32, kFf, kExperts, 1);
    ggml_tensor* rows = input(GGML_TYPE_F32, kFf, kUsed, kTokens);
    ggml_tensor* add = ggml_add_id(c, rows, bias, ids);
    EXPECT_FALSE(belongs_to_block(add, is_expert_weight));
    ggml_set_name(bias, "blk.2.ffn_up_exps.bias");
    EXPECT_TRUE(belongs_to_block(add, is_expert_weight));
    ggml_tensor* scale = input(GGML_TYPE_F32, kExperts, 1, 1);
    ggml_tensor* product_of_scale = ggml_mul_mat_id(c, scale, input(GGML_TYPE_F32, kExperts, kUsed, kTokens), ids);
    EXPECT_FALSE(belongs_to_block(product_of_scale, is_expert_weight));
    ggml_set_name(scale, "blk.2.ffn_up_exps.scale");
    EXPECT_TRUE(belongs_to_block(product_of_scale, is_expert_weight));
}

TEST_F(BlockTest, nodes_that_are_computed_here_have_the_bits_of_the_cpu_backend) {
    expert::load_backends();
    const ggml_backend_ptr cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    for (const model::MoeLayer& layer : a_model().layers) {
        if (layer.layer == kUnknown) { continue; }
        ggml_graph_clear(graph_);
        std::ranges::generate(std::span(static_cast<std::int32_t*>(ids->data), kUsed * kTokens),
                              [&] { return static_cast<std::int32_t>(random_() % kExperts); });
        ggml_tensor* weighted = ggml_mul(context_.get(), ffn(layer), weights);
        ggml_tensor* view = ggml_view_2d(context_.get(), weighted, kEmbd, kTokens, weighted->nb[2], weighted->nb[1]);
        ggml_tensor* last = ggml_add(context_.get(), view, view);
        ggml_build_forward_expand(graph_, last);
        ASSERT_EQ(ggml_backend_graph_compute(cpu.get(), graph_), GGML_STATUS_SUCCESS);
        const auto result = [&] {
            return std::vector<float>(ggml_get_data_f32(last), ggml_get_data_f32(last) + ggml_nelements(last));
        };
        const std::vector<float> expected = result();
        for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
            ggml_tensor* node = ggml_graph_node(graph_, i);
            if (node->view_src == nullptr) { std::memset(node->data, 0, ggml_nbytes(node)); }
        }
        CpuNodes nodes;
        for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
            const Status status = nodes.compute(ggml_graph_node(graph_, i));
            ASSERT_TRUE(status) << status.error().message;
        }
        EXPECT_EQ(result(), expected) << "layer " << layer.layer;
        EXPECT_NE(expected.front(), 0.0f);
    }
}

}  // namespace
}  // namespace linkcpp::coordinator
