#include "coordinator/block.h"

#include <random>
#include <string>

#include <ggml-backend.h>
#include <ggml-cpp.h>
#include <gtest/gtest.h>

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

    Result<std::vector<Block>> find() { return find_blocks(graph_, is_expert_weight); }

    void expect_unsupported(ggml_tensor* last) {
        ggml_build_forward_expand(graph_, last);
        const auto blocks = find();
        ASSERT_FALSE(blocks);
        EXPECT_EQ(blocks.error().kind, ErrorKind::unsupported);
    }

    std::mt19937 random_{3};
    ggml_context_ptr context_;
    ggml_cgraph* graph_ = nullptr;
    ggml_tensor* h = nullptr;
    ggml_tensor* ids = nullptr;
    ggml_tensor* weights = nullptr;
};

TEST_F(BlockTest, a_swiglu_block_is_found_with_its_inputs_and_its_sum) {
    for (const bool merged : {false, true}) {
        ggml_graph_clear(graph_);
        ggml_tensor* sum = finish(7, activated(7, merged));
        const auto blocks = find();
        ASSERT_TRUE(blocks) << blocks.error().message;
        ASSERT_EQ(blocks->size(), 1u);
        const Block& block = blocks->front();
        EXPECT_EQ(block.layer, 7u);
        EXPECT_EQ(block.h, h);
        EXPECT_EQ(block.ids, ids);
        EXPECT_EQ(block.weights, weights);
        EXPECT_EQ(block.n_summed, kUsed);
        EXPECT_EQ(block.sum, sum);
    }
}

TEST_F(BlockTest, two_layers_in_one_graph_are_two_blocks) {
    finish(0, activated(0, false));
    finish(1, activated(1, true));
    const auto blocks = find();
    ASSERT_TRUE(blocks) << blocks.error().message;
    ASSERT_EQ(blocks->size(), 2u);
    EXPECT_EQ((*blocks)[0].layer, 0u);
    EXPECT_EQ((*blocks)[1].layer, 1u);
}

TEST_F(BlockTest, another_tail_is_computed_here_and_never_taken_for_a_weighted_sum) {
    ggml_context* c = context_.get();
    ggml_tensor* down = product(name(0, "down"), kFf, kEmbd, activated(0, false));
    ggml_tensor* weighted = ggml_mul(c, down, weights);
    const auto view = [&](std::int64_t i) {
        return ggml_view_2d(c, weighted, kEmbd, kTokens, weighted->nb[2], i * weighted->nb[1]);
    };
    ggml_build_forward_expand(graph_, ggml_add(c, view(1), view(0)));  // not from left to right
    const auto blocks = find();
    ASSERT_TRUE(blocks) << blocks.error().message;
    EXPECT_EQ(blocks->front().weights, nullptr);
    EXPECT_FALSE(blocks->front().tail.empty());
}

TEST_F(BlockTest, what_is_not_known_is_refused_not_computed_wrongly) {
    ggml_context* c = context_.get();
    ggml_tensor* up = product(name(0, "up"), kEmbd, kFf, h);
    ggml_tensor* gate = product(name(0, "gate"), kEmbd, kFf, h);
    expect_unsupported(product(name(0, "down"), kFf, kEmbd, ggml_geglu_split(c, gate, up)));
    ggml_graph_clear(graph_);
    expect_unsupported(product(name(0, "down"), kFf, kEmbd, ggml_swiglu_split(c, up, gate)));  // gate and up swapped
    ggml_graph_clear(graph_);
    expect_unsupported(ggml_swiglu_split(c, gate, up));  // no down: cut into pieces
    ggml_graph_clear(graph_);
    ggml_tensor* other_rows = product(name(0, "up"), kEmbd, kFf, input(GGML_TYPE_F32, kEmbd, 1, kTokens));
    expect_unsupported(product(name(0, "down"), kFf, kEmbd, ggml_swiglu_split(c, gate, other_rows)));
    ggml_graph_clear(graph_);
    h = input(GGML_TYPE_F32, kEmbd, kUsed, kTokens);  // rows that differ by expert
    expect_unsupported(finish(0, activated(0, false)));
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
    EXPECT_FALSE(belongs(ggml_rms_norm(c, sum, 1e-5f)));
    EXPECT_FALSE(belongs(residual));
}

TEST_F(BlockTest, the_tail_has_the_bits_of_the_cpu_backend) {
    ggml_tensor* sum = finish(0, activated(0, false));
    const auto blocks = find();
    ASSERT_TRUE(blocks) << blocks.error().message;
    const Block& block = blocks->front();
    std::normal_distribution<float> normal;
    const auto fill_down = [&](unsigned seed) {
        random_.seed(seed);
        for (std::int64_t i = 0; i < ggml_nelements(block.down); ++i) {
            ggml_get_data_f32(block.down)[i] = normal(random_);
        }
    };
    const auto result = [&] {
        return std::vector<float>(ggml_get_data_f32(sum), ggml_get_data_f32(sum) + ggml_nelements(sum));
    };
    fill_down(11);
    for (ggml_tensor* node : block.tail) { ASSERT_TRUE(compute_tail_node(node)); }
    const std::vector<float> ours = result();

    // The same nodes on the CPU backend, `down` taken as given.
    fill_down(11);
    ggml_cgraph* tail = ggml_new_graph(context_.get());
    block.down->op = GGML_OP_NONE;
    ggml_build_forward_expand(tail, sum);
    expert::load_backends();
    const ggml_backend_ptr cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    ASSERT_EQ(ggml_backend_graph_compute(cpu.get(), tail), GGML_STATUS_SUCCESS);
    EXPECT_EQ(ours, result());
    EXPECT_NE(ours.front(), 0.0f);
}

}  // namespace
}  // namespace linkcpp::coordinator
