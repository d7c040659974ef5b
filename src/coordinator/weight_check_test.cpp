#include "coordinator/weight_check.h"

#include <cstring>

#include <ggml-cpp.h>
#include <gtest/gtest.h>

#include "model/backbone_stamp.h"
#include "model/slicer.h"
#include "model/synth.h"
#include "model/test_model.h"

namespace linkcpp::coordinator {
namespace {

// Two models that differ in their bytes alone.
class WeightCheckTest : public testing::Test {
  protected:
    void SetUp() override {
        make("served.gguf", 1);
        make("other.gguf", 2);
        manifest_ = std::make_shared<const model::Manifest>(model::make_manifest(open("served.gguf")).value());
        check_ = std::make_unique<WeightCheck>(manifest_, 3);
    }

    void make(const char* name, std::uint32_t seed) {
        const model::SynthOptions options{
            .n_layer = 2, .n_expert = 8, .n_embd = 256, .n_ff = 256, .n_vocab = 512, .seed = seed};
        ASSERT_TRUE(model::write_synthetic_model(options, folder_ / name));
    }

    model::GgufFile open(const char* name) { return model::GgufFile::open(folder_ / name).value(); }

    // What llama.cpp does with a file's expert tensors, their bytes in pieces of `piece`.
    Status load(const char* name, std::size_t piece = SIZE_MAX) {
        const model::GgufFile file = open(name);
        const ggml_context_ptr context(ggml_init({.mem_size = 1u << 20, .mem_buffer = nullptr, .no_alloc = true}));
        for (const model::MoeLayer& layer : manifest_->model.layers) {
            for (const model::ExpertTensor& described : layer.tensors) {
                ggml_tensor* tensor = ggml_new_tensor_3d(context.get(), described.type, described.ne[0],
                                                         described.ne[1], described.ne[2]);
                ggml_set_name(tensor, described.name.c_str());
                LINKCPP_CHECK(check_->announce(tensor));
                Bytes bytes(ggml_nbytes(tensor));
                LINKCPP_CHECK(file.read(*file.find(described.name), 0, bytes));
                for (std::size_t at = 0; at < bytes.size(); at += std::min(piece, bytes.size())) {
                    const std::size_t n = std::min(piece, bytes.size() - at);
                    LINKCPP_CHECK(check_->add(described.name, at, ByteView(bytes).subspan(at, n)));
                }
            }
        }
        return {};
    }

    bool verified() const { return check_->verified(0).has_value() && check_->verified(1).has_value(); }

    TestFolder folder_;
    std::shared_ptr<const model::Manifest> manifest_;
    std::unique_ptr<WeightCheck> check_;
};

TEST_F(WeightCheckTest, the_model_that_is_served_is_verified_in_whatever_pieces_it_comes) {
    EXPECT_FALSE(verified());
    for (const std::size_t piece : {SIZE_MAX, std::size_t{100'000}, std::size_t{333}}) {
        ASSERT_TRUE(load("served.gguf", piece)) << piece;
        EXPECT_TRUE(verified()) << piece;
    }
    EXPECT_FALSE(check_->verified(2));
}

TEST_F(WeightCheckTest, another_model_of_the_same_shape_is_noticed) {
    EXPECT_EQ(load("other.gguf").error().kind, ErrorKind::invalid);
    EXPECT_FALSE(verified());
    ASSERT_TRUE(load("served.gguf"));
    EXPECT_EQ(load("other.gguf").error().kind, ErrorKind::invalid);  // loaded later in the same process
    EXPECT_FALSE(verified());
}

TEST_F(WeightCheckTest, a_backbone_is_known_by_its_stamp) {
    ASSERT_TRUE(model::write_backbone(open("served.gguf"), folder_ / "good.gguf"));
    ASSERT_TRUE(model::write_backbone(open("other.gguf"), folder_ / "bad.gguf"));
    ASSERT_TRUE(load("good.gguf"));
    EXPECT_TRUE(verified());
    EXPECT_EQ(load("bad.gguf").error().kind, ErrorKind::invalid);
    EXPECT_FALSE(verified());
}

TEST_F(WeightCheckTest, zeros_are_no_model) {
    for (const model::ExpertTensor& tensor : manifest_->model.layers[0].tensors) {
        const Bytes zeros(tensor.slab_bytes * 8);
        const Status status = check_->add(tensor.name, 0, zeros);
        EXPECT_EQ(status.has_value(), &tensor != &manifest_->model.layers[0].tensors.back());
    }
    EXPECT_FALSE(check_->verified(0));
}

TEST_F(WeightCheckTest, tensors_that_the_model_does_not_have_are_refused) {
    const ggml_context_ptr context(ggml_init({.mem_size = 1u << 20, .mem_buffer = nullptr, .no_alloc = true}));
    const auto error_of = [&](const char* name, std::int64_t n_ff, ggml_type type) {
        ggml_tensor* tensor = ggml_new_tensor_3d(context.get(), type, 256, n_ff, 8);
        ggml_set_name(tensor, name);
        const Status status = check_->announce(tensor);
        return status ? ErrorKind::failed : status.error().kind;
    };
    const ggml_type type = manifest_->model.layers[0].find(model::Role::up)->type;
    EXPECT_EQ(error_of("blk.0.ffn_up_exps.weight", 256, type), ErrorKind::failed);  // that is: no error
    EXPECT_EQ(error_of("blk.9.ffn_up_exps.weight", 256, type), ErrorKind::invalid);
    EXPECT_EQ(error_of("blk.0.ffn_up_exps.weight", 512, type), ErrorKind::invalid);
    EXPECT_EQ(error_of("blk.0.ffn_up_exps.weight", 256, GGML_TYPE_F32), ErrorKind::invalid);
    EXPECT_EQ(error_of("blk.0.ffn_up_exps.weight.lora_a", 256, type), ErrorKind::unsupported);
}

// A model that llama.cpp is about to load: its expert tensors, in the order in which it asks for them.
class Asking {
  public:
    ggml_tensor* add(const std::string& name, ggml_type type, const std::array<std::int64_t, 3>& ne) {
        ggml_tensor* tensor = ggml_new_tensor_3d(context_.get(), type, ne[0], ne[1], ne[2]);
        ggml_set_name(tensor, name.c_str());
        return tensor;
    }

  private:
    ggml_context_ptr context_{ggml_init({.mem_size = 1u << 20, .mem_buffer = nullptr, .no_alloc = true})};
};

TEST_F(WeightCheckTest, another_model_beside_the_served_one_stays_out_whatever_else_they_share) {
    Asking asking;
    const auto claim_served = [&] {
        for (const model::MoeLayer& layer : manifest_->model.layers) {
            for (const model::ExpertTensor& t : layer.tensors) {
                EXPECT_TRUE(check_->claims(asking.add(t.name, t.type, t.ne))) << t.name;
            }
        }
    };
    claim_served();
    ASSERT_TRUE(load("served.gguf"));
    const auto& tensors = manifest_->model.layers[0].tensors;
    // Its first tensor differs: so none is taken, not even one that looks the same.
    EXPECT_FALSE(check_->claims(asking.add(tensors[0].name, GGML_TYPE_F32, tensors[0].ne)));
    EXPECT_FALSE(check_->claims(asking.add(tensors[1].name, tensors[1].type, tensors[1].ne)));
    claim_served();
    // Its second one differs: the first has been taken by then, and the model must not be loaded.
    ggml_tensor* first = asking.add(tensors[0].name, tensors[0].type, tensors[0].ne);
    EXPECT_TRUE(check_->claims(first));
    EXPECT_FALSE(check_->claims(asking.add(tensors[1].name, GGML_TYPE_F32, tensors[1].ne)));
    const Status status = check_->announce(first);
    ASSERT_FALSE(status);
    EXPECT_NE(status.error().message.find("some experts like those"), std::string::npos) << status.error().message;
    EXPECT_TRUE(verified()) << "the served model is what it was";
    claim_served();
    EXPECT_FALSE(check_->claims(asking.add("blk.0.attn_q.weight", GGML_TYPE_F32, {1, 1, 1})));
}

TEST_F(WeightCheckTest, which_experts_are_looked_at_is_another_matter_in_every_process) {
    // A model that differs from the served one in a single expert of each layer.
    const model::GgufFile file = open("served.gguf");
    int n_noticed = 0;
    for (std::uint32_t salt = 0; salt < 8; ++salt) {
        WeightCheck check(manifest_, salt);
        bool noticed = false;
        for (const model::ExpertTensor& tensor : manifest_->model.layers[0].tensors) {
            Bytes bytes(tensor.slab_bytes * 8);
            ASSERT_TRUE(file.read(*file.find(tensor.name), 0, bytes));
            bytes[tensor.slab_bytes * 5] ^= std::byte{1};
            noticed = noticed || !check.add(tensor.name, 0, bytes);
        }
        n_noticed += noticed ? 1 : 0;
        EXPECT_NE(check.verified(0).has_value(), noticed);
    }
    EXPECT_EQ(n_noticed, 1);
}

TEST(BackboneStamp, round_trips_and_takes_nothing_else_for_one) {
    const model::BackboneStamp stamp{7, sha256(as_bytes("x"))};
    const auto bytes = encode(stamp);
    EXPECT_EQ(model::decode_backbone_stamp(bytes), stamp);
    EXPECT_EQ(model::decode_backbone_stamp(ByteView(bytes).first(bytes.size() - 1)), std::nullopt);
    EXPECT_EQ(model::decode_backbone_stamp(Bytes(100)), std::nullopt);
}

}  // namespace
}  // namespace linkcpp::coordinator
