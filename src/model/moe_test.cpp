#include "model/moe.h"

#include <gtest/gtest.h>

#include "model/test_model.h"

namespace linkcpp::model {
namespace {

using testing::TempFolder;
using testing::TinyModel;

Result<MoeModel> read(const TinyModel& model) {
    const TempFolder folder;
    auto file = GgufFile::open(folder.write("m.gguf", model.bytes()));
    if (!file) { return std::unexpected(file.error()); }
    return read_moe(*file);
}

Error error_of(const TinyModel& model) {
    auto moe = read(model);
    EXPECT_FALSE(moe) << "was accepted";
    return moe ? Error{} : moe.error();
}

// A tensor of a layer beyond those that the model writes itself.
void add(GgufWriter& writer, std::string_view name, ggml_type type, std::array<std::int64_t, 4> ne) {
    ASSERT_TRUE(writer.add_tensor(name, type, ne));
}

TEST(Moe, layers_shapes_and_bytes_are_read) {
    TinyModel model;
    model.n_layer = 3;
    model.first_moe_layer = 1;
    const auto moe = read(model);
    ASSERT_TRUE(moe) << moe.error().message;
    EXPECT_EQ(moe->architecture, "qwen3moe");
    EXPECT_EQ(moe->name, "tiny");
    EXPECT_EQ(moe->n_layer, 3);
    EXPECT_EQ(moe->n_embd, 64);
    ASSERT_EQ(moe->layers.size(), 2);
    EXPECT_EQ(moe->find(0), nullptr);
    const MoeLayer* layer = moe->find(2);
    ASSERT_NE(layer, nullptr);
    EXPECT_EQ(layer->n_expert, 4);
    EXPECT_EQ(layer->n_expert_used, 2);
    EXPECT_EQ(layer->n_ff, 32);
    ASSERT_EQ(layer->tensors.size(), 3);
    EXPECT_EQ(layer->tensors[0].role, Role::gate);
    EXPECT_EQ(layer->tensors[1].role, Role::up);
    EXPECT_EQ(layer->tensors[2].name, "blk.2.ffn_down_exps.weight");
    EXPECT_EQ(layer->find(Role::down)->slab_bytes, 64 * 34);
    EXPECT_EQ(layer->find(Role::gate_up), nullptr);
    EXPECT_EQ(layer->slice_bytes(), 2 * 64 * 32 * 2 + 64 * 34);
    EXPECT_EQ(moe->expert_bytes(), 8 * layer->slice_bytes());
    EXPECT_EQ(moe->n_slices(), 8);
}

TEST(Moe, merged_gate_and_up_are_read) {
    TinyModel model;
    model.architecture = "qwen35moe";
    model.merged = true;
    const auto moe = read(model);
    ASSERT_TRUE(moe) << moe.error().message;
    ASSERT_EQ(moe->layers[0].tensors.size(), 2);
    EXPECT_EQ(moe->layers[0].tensors[0].role, Role::gate_up);
    EXPECT_EQ(moe->layers[0].n_ff, 32);
}

TEST(Moe, experts_used_may_differ_between_layers) {
    GgufWriter other;
    other.add("general.architecture", "qwen3moe");
    other.add("qwen3moe.block_count", 2u);
    other.add("qwen3moe.embedding_length", 32u);
    other.add("qwen3moe.expert_count", 4u);
    other.add("qwen3moe.expert_used_count", std::vector<std::uint32_t>{1, 3});
    for (const char* block : {"blk.0.", "blk.1."}) {
        for (const char* name : {"ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"}) {
            add(other, std::string(block) + name, GGML_TYPE_F32, {32, 32, 4, 1});
        }
    }
    const TempFolder folder;
    const auto moe = read_moe(*GgufFile::open(folder.write("m.gguf", TinyModel::fill(other))));
    ASSERT_TRUE(moe) << moe.error().message;
    EXPECT_EQ(moe->layers[0].n_expert_used, 1);
    EXPECT_EQ(moe->layers[1].n_expert_used, 3);
}

TEST(Moe, dense_models_are_named_as_such) {
    TinyModel model;
    model.architecture = "llama";
    model.first_moe_layer = 2;
    const Error error = error_of(model);
    EXPECT_EQ(error.kind, ErrorKind::invalid);
    EXPECT_NE(error.message.find("without routed experts"), std::string::npos) << error.message;
}

TEST(Moe, other_expert_blocks_are_unsupported_and_named) {
    for (const char* architecture : {"gpt-oss", "llama4", "grok", "deepseek4", "no-such"}) {
        TinyModel model;
        model.architecture = architecture;
        const Error error = error_of(model);
        EXPECT_EQ(error.kind, ErrorKind::unsupported);
        EXPECT_NE(error.message.find(architecture), std::string::npos) << error.message;
    }
}

TEST(Moe, biases_and_scales_of_experts_are_unsupported) {
    for (const char* name :
         {"blk.1.ffn_up_exps.bias", "blk.0.ffn_down_exps.scale", "blk.0.ffn_gate_exps.input_scale"}) {
        TinyModel model;
        model.more_tensors = [&](GgufWriter& writer) { add(writer, name, GGML_TYPE_F32, {4, 1, 1, 1}); };
        const Error error = error_of(model);
        EXPECT_EQ(error.kind, ErrorKind::unsupported);
        EXPECT_NE(error.message.find(name), std::string::npos) << error.message;
    }
    // Arctic's norm before its experts belongs to the backbone.
    TinyModel model;
    model.architecture = "arctic";
    model.more_tensors = [&](GgufWriter& writer) {
        add(writer, "blk.0.ffn_norm_exps.weight", GGML_TYPE_F32, {64, 1, 1, 1});
    };
    EXPECT_TRUE(read(model));
}

TEST(Moe, one_tensor_for_each_expert_is_unsupported_with_advice) {
    TinyModel model;
    model.architecture = "llama";
    model.first_moe_layer = 2;
    model.more_tensors = [&](GgufWriter& writer) {
        add(writer, "blk.0.ffn_gate.0.weight", GGML_TYPE_F16, {64, 32, 1, 1});
    };
    const Error error = error_of(model);
    EXPECT_EQ(error.kind, ErrorKind::unsupported);
    EXPECT_NE(error.message.find("convert the model again"), std::string::npos) << error.message;
}

TEST(Moe, clamped_swiglu_is_unsupported) {
    TinyModel model;
    model.architecture = "step35";
    EXPECT_TRUE(read(model));
    model.more_keys = [](GgufWriter& writer) { writer.add("step35.swiglu_clamp_exp", 7.0f); };
    EXPECT_EQ(error_of(model).kind, ErrorKind::unsupported);
    model.more_keys = [](GgufWriter& writer) { writer.add("step35.swiglu_clamp_exp", 0.0f); };
    EXPECT_TRUE(read(model));
}

TEST(Moe, zero_or_too_many_experts_are_rejected) {
    TinyModel model;
    model.n_expert = 0;
    EXPECT_EQ(error_of(model).kind, ErrorKind::corrupt);
    model.n_expert = kMaxExperts + 1;
    model.n_embd = model.n_ff = 32;
    EXPECT_EQ(error_of(model).kind, ErrorKind::corrupt);
    model.n_expert = 4;
    for (const std::uint32_t n_expert_used : {0u, 5u}) {
        model.n_expert_used = n_expert_used;
        EXPECT_EQ(error_of(model).kind, ErrorKind::corrupt);
    }
}

TEST(Moe, shapes_that_do_not_fit_each_other_are_rejected) {
    struct Case {
        const char* name;
        std::array<std::int64_t, 4> ne;
    };
    const Case cases[] = {
        {"blk.1.ffn_up_exps.weight", {64, 33, 4, 1}},   {"blk.1.ffn_up_exps.weight", {96, 32, 4, 1}},
        {"blk.1.ffn_up_exps.weight", {64, 32, 3, 1}},   {"blk.1.ffn_up_exps.weight", {64, 32, 4, 2}},
        {"blk.1.ffn_down_exps.weight", {32, 65, 4, 1}}, {"blk.1.ffn_down_exps.weight", {64, 64, 4, 1}},
        {"blk.1.ffn_gate_exps.weight", {64, 0, 4, 1}},  {"blk.1.ffn_down_exps.weight", {0, 64, 4, 1}},
    };
    for (const Case& odd : cases) {
        TinyModel model;
        model.first_moe_layer = 2;
        model.more_tensors = [&](GgufWriter& writer) {
            const std::array<std::int64_t, 4> up{64, 32, 4, 1};
            const std::array<std::int64_t, 4> down{32, 64, 4, 1};
            for (const Role role : {Role::gate, Role::up, Role::down}) {
                const std::string name = expert_tensor_name(1, role);
                add(writer, name, GGML_TYPE_F16, name == odd.name ? odd.ne : role == Role::down ? down : up);
            }
        };
        const Error error = error_of(model);
        EXPECT_EQ(error.kind, ErrorKind::corrupt) << odd.name;
        EXPECT_NE(error.message.find("expected"), std::string::npos);
    }
}

TEST(Moe, incomplete_or_misplaced_layers_are_rejected) {
    TinyModel missing;
    missing.first_moe_layer = 1;
    missing.more_tensors = [](GgufWriter& writer) {
        add(writer, "blk.0.ffn_up_exps.weight", GGML_TYPE_F16, {64, 32, 4, 1});
    };
    EXPECT_EQ(error_of(missing).kind, ErrorKind::corrupt);
    TinyModel beyond;
    beyond.more_tensors = [](GgufWriter& writer) {
        add(writer, "blk.2.ffn_up_exps.weight", GGML_TYPE_F16, {64, 32, 4, 1});
    };
    EXPECT_EQ(error_of(beyond).kind, ErrorKind::corrupt);
    TinyModel both;
    both.more_tensors = [](GgufWriter& writer) {
        add(writer, "blk.0.ffn_gate_up_exps.weight", GGML_TYPE_F16, {64, 64, 4, 1});
    };
    EXPECT_EQ(error_of(both).kind, ErrorKind::corrupt);
    TinyModel integers;
    integers.type = GGML_TYPE_I32;
    EXPECT_EQ(error_of(integers).kind, ErrorKind::corrupt);
}

TEST(Moe, expert_tensor_names_are_parsed_strictly) {
    EXPECT_EQ(parse_expert_tensor_name("blk.7.ffn_gate_exps.weight")->layer, 7);
    EXPECT_EQ(parse_expert_tensor_name("blk.47.ffn_gate_up_exps.weight")->role, Role::gate_up);
    EXPECT_EQ(parse_expert_tensor_name("blk.0.ffn_down_exps.weight")->role, Role::down);
    for (const char* name :
         {"blk.7.ffn_gate_exps.bias", "blk.07.ffn_gate_exps.weight", "blk.-1.ffn_gate_exps.weight",
          "blk..ffn_gate_exps.weight", "blk.7.ffn_gate_shexp.weight", "xblk.7.ffn_gate_exps.weight",
          "blk.99999999999.ffn_up_exps.weight", "blk.7ffn_up_exps.weight", "blk.7.ffn_up_exps.weight ", "", "blk.7."}) {
        EXPECT_FALSE(parse_expert_tensor_name(name)) << name;
    }
    for (const Role role : {Role::gate, Role::up, Role::down, Role::gate_up}) {
        const auto parsed = parse_expert_tensor_name(expert_tensor_name(12, role));
        ASSERT_TRUE(parsed);
        EXPECT_EQ(parsed->role, role);
        EXPECT_EQ(parsed->layer, 12);
    }
}

}  // namespace
}  // namespace linkcpp::model
