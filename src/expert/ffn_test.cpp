#include "expert/ffn.h"

#include <random>

#include <gtest/gtest.h>

#include "expert/engine.h"
#include "expert/metrics.h"
#include "expert/reference.h"

namespace linkcpp::expert {
namespace {

using model::Activation;
using model::Role;

constexpr std::uint32_t kEmbd = 96;
constexpr std::uint32_t kFf = 64;
constexpr std::uint32_t kExperts = 4;
constexpr std::size_t kRows = 5;

struct Variant {
    const char* name;
    model::ActivationOf activation;
    std::vector<Role> roles;
};

void PrintTo(const Variant& variant, std::ostream* out) {
    *out << variant.name;
}

const std::vector<Role> kSeparate{Role::gate, Role::up, Role::down};
const std::vector<Role> kUngated{Role::up, Role::down};

// Every kind of FFN on the CPU, with weights in memory.
class FfnTest : public testing::TestWithParam<Variant> {
  protected:
    SliceSource source() {
        return [this](std::uint32_t, std::uint32_t e, std::span<std::byte> to) -> Status {
            std::ranges::copy(slice(e), to.begin());
            return {};
        };
    }

    void SetUp() override {
        layer_.n_expert = kExperts;
        layer_.n_expert_used = 2;
        layer_.n_embd = kEmbd;
        layer_.n_ff = kFf;
        layer_.activation = GetParam().activation;
        for (const Role role : GetParam().roles) {
            layer_.tensors.push_back({.role = role,
                                      .name = model::expert_tensor_name(0, role),
                                      .type = GGML_TYPE_F32,
                                      .ne = model::shape_of(layer_, role),
                                      .slab_bytes = model::slab_bytes_of(layer_, role, GGML_TYPE_F32).value()});
        }
        for (std::uint32_t e = 0; e < kExperts; ++e) { slices_.push_back(random(layer_.slice_bytes() / 4, 0.3f)); }
        rows_ = random(kRows * kEmbd, 2.0f);
        load_backends();
        engine_ = Engine::open(choose_device(devices(), "CPU").value(), 1).value();
        const std::vector<std::uint16_t> all{0, 1, 2, 3};
        const Status held = engine_->hold(0, layer_, all, source());
        ASSERT_TRUE(held) << held.error().message;
    }

    ByteView slice(std::uint32_t expert) const { return std::as_bytes(std::span(slices_[expert])); }

    std::vector<float> random(std::size_t n, float deviation) {
        std::normal_distribution<float> normal(0, deviation);
        std::vector<float> values(n);
        std::ranges::generate(values, [&] { return normal(random_); });
        return values;
    }

    std::mt19937 random_{11};  // NOLINT: the same numbers each time
    model::MoeLayer layer_;
    std::vector<std::vector<float>> slices_;
    std::vector<float> rows_;
    std::unique_ptr<Engine> engine_;
};

INSTANTIATE_TEST_SUITE_P(
    Kinds, FfnTest,
    testing::Values(
        Variant{"swiglu", {Activation::swiglu, {}}, kSeparate},
        Variant{"swiglu_merged", {Activation::swiglu, {}}, {Role::gate_up, Role::down}},
        Variant{"swiglu_merged_scaled_and_biased",
                {Activation::swiglu, {}},
                {Role::gate_up, Role::down, Role::gate_up_bias, Role::down_bias, Role::up_scale, Role::down_scale}},
        Variant{"swiglu_biased",
                {Activation::swiglu, {}},
                {Role::gate, Role::up, Role::down, Role::gate_bias, Role::up_bias, Role::down_bias}},
        Variant{"swiglu_scaled",
                {Activation::swiglu, {}},
                {Role::gate, Role::up, Role::down, Role::gate_scale, Role::up_scale, Role::down_scale}},
        Variant{"geglu", {Activation::geglu, {}}, kSeparate}, Variant{"reglu", {Activation::reglu, {}}, kSeparate},
        Variant{"swiglu_oai", {Activation::swiglu_oai, {1.702f, 7.0f}}, kSeparate},
        Variant{"swiglu_clamp", {Activation::swiglu_clamp, {3.0f, 0}}, kSeparate},
        Variant{"swiglu_limited", {Activation::swiglu_limited, {3.0f, 0}}, kSeparate},
        Variant{"situ", {Activation::situ, {4.0f, 25.0f}}, kSeparate},
        Variant{"situ_half", {Activation::situ, {4.0f, 0}}, kSeparate},
        Variant{"silu", {Activation::silu, {}}, kUngated}, Variant{"gelu", {Activation::gelu, {}}, kUngated},
        Variant{"relu", {Activation::relu, {}}, kUngated},
        Variant{"relu_squared", {Activation::relu_squared, {}}, kUngated}),
    [](const auto& param) { return std::string(param.param.name); });

TEST_P(FfnTest, agrees_with_double_precision) {
    for (std::uint16_t e = 0; e < kExperts; ++e) {
        const auto reference = ReferenceExpert::make(layer_, slice(e));
        ASSERT_TRUE(reference) << reference.error().message;
        for (std::uint16_t r = 0; r < kRows; ++r) {
            const std::span<const float> row = std::span(rows_).subspan(std::size_t{r} * kEmbd, kEmbd);
            std::vector<double> expected(kEmbd);
            reference->compute(std::vector<double>(row.begin(), row.end()), expected);
            std::vector<float> got(kEmbd);
            const std::vector<Pair> pair{{0, e, 0}};
            ASSERT_TRUE(engine_->compute_rows({0, 0, kEmbd, row, pair, {}}, got));
            const std::vector<double> got_double(got.begin(), got.end());
            const auto difference = compare(std::span<const double>(got_double), std::span<const double>(expected));
            // ggml looks GELU up in a table of 16-bit floats.
            EXPECT_LT(difference->nmse, 1e-6) << "expert " << e << ", row " << r;
        }
    }
}

// What is between the products is somebody else's here: done with ggml as well, the bits are those of the whole.
TEST_P(FfnTest, products_one_at_a_time_have_the_widths_of_their_weights) {
    const std::vector<Pair> pairs{{0, 3, 0}, {1, 0, 0}, {1, 3, 0}};
    for (const model::ExpertTensor& tensor : layer_.tensors) {
        const model::Widths widths = model::widths_of(layer_, tensor.role);
        if (!model::is_weight(tensor.role)) {
            EXPECT_EQ(widths.n_out, 0);
            continue;
        }
        const std::span<const float> rows = std::span(rows_).first(std::size_t{2} * widths.n_in);
        std::vector<float> got(pairs.size() * widths.n_out);
        const Status status = engine_->compute_rows({0, 0, widths.n_in, rows, pairs, tensor.role}, got);
        ASSERT_TRUE(status) << status.error().message;
        std::size_t offset = 0;
        for (const model::ExpertTensor& before : layer_.tensors) {
            if (before.role == tensor.role) { break; }
            offset += before.slab_bytes / 4;
        }
        for (std::size_t i = 0; i < pairs.size(); ++i) {
            const float* row = rows.data() + std::size_t{pairs[i].row} * widths.n_in;
            const float* matrix = slices_[pairs[i].expert].data() + offset;
            for (std::size_t j = 0; j < widths.n_out; ++j) {
                double sum = 0;
                for (std::size_t k = 0; k < widths.n_in; ++k) {
                    sum += static_cast<double>(matrix[j * widths.n_in + k]) * row[k];
                }
                ASSERT_NEAR(got[i * widths.n_out + j], sum, 1e-3);
            }
        }
        std::vector<float> sums(std::size_t{2} * widths.n_in);
        EXPECT_EQ(engine_->compute_sums({0, 0, widths.n_in, rows, pairs, tensor.role}, sums).error().kind,
                  ErrorKind::invalid);
    }
    std::vector<float> out(kEmbd);
    const std::vector<Pair> one{{0, 0, 0}};
    const std::span<const float> row = std::span(rows_).first(kEmbd);
    for (const auto role : {Role::down_bias, static_cast<Role>(99)}) {
        EXPECT_EQ(engine_->compute_rows({0, 0, kEmbd, row, one, role}, out).error().kind, ErrorKind::invalid);
    }
}

TEST_P(FfnTest, an_unknown_activation_is_held_for_its_products_alone) {
    model::MoeLayer unknown = layer_;
    unknown.activation = {Activation::unknown, {}};
    ASSERT_TRUE(engine_->hold(0, unknown, std::vector<std::uint16_t>{0}, source()));
    const std::vector<Pair> one{{0, 0, 0}};
    const std::span<const float> row = std::span(rows_).first(kEmbd);
    std::vector<float> out(kEmbd);
    EXPECT_EQ(engine_->compute_rows({0, 0, kEmbd, row, one, {}}, out).error().kind, ErrorKind::invalid);
    const Role first = layer_.tensors.front().role;
    std::vector<float> product(model::widths_of(layer_, first).n_out);
    EXPECT_TRUE(engine_->compute_rows({0, 0, kEmbd, row, one, first}, product));
}

}  // namespace
}  // namespace linkcpp::expert
