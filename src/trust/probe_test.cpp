#include "trust/probe.h"

#include <map>
#include <set>

#include <gtest/gtest.h>

#include "base/sha256.h"
#include "trust/test_layer.h"

namespace linkcpp::trust {
namespace {

using testing::TestLayer;

model::MoeLayer real_layer() {
    model::MoeLayer layer;
    layer.n_expert = 256;
    layer.n_expert_used = 8;
    layer.n_embd = 3072;
    layer.n_ff = 1024;
    return layer;
}

std::vector<std::uint16_t> experts(std::uint16_t n) {
    std::vector<std::uint16_t> all(n);
    std::iota(all.begin(), all.end(), std::uint16_t{0});
    return all;
}

Digest hash_of(const ProbeInput& input) {
    Sha256 hash;
    hash.add(std::as_bytes(std::span(input.rows)));
    hash.add(std::as_bytes(std::span(input.inner)));
    for (const expert::Pair& pair : input.pairs) {
        hash.add(std::as_bytes(std::span(&pair.row, 1)));
        hash.add(std::as_bytes(std::span(&pair.expert, 1)));
        hash.add(std::as_bytes(std::span(&pair.weight, 1)));
    }
    return hash.finish();
}

// Records of other machines, and of releases to come, are compared with ours: this must never change.
TEST(Probe, the_input_is_the_same_everywhere_and_for_ever) {
    const auto input = make_input(real_layer(), experts(256), 1, 12);
    ASSERT_TRUE(input);
    EXPECT_EQ(hash_of(*input).hex(), "d533cf72ca6ba6fcc7ccdf08c6bdb487586539820551bc20dd077c6a8402fa1c");
    EXPECT_NE(hash_of(*make_input(real_layer(), experts(256), 2, 12)), hash_of(*input));
}

TEST(Probe, the_input_covers_the_experts_evenly_and_is_of_unit_scale) {
    const std::vector<std::uint16_t> held{3, 5, 9, 100, 101, 102, 103, 104, 200, 255};
    const ProbeInput input = make_input(real_layer(), held, 7, 12).value();
    EXPECT_EQ(input.n_used, 8u);
    ASSERT_EQ(input.n_pairs(), 96u);
    EXPECT_EQ(input.rows.size(), 12u * 3072);
    EXPECT_EQ(input.inner.size(), 96u * 1024);
    std::map<std::uint16_t, int> chosen;
    for (std::size_t t = 0; t < 12; ++t) {
        std::set<std::uint16_t> its;
        double weights = 0;
        for (std::size_t i = 0; i < 8; ++i) {
            const expert::Pair& pair = input.pairs[t * 8 + i];
            EXPECT_EQ(pair.row, t);
            EXPECT_GT(pair.weight, 0);
            its.insert(pair.expert);
            ++chosen[pair.expert];
            weights += pair.weight;
        }
        EXPECT_EQ(its.size(), 8u) << "token " << t << " chose an expert twice";
        EXPECT_NEAR(weights, 1, 1e-6);
    }
    EXPECT_EQ(chosen.size(), held.size());
    for (const auto& [expert, n] : chosen) {
        EXPECT_TRUE(std::ranges::find(held, expert) != held.end());
        EXPECT_NEAR(n, 9.6, 2);
    }
    double squares = 0;
    for (const float x : input.rows) { squares += static_cast<double>(x) * x; }
    EXPECT_NEAR(squares / static_cast<double>(input.rows.size()), 1, 0.05);
}

TEST(Probe, fewer_experts_than_a_token_uses) {
    const ProbeInput input = make_input(real_layer(), experts(3), 1, 5).value();
    EXPECT_EQ(input.n_used, 3u);
    EXPECT_EQ(input.n_pairs(), 15u);
    EXPECT_EQ(used_experts(input), experts(3));
    EXPECT_EQ(make_input(real_layer(), experts(1), 1, 2)->n_used, 1u);
}

TEST(Probe, wishes_without_sense) {
    EXPECT_EQ(make_input(real_layer(), {}, 1, 12).error().kind, ErrorKind::invalid);
    EXPECT_EQ(make_input(real_layer(), experts(8), 1, 0).error().kind, ErrorKind::invalid);
    EXPECT_EQ(make_input(real_layer(), experts(8), 1, kMaxProbeTokens + 1).error().kind, ErrorKind::invalid);
    model::MoeLayer greedy = real_layer();
    greedy.n_expert_used = 256;
    EXPECT_EQ(make_input(greedy, experts(256), 1, kMaxProbeTokens).error().kind, ErrorKind::invalid);
}

TEST(Probe, every_part_has_its_shape_and_the_same_kernels_give_the_same_bits) {
    const TestLayer layer(TestLayer::small(GGML_TYPE_Q8_0));
    const ProbeInput input = layer.input();
    const ProbeRows rows = layer.rows(input);
    const std::vector<Part> parts = parts_of(layer.shard.layer);
    EXPECT_EQ(parts,
              (std::vector{Part::sums, Part::batch, Part::single, Part::crowd, Part::gate, Part::up, Part::down}));
    for (const Part part : parts) {
        const PartShape shape = shape_of(part, layer.shard.layer, input);
        EXPECT_EQ(rows.at(part).size(), shape.n * shape.n_rows) << to_string(part);
    }
    EXPECT_EQ(rows.at(Part::batch), rows.at(Part::single)) << "a pair's bits do not depend on its company";
    EXPECT_EQ(layer.rows(input), rows);
}

TEST(Probe, an_unknown_activation_is_probed_by_its_products) {
    const TestLayer layer(TestLayer::small(GGML_TYPE_F16));
    model::MoeLayer unknown = layer.shard.layer;
    unknown.activation = {model::Activation::unknown, {}};
    EXPECT_EQ(parts_of(unknown), (std::vector{Part::gate, Part::up, Part::down}));
}

}  // namespace
}  // namespace linkcpp::trust
