#include "trust/truth.h"

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

#include "trust/test_layer.h"

namespace linkcpp::trust {
namespace {

using expert::Rounding;
using model::Role;
using testing::TestLayer;

Findings judge_rows(const TestLayer& layer, const ProbeInput& input, const ProbeRows& rows) {
    const auto findings = judge(layer.shard.layer, layer.shard.read, input, rows, {});
    EXPECT_TRUE(findings) << findings.error().message;
    return findings.value_or(Findings{});
}

// Where a role's slab begins in a slice.
std::size_t offset_of(const model::MoeLayer& layer, Role role) {
    std::size_t offset = 0;
    for (const model::ExpertTensor& tensor : layer.tensors) {
        if (tensor.role == role) { return offset; }
        offset += tensor.slab_bytes;
    }
    ADD_FAILURE() << "no such weight";
    return 0;
}

// A layer of the real shape, probed once.
class RealShape : public ::testing::Test {
  protected:
    static void SetUpTestSuite() { layer_ = new TestLayer(TestLayer::real_shape()); }
    static void TearDownTestSuite() {
        delete layer_;
        layer_ = nullptr;
    }

    // What is found when the engine holds the slices as `change` has left them.
    Findings after(const std::function<void(std::uint32_t, Bytes&)>& change) const {
        return judge_rows(*layer_, input_, layer_->rows(input_, change));
    }
    // The same of the first expert alone.
    Findings after_in_first(const std::function<void(std::uint32_t, Bytes&)>& change) const {
        return judge(layer_->shard.layer, layer_->shard.read, input_, layer_->rows(input_, change), {.n_experts = 1})
            .value();
    }

    static TestLayer* layer_;  // NOLINT: of the whole suite
    ProbeInput input_ = layer_->input();
    std::uint16_t victim_ = input_.pairs.at(5).expert;
    std::uint16_t first_ = input_.pairs.at(0).expert;
};
TestLayer* RealShape::layer_ = nullptr;  // NOLINT

TEST_F(RealShape, an_honest_device_passes_under_its_own_rounding) {
    const Findings findings = after([](std::uint32_t, Bytes&) {});
    EXPECT_TRUE(findings.passed()) << findings.why();
    EXPECT_EQ(findings.why(), "");
    ASSERT_EQ(findings.parts.size(), 7u);
    for (const auto& [part, rounding] : findings.roundings()) {
        EXPECT_EQ(rounding.input, Rounding::q8_k) << to_string(part);
    }
}

TEST_F(RealShape, a_wrong_expert_is_found) {
    const Bytes other = layer_->slice(victim_ == 0 ? 1 : 0);
    const Findings findings = after([&](std::uint32_t expert, Bytes& slice) {
        if (expert == victim_) { slice = other; }
    });
    EXPECT_FALSE(findings.passed());
    EXPECT_EQ(findings.parts.at(Part::batch).worst_expert, victim_);
}

TEST_F(RealShape, gate_and_up_swapped_are_found) {
    const std::size_t gate = offset_of(layer_->shard.layer, Role::gate);
    const std::size_t up = offset_of(layer_->shard.layer, Role::up);
    const std::size_t n = layer_->shard.layer.find(Role::up)->slab_bytes;
    const Findings findings = after([&](std::uint32_t, Bytes& slice) {
        std::swap_ranges(slice.begin() + static_cast<std::ptrdiff_t>(gate),
                         slice.begin() + static_cast<std::ptrdiff_t>(gate + n),
                         slice.begin() + static_cast<std::ptrdiff_t>(up));
    });
    EXPECT_EQ(findings.parts.at(Part::batch).n_wrong, input_.n_pairs());
    EXPECT_EQ(findings.parts.at(Part::gate).n_wrong, input_.n_pairs());
    EXPECT_EQ(findings.parts.at(Part::down).n_wrong, 0u);
}

// The same expert of an older file, of which one tensor alone has changed since.
TEST_F(RealShape, a_stale_slice_is_found) {
    const TestLayer older(TestLayer::real_shape(), 2);
    const std::size_t down = offset_of(layer_->shard.layer, Role::down);
    const Findings findings = after([&](std::uint32_t expert, Bytes& slice) {
        if (expert != victim_) { return; }
        const Bytes old = older.slice(expert);
        std::copy(old.begin() + static_cast<std::ptrdiff_t>(down), old.end(),
                  slice.begin() + static_cast<std::ptrdiff_t>(down));
    });
    EXPECT_FALSE(findings.passed());
    EXPECT_EQ(findings.parts.at(Part::gate).n_wrong, 0u);
    EXPECT_EQ(findings.parts.at(Part::down).worst_expert, victim_);
}

// In some rows of one part, while all others are right.
void plant_faults(std::vector<float>& rows, std::size_t n) {
    const auto row = [&](std::size_t i) { return std::span(rows).subspan(i * n, n); };
    std::ranges::rotate(row(0), row(0).begin() + 1);
    std::ranges::swap_ranges(row(1), row(2));
    float& largest = *std::ranges::max_element(row(3), {}, [](float x) { return std::abs(x); });
    largest = -largest;
    row(4)[7] = NAN;
    std::ranges::fill(row(5), 0.0f);
    for (float& x : row(6)) { x *= 1.03f; }
}
constexpr std::size_t kFaultyRows = 7;

TEST_F(RealShape, rows_that_are_shifted_exchanged_scaled_lost_or_of_a_wrong_sign_are_found) {
    const ProbeInput input = layer_->input(1, 8);
    const ProbeRows honest = layer_->rows(input);
    ProbeRows faulty = honest;
    for (auto& [part, rows] : faulty) {
        if (part != Part::sums) { plant_faults(rows, shape_of(part, layer_->shard.layer, input).n); }
    }
    const Findings findings = judge_rows(*layer_, input, faulty);
    for (const auto& [part, its] : findings.parts) {
        if (part != Part::sums) { EXPECT_GE(its.n_wrong, kFaultyRows) << to_string(part); }
    }
    ProbeRows sums = honest;
    plant_faults(sums.at(Part::sums), 3072);
    const Findings of_sums = judge_rows(*layer_, input, sums);
    EXPECT_FALSE(of_sums.passed());
    EXPECT_EQ(of_sums.parts.at(Part::sums).n_wrong, kFaultyRows);
    EXPECT_EQ(of_sums.parts.at(Part::batch).n_wrong, 0u);
}

// The quants of one block, scale and all else as they were: of the faults that bytes can have, the smallest that
// counts.
TEST_F(RealShape, one_corrupted_block_is_found_in_every_weight_and_wherever_it_is) {
    std::mt19937 random(9);  // NOLINT: the same places each time
    const model::MoeLayer& layer = layer_->shard.layer;
    for (const auto& [role, part] :
         {std::pair{Role::gate, Part::gate}, {Role::up, Part::up}, {Role::down, Part::down}}) {
        const model::ExpertTensor& tensor = *layer.find(role);
        const std::size_t block = ggml_type_size(tensor.type);
        // Q4_K: two scales and 12 bytes of small ones come first. Q6_K: the quants come first.
        const std::size_t quants = tensor.type == GGML_TYPE_Q4_K ? 16 : 0;
        const std::size_t n_quants = tensor.type == GGML_TYPE_Q4_K ? 128 : 192;
        for (int round = 0; round < 2; ++round) {
            const std::size_t place = random() % (tensor.slab_bytes / block) * block;
            const Findings findings = after_in_first([&](std::uint32_t expert, Bytes& slice) {
                if (expert != first_) { return; }
                const std::size_t at = offset_of(layer, role) + place + quants;
                for (std::size_t i = 0; i < n_quants; ++i) { slice[at + i] = static_cast<std::byte>(random()); }
            });
            EXPECT_FALSE(findings.passed()) << to_string(role) << " at " << place;
            // In a row that has next to nothing to multiply that block with it does not show.
            EXPECT_GE(findings.parts.at(part).n_wrong, findings.parts.at(part).n_rows / 2);
        }
    }
}

// Why the reference rounds as the device does: without that the same fault drowns in the rounding.
TEST_F(RealShape, against_the_plain_reference_a_corrupted_block_would_hide) {
    const std::size_t place = offset_of(layer_->shard.layer, Role::gate) + 1000 * ggml_type_size(GGML_TYPE_Q4_K) + 16;
    const auto corrupt = [&](std::uint32_t, Bytes& slice) {
        for (std::size_t i = 0; i < 128; ++i) { slice[place + i] ^= std::byte{0x5a}; }
    };
    const ProbeRows honest = layer_->rows(input_);
    const ProbeRows corrupted = layer_->rows(input_, corrupt);
    const ProbeRows plain = run_reference(layer_->shard.layer, layer_->shard.read, input_, {}, 0).value();
    const auto apart = [&](const ProbeRows& rows) {
        return expert::compare(std::span<const float>(rows.at(Part::batch)),
                               std::span<const float>(plain.at(Part::batch)))
            ->relative_l2;
    };
    EXPECT_GT(apart(honest), 0.01);
    EXPECT_LT(apart(corrupted), 1.5 * apart(honest)) << "of all rows: every expert is corrupted, and nothing shows";
    const Findings findings = judge_rows(*layer_, input_, corrupted);
    EXPECT_GT(findings.parts.at(Part::gate).n_wrong, input_.n_pairs() * 9 / 10)
        << "of each row, under its own rounding";
}

TEST(Truth, the_reference_agrees_with_itself_under_every_rounding) {
    for (const ggml_type type :
         {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q4_1, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K}) {
        const TestLayer layer(TestLayer::small(type));
        const ProbeInput input = layer.input(3, 4);
        for (const Rounding rounding : expert::kRoundings) {
            if (!ggml_is_quantized(type) && rounding > Rounding::bf16) { continue; }
            const ProbeRows rows =
                run_reference(layer.shard.layer, layer.shard.read, input, {rounding, rounding}, 2).value();
            const Findings findings = judge_rows(layer, input, rows);
            EXPECT_TRUE(findings.passed())
                << ggml_type_name(type) << " " << to_string(rounding) << " " << findings.why();
        }
    }
}

TEST(Truth, the_engine_is_right_for_every_family_of_types) {
    for (const ggml_type type :
         {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,
          GGML_TYPE_Q8_0, GGML_TYPE_Q2_K, GGML_TYPE_Q3_K, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K,
          GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS, GGML_TYPE_MXFP4}) {
        const TestLayer layer(TestLayer::small(type));
        const ProbeInput input = layer.input(3, 12);
        const Findings findings = judge_rows(layer, input, layer.rows(input));
        EXPECT_TRUE(findings.passed()) << ggml_type_name(type) << ": " << findings.why();
    }
}

TEST(Truth, rows_that_are_missing_or_too_short) {
    const TestLayer layer(TestLayer::small(GGML_TYPE_F32));
    const ProbeInput input = layer.input();
    ProbeRows rows = layer.rows(input);
    rows.at(Part::single).pop_back();
    EXPECT_EQ(judge(layer.shard.layer, layer.shard.read, input, rows, {}).error().kind, ErrorKind::invalid);
    rows.erase(Part::single);
    EXPECT_EQ(judge(layer.shard.layer, layer.shard.read, input, rows, {}).error().kind, ErrorKind::invalid);
}

}  // namespace
}  // namespace linkcpp::trust
