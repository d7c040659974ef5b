#include "trust/ruling.h"

#include <numeric>

#include <gtest/gtest.h>

#include "expert/half.h"
#include "trust/test_layer.h"

namespace linkcpp::trust {
namespace {

using testing::TestLayer;

// Pairs of a probe as the CPU computes them, and the slices that they went through.
struct Pairs {
    explicit Pairs(ggml_type type) : layer(TestLayer::small(type)), input(layer.input()), rows(layer.rows(input)) {}

    std::span<const float> in(std::size_t i) const { return row_of(Part::batch, i, layer.shard.layer, input).input; }
    std::vector<float> out(std::size_t i) const {
        const std::size_t n = layer.shard.layer.n_embd;
        const auto begin = rows.at(Part::batch).begin() + static_cast<std::ptrdiff_t>(i * n);
        return {begin, begin + static_cast<std::ptrdiff_t>(n)};
    }
    Bytes slice(std::size_t i) const { return layer.slice(input.pairs[i].expert); }

    // What is said of `row` as the result of pair i.
    RowFit rule_on(std::size_t i, std::span<const float> row) const {
        const Bytes bytes = slice(i);
        const std::array terms{Term{bytes}};
        const std::array claims{row};
        return rule(layer.shard.layer, terms, {{}, in(i)}, claims).value().front();
    }

    TestLayer layer;
    ProbeInput input;
    ProbeRows rows;
};

class RulingTest : public ::testing::TestWithParam<ggml_type> {};

TEST_P(RulingTest, what_the_cpu_computes_is_right_and_what_differs_from_it_is_not) {
    const Pairs pairs(GetParam());
    const std::vector<float> right = pairs.out(0);
    EXPECT_TRUE(pairs.rule_on(0, right).holds) << to_string(pairs.rule_on(0, right));
    std::vector<float> sign = right;
    auto& largest = *std::ranges::max_element(sign, {}, [](float x) { return std::abs(x); });
    largest = -largest;
    std::vector<float> none(right.size(), 0.0f);
    std::vector<float> nan = right;
    nan[7] = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> shifted(right.begin() + 1, right.end());
    shifted.push_back(right.front());
    std::vector<float> longer = right;
    for (float& x : longer) { x *= 1.5f; }
    for (const auto& wrong : {sign, none, nan, shifted, longer, pairs.out(1)}) {
        EXPECT_FALSE(pairs.rule_on(0, wrong).holds) << to_string(pairs.rule_on(0, wrong));
    }
}

TEST_P(RulingTest, each_of_two_claims_is_judged_by_itself) {
    const Pairs pairs(GetParam());
    const Bytes bytes = pairs.slice(0);
    const std::array terms{Term{bytes}};
    const std::vector<float> right = pairs.out(0);
    const std::vector<float> wrong = pairs.out(1);
    const std::array<std::span<const float>, 2> claims{wrong, right};
    const auto fits = rule(pairs.layer.shard.layer, terms, {{}, pairs.in(0)}, claims).value();
    EXPECT_FALSE(fits[0].holds);
    EXPECT_TRUE(fits[1].holds);
}

TEST_P(RulingTest, sums_are_right_when_all_their_terms_are) {
    const Pairs pairs(GetParam());
    const std::array bytes{pairs.slice(0), pairs.slice(1)};  // of one token
    ASSERT_EQ(pairs.in(0).data(), pairs.in(1).data());
    const std::array terms{Term{bytes[0], 0.75f}, Term{bytes[1], -0.25f}};
    std::vector<float> sum(pairs.out(0).size());
    for (std::size_t i = 0; i < sum.size(); ++i) { sum[i] = 0.75f * pairs.out(0)[i] - 0.25f * pairs.out(1)[i]; }
    std::vector<float> without(sum.size());
    for (std::size_t i = 0; i < sum.size(); ++i) { without[i] = 0.75f * pairs.out(0)[i]; }
    std::vector<std::byte> halves(2 * sum.size());
    expert::floats_to_halves(sum, halves);
    std::vector<float> travelled(sum.size());
    expert::halves_to_floats(halves, travelled);
    const std::array<std::span<const float>, 2> claims{sum, without};
    const auto fits = rule(pairs.layer.shard.layer, terms, {{}, pairs.in(0)}, claims).value();
    EXPECT_TRUE(fits[0].holds) << to_string(fits[0]);
    EXPECT_FALSE(fits[1].holds) << to_string(fits[1]);
    const std::array<std::span<const float>, 2> far{travelled, without};
    const auto fits_far = rule(pairs.layer.shard.layer, terms, {{}, pairs.in(0)}, far, kHalfTolerance).value();
    EXPECT_TRUE(fits_far[0].holds) << to_string(fits_far[0]);
    EXPECT_FALSE(fits_far[1].holds) << to_string(fits_far[1]);
}

INSTANTIATE_TEST_SUITE_P(Types, RulingTest,
                         ::testing::Values(GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K),
                         [](const auto& type) { return std::string(ggml_type_name(type.param)); });

TEST(Ruling, where_the_truth_is_no_number_nobody_is_wrong) {
    const Pairs pairs(GGML_TYPE_F32);
    const Bytes bytes = pairs.slice(0);
    const std::array terms{Term{bytes}};
    std::vector<float> input(pairs.in(0).begin(), pairs.in(0).end());
    input[3] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> nan(pairs.out(0).size(), std::numeric_limits<float>::quiet_NaN());
    const std::array<std::span<const float>, 1> claims{nan};
    EXPECT_TRUE(rule(pairs.layer.shard.layer, terms, {{}, input}, claims).value().front().holds);
}

TEST(Ruling, a_number_that_may_be_flushed_to_zero_is_zero) {
    const Pairs pairs(GGML_TYPE_F32);
    const Bytes bytes = pairs.slice(0);
    const std::array terms{Term{bytes}};
    const std::vector<float> input(pairs.in(0).size(), 0.0f);
    std::vector<float> row(pairs.out(0).size(), 0.0f);
    const auto holds = [&] {
        const std::array<std::span<const float>, 1> claims{row};
        return rule(pairs.layer.shard.layer, terms, {{}, input}, claims).value().front().holds;
    };
    EXPECT_TRUE(holds());
    row[5] = 1e-40f;
    EXPECT_TRUE(holds());
    row[5] = 1e-30f;
    EXPECT_FALSE(holds());
}

TEST(Ruling, what_is_no_case_is_refused) {
    const Pairs pairs(GGML_TYPE_Q8_0);
    const Bytes bytes = pairs.slice(0);
    const std::array terms{Term{bytes}};
    const std::vector<float> row = pairs.out(0);
    const std::array<std::span<const float>, 1> claims{row};
    const std::array<std::span<const float>, 1> shorter{std::span(row).first(row.size() - 1)};
    const model::MoeLayer& layer = pairs.layer.shard.layer;
    EXPECT_EQ(rule(layer, {}, {{}, pairs.in(0)}, claims).error().kind, ErrorKind::invalid);
    EXPECT_EQ(rule(layer, terms, {{}, pairs.in(0).first(3)}, claims).error().kind, ErrorKind::invalid);
    EXPECT_EQ(rule(layer, terms, {{}, pairs.in(0)}, shorter).error().kind, ErrorKind::invalid);
    EXPECT_EQ(rule(layer, terms, {model::Role::gate_up, pairs.in(0)}, claims).error().kind, ErrorKind::invalid);
    const std::array cut{Term{ByteView(bytes).first(bytes.size() - 1)}};
    EXPECT_EQ(rule(layer, cut, {{}, pairs.in(0)}, claims).error().kind, ErrorKind::corrupt);
    model::MoeLayer unknown = layer;
    unknown.activation.kind = model::Activation::unknown;
    EXPECT_EQ(rule(unknown, terms, {{}, pairs.in(0)}, claims).error().kind, ErrorKind::invalid);
}

}  // namespace
}  // namespace linkcpp::trust
