#include "model/moe.h"

#include <gtest/gtest.h>

#include "model/test_model.h"

namespace linkcpp::model {
namespace {

using testing::TinyModel;

Result<MoeModel> read(const TinyModel& model) {
    const TestFolder folder;
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
    const TestFolder folder;
    const auto moe = read_moe(*GgufFile::open(folder.write("m.gguf", TinyModel::fill(other))));
    ASSERT_TRUE(moe) << moe.error().message;
    EXPECT_EQ(moe->layers[0].n_expert_used, 1);
    EXPECT_EQ(moe->layers[1].n_expert_used, 3);
}

TEST(Moe, parameters_that_no_formula_takes_make_an_unknown_activation) {
    TinyModel model;
    for (const float value : {0.0f, -1.0f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
        model.architecture = "kimi-k3";
        model.more_keys = [&](GgufWriter& writer) { writer.add("kimi-k3.activation.situ_beta", value); };
        EXPECT_EQ(read(model)->layers[0].activation, (ActivationOf{Activation::unknown, {}})) << value;
    }
    model.architecture = "deepseek4";
    model.more_keys = [](GgufWriter& writer) {
        writer.add("deepseek4.swiglu_clamp_exp", std::numeric_limits<float>::infinity());
    };
    EXPECT_EQ(read(model)->layers[0].activation.kind, Activation::unknown);
}

TEST(Moe, types_that_nothing_multiplies_by_are_no_weights) {
    TinyModel model;
    model.n_embd = model.n_ff = 256;
    const MoeModel good = read(model).value();
    for (const auto type : {GGML_TYPE_Q8_1, GGML_TYPE_Q8_K, GGML_TYPE_I32, GGML_TYPE_F64}) {
        MoeModel bad = good;
        bad.layers[0].tensors[0].type = type;
        bad.layers[0].tensors[0].slab_bytes =
            slab_bytes_of(bad.layers[0], bad.layers[0].tensors[0].role, type).value_or(1);
        EXPECT_EQ(check(bad).error().kind, ErrorKind::corrupt) << static_cast<int>(type);
    }
}

TEST(Moe, dense_models_are_named_as_such) {
    TinyModel model;
    model.architecture = "llama";
    model.first_moe_layer = 2;
    const Error error = error_of(model);
    EXPECT_EQ(error.kind, ErrorKind::invalid);
    EXPECT_NE(error.message.find("without routed experts"), std::string::npos) << error.message;
}

TEST(Moe, the_activation_follows_the_architecture) {
    struct Case {
        const char* architecture;
        bool merged;
        ActivationOf expected;
    };
    const Case cases[] = {
        {"qwen3moe", false, {Activation::swiglu, {}}},
        {"qwen35moe", true, {Activation::swiglu, {}}},
        {"gemma4", true, {Activation::geglu, {}}},
        {"grok", false, {Activation::geglu, {}}},
        {"smallthinker", false, {Activation::reglu, {}}},
        {"gpt-oss", false, {Activation::swiglu_oai, {1.702f, 7.0f}}},
        {"kimi-k3", false, {Activation::situ, {1.0f, 0.0f}}},
        {"nemotron_h_moe", false, {Activation::unknown, {}}},  // with a gate: nobody has seen one
        {"of-next-month", false, {Activation::swiglu, {}}},
    };
    for (const Case& of : cases) {
        TinyModel model;
        model.architecture = of.architecture;
        model.merged = of.merged;
        const auto moe = read(model);
        ASSERT_TRUE(moe) << moe.error().message;
        EXPECT_EQ(moe->layers[0].activation, of.expected) << of.architecture;
        EXPECT_FALSE(moe->layers[0].weights_first);
    }
    TinyModel llama4;
    llama4.architecture = "llama4";
    EXPECT_TRUE(read(llama4)->layers[0].weights_first);
}

TEST(Moe, experts_without_a_gate_are_read) {
    for (const auto& [architecture, expected] : {std::pair{"nemotron_h_moe", Activation::relu_squared},
                                                 {"nomic-bert-moe", Activation::gelu},
                                                 {"of-next-month", Activation::silu}}) {
        TinyModel model;
        model.architecture = architecture;
        model.first_moe_layer = 2;
        model.more_tensors = [](GgufWriter& writer) {
            add(writer, "blk.0.ffn_up_exps.weight", GGML_TYPE_F16, {48, 32, 4, 1});
            add(writer, "blk.0.ffn_down_exps.weight", GGML_TYPE_F16, {32, 48, 4, 1});
        };
        const auto moe = read(model);
        ASSERT_TRUE(moe) << moe.error().message;
        EXPECT_EQ(moe->layers[0].activation.kind, expected);
        EXPECT_EQ(moe->layers[0].n_embd, 48) << "experts may work on a latent narrower than the model's rows";
    }
}

TEST(Moe, clamps_are_read_for_each_layer) {
    TinyModel model;
    model.architecture = "step35";
    EXPECT_EQ(read(model)->layers[0].activation.kind, Activation::swiglu);
    model.more_keys = [](GgufWriter& writer) { writer.add("step35.swiglu_clamp_exp", 7.0f); };
    EXPECT_EQ(read(model)->layers[1].activation, (ActivationOf{Activation::swiglu_limited, {7.0f, 0.0f}}));
    model.more_keys = [](GgufWriter& writer) { writer.add("step35.swiglu_clamp_exp", 0.0f); };
    EXPECT_EQ(read(model)->layers[0].activation.kind, Activation::swiglu);
    model.architecture = "deepseek4";
    model.more_keys = [](GgufWriter& writer) { writer.add("deepseek4.swiglu_clamp_exp", 10.0f); };
    EXPECT_EQ(read(model)->layers[0].activation, (ActivationOf{Activation::swiglu_clamp, {10.0f, 0.0f}}));
    model.architecture = "dflash";
    model.more_keys = [](GgufWriter& writer) { writer.add("dflash.swiglu_clamp_exp", 10.0f); };
    EXPECT_EQ(read(model)->layers[0].activation.kind, Activation::swiglu_limited);
    model.more_keys = [](GgufWriter& writer) {
        writer.add("dflash.swiglu_clamp_exp", 10.0f);
        writer.add("dflash.hyper_connection.count", 4u);
    };
    EXPECT_EQ(read(model)->layers[0].activation.kind, Activation::swiglu_clamp);
}

TEST(Moe, biases_and_scales_belong_to_the_slices) {
    TinyModel model;
    model.architecture = "gpt-oss";
    model.more_tensors = [](GgufWriter& writer) {
        add(writer, "blk.0.ffn_gate_exps.bias", GGML_TYPE_F32, {32, 4, 1, 1});
        add(writer, "blk.0.ffn_up_exps.bias", GGML_TYPE_F32, {32, 4, 1, 1});
        add(writer, "blk.0.ffn_down_exps.bias", GGML_TYPE_F32, {64, 4, 1, 1});
        add(writer, "blk.1.ffn_down_exps.scale", GGML_TYPE_F32, {4, 1, 1, 1});  // which its graph does not use
    };
    auto moe = read(model);
    ASSERT_TRUE(moe) << moe.error().message;
    EXPECT_EQ(moe->layers[1].tensors.size(), 3);
    const MoeLayer& biased = moe->layers[0];
    ASSERT_EQ(biased.tensors.size(), 6);
    EXPECT_EQ(biased.tensors[3].role, Role::gate_bias);
    EXPECT_EQ(biased.find(Role::down_bias)->slab_bytes, 64 * 4);
    EXPECT_EQ(biased.slice_bytes(), 2 * 64 * 32 * 2 + 64 * 34 + (32 + 32 + 64) * 4);
    model.architecture = "of-next-month";
    moe = read(model);
    ASSERT_TRUE(moe) << moe.error().message;
    EXPECT_EQ(moe->layers[1].find(Role::down_scale)->slab_bytes, 4);
    model.architecture = "qwen3moe";
    EXPECT_EQ(read(model)->layers[0].tensors.size(), 3);
    model.merged = true;  // a scale of a gate that is not there
    model.more_tensors = [](GgufWriter& writer) {
        add(writer, "blk.0.ffn_gate_exps.scale", GGML_TYPE_F32, {4, 1, 1, 1});
        add(writer, "blk.0.ffn_up_exps.scale", GGML_TYPE_F32, {4, 1, 1, 1});
    };
    EXPECT_EQ(read(model)->layers[0].tensors.size(), 3);
    EXPECT_NE(read(model)->layers[0].find(Role::up_scale), nullptr);
}

TEST(Moe, biases_and_scales_that_do_not_fit_are_rejected) {
    struct Case {
        const char* name;
        ggml_type type;
        std::array<std::int64_t, 4> ne;
    };
    const Case cases[] = {
        {"blk.0.ffn_gate_exps.bias", GGML_TYPE_F16, {32, 4, 1, 1}},
        {"blk.0.ffn_gate_exps.bias", GGML_TYPE_F32, {33, 4, 1, 1}},
        {"blk.0.ffn_gate_exps.bias", GGML_TYPE_F32, {32, 5, 1, 1}},
        {"blk.0.ffn_gate_exps.bias", GGML_TYPE_F32, {32, 4, 2, 1}},
        {"blk.0.ffn_up_exps.scale", GGML_TYPE_F32, {5, 1, 1, 1}},
        {"blk.0.ffn_up_exps.scale", GGML_TYPE_F32, {4, 4, 1, 1}},
    };
    for (const Case& odd : cases) {
        TinyModel model;
        model.architecture = "of-next-month";
        model.more_tensors = [&](GgufWriter& writer) { add(writer, odd.name, odd.type, odd.ne); };
        EXPECT_EQ(error_of(model).kind, ErrorKind::corrupt) << odd.name;
    }
}

TEST(Moe, a_second_set_of_experts_is_a_layer_of_its_own) {
    TinyModel model;
    model.architecture = "grovemoe";
    model.n_expert_used = 3;
    model.more_tensors = [](GgufWriter& writer) {
        add(writer, "blk.1.ffn_gate_chexps.weight", GGML_TYPE_F16, {64, 16, 2, 1});
        add(writer, "blk.1.ffn_up_chexps.weight", GGML_TYPE_F16, {64, 16, 2, 1});
        add(writer, "blk.1.ffn_down_chexps.weight", GGML_TYPE_F16, {16, 64, 2, 1});
    };
    const auto moe = read(model);
    ASSERT_TRUE(moe) << moe.error().message;
    ASSERT_EQ(moe->layers.size(), 3);
    const MoeLayer* second = moe->find(1 + kSecondSet);
    ASSERT_NE(second, nullptr);
    EXPECT_EQ(second->n_expert, 2);
    EXPECT_EQ(second->n_expert_used, 2);
    EXPECT_EQ(second->n_ff, 16);
    EXPECT_EQ(second->tensors[2].name, "blk.1.ffn_down_chexps.weight");
    EXPECT_EQ(layer_name(second->layer), "1, second set");
}

TEST(Moe, other_tensors_beside_the_experts_are_the_backbone_s) {
    TinyModel model;
    model.architecture = "arctic";
    model.more_tensors = [&](GgufWriter& writer) {
        add(writer, "blk.0.ffn_norm_exps.weight", GGML_TYPE_F32, {64, 1, 1, 1});
        add(writer, "blk.0.ffn_gate_exps.input_scale", GGML_TYPE_F32, {4, 1, 1, 1});
    };
    const auto moe = read(model);
    ASSERT_TRUE(moe) << moe.error().message;
    EXPECT_EQ(moe->layers[0].tensors.size(), 3);
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
         {"blk.7.ffn_gate_exps.input_scale", "blk.7.ffn_gate_up_exps.scale", "blk.7.ffn_gate_exps",
          "blk.07.ffn_gate_exps.weight", "blk.-1.ffn_gate_exps.weight", "blk..ffn_gate_exps.weight",
          "blk.7.ffn_gate_shexp.weight", "xblk.7.ffn_gate_exps.weight", "blk.99999999999.ffn_up_exps.weight",
          "blk.7ffn_up_exps.weight", "blk.7.ffn_up_exps.weight ", "", "blk.7."}) {
        EXPECT_FALSE(parse_expert_tensor_name(name)) << name;
    }
    for (std::uint32_t number = 1; number <= kMaxRole; ++number) {
        for (const std::uint32_t layer : {12u, 12 + kSecondSet}) {
            const auto role = static_cast<Role>(number);
            const auto parsed = parse_expert_tensor_name(expert_tensor_name(layer, role));
            ASSERT_TRUE(parsed);
            EXPECT_EQ(parsed->role, role);
            EXPECT_EQ(parsed->layer, layer);
        }
    }
}

}  // namespace
}  // namespace linkcpp::model
