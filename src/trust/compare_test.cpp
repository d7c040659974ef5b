#include "trust/compare.h"

#include <gtest/gtest.h>

#include "trust/test_layer.h"

namespace linkcpp::trust {
namespace {

using expert::Rounding;
using testing::TestLayer;

Record record_of(const TestLayer& layer, const ProbeInput& input, ProbeRows rows, Rounding rounding) {
    Record record = begin_record(layer.shard, input).value();
    record.rows = std::move(rows);
    record.place.device = "test";
    for (const auto& [part, its] : record.rows) { record.roundings[part] = {rounding, rounding}; }
    return record;
}

Record reference_of(const TestLayer& layer, const ProbeInput& input, Rounding rounding) {
    return record_of(layer, input,
                     run_reference(layer.shard.layer, layer.shard.read, input, {rounding, rounding}, 2).value(),
                     rounding);
}

TEST(Compare, the_same_bits_a_device_with_its_reference_and_with_the_plain_one) {
    const TestLayer layer(TestLayer::small(GGML_TYPE_Q4_K));
    const ProbeInput input = layer.input();
    const Record device = record_of(layer, input, layer.rows(input), Rounding::q8_k);
    const auto same = compare(device, device);
    ASSERT_TRUE(same);
    EXPECT_EQ(same->verdict, Verdict::identical);
    EXPECT_DOUBLE_EQ(same->parts.at(Part::sums).all.cosine, 1);

    const Comparison own = compare(device, reference_of(layer, input, Rounding::q8_k)).value();
    EXPECT_EQ(own.verdict, Verdict::equivalent);
    EXPECT_LT(own.parts.at(Part::gate).worst.relative_l2, 1e-5);

    const Comparison plain = compare(device, reference_of(layer, input, Rounding::none)).value();
    EXPECT_EQ(plain.verdict, Verdict::equivalent);
    EXPECT_GT(plain.parts.at(Part::sums).all.cosine, 0.9997);
    EXPECT_GT(plain.parts.at(Part::gate).worst.relative_l2, 1e-3) << "the rounding shows";
}

// Who knows nothing about how a device rounds has no reason for a tolerance.
TEST(Compare, without_a_known_rounding_there_is_no_wide_tolerance) {
    const TestLayer layer(TestLayer::small(GGML_TYPE_Q4_K));
    const ProbeInput input = layer.input();
    Record device = record_of(layer, input, layer.rows(input), Rounding::q8_k);
    device.roundings.clear();
    EXPECT_EQ(compare(device, reference_of(layer, input, Rounding::none))->verdict, Verdict::different);
}

TEST(Compare, one_wrong_row_is_enough_in_any_part_and_not_finite_is_different) {
    const TestLayer layer(TestLayer::small(GGML_TYPE_F16));
    const ProbeInput input = layer.input();
    const Record good = reference_of(layer, input, Rounding::f16);
    for (const Part part : parts_of(layer.shard.layer)) {
        Record bad = good;
        const std::size_t n = shape_of(part, layer.shard.layer, input).n;
        std::swap(bad.rows.at(part)[2 * n], bad.rows.at(part)[2 * n + 1]);
        const Comparison comparison = compare(bad, good).value();
        EXPECT_EQ(comparison.verdict, Verdict::different) << to_string(part);
        EXPECT_EQ(comparison.decisive, part);
        EXPECT_EQ(comparison.parts.at(part).worst_row, 2u);
        Record infinite = good;
        infinite.rows.at(part).back() = INFINITY;
        EXPECT_EQ(compare(infinite, infinite)->verdict, Verdict::different) << to_string(part);
    }
}

TEST(Compare, records_of_other_probes) {
    const TestLayer layer(TestLayer::small(GGML_TYPE_F16));
    const TestLayer other(TestLayer::small(GGML_TYPE_F16), 2);
    const Record a = reference_of(layer, layer.input(), Rounding::none);
    EXPECT_EQ(compare(a, reference_of(layer, layer.input(2), Rounding::none)).error().kind, ErrorKind::invalid);
    EXPECT_EQ(compare(a, reference_of(layer, layer.input(1, 5), Rounding::none)).error().kind, ErrorKind::invalid);
    EXPECT_EQ(compare(a, reference_of(other, other.input(), Rounding::none)).error().kind, ErrorKind::invalid);
}

}  // namespace
}  // namespace linkcpp::trust
