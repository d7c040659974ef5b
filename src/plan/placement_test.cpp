#include "plan/placement.h"

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

namespace linkcpp::plan {
namespace {

constexpr std::uint64_t kSlice = 1000;

model::MoeModel sample_model(std::uint32_t n_layers, std::uint32_t n_expert) {
    model::MoeModel model;
    for (std::uint32_t l = 0; l < n_layers; ++l) {
        model::MoeLayer layer;
        layer.layer = l;
        layer.n_expert = n_expert;
        layer.tensors.push_back({.role = model::Role::down, .slab_bytes = kSlice});
        model.layers.push_back(layer);
    }
    return model;
}

std::size_t copies(const Placement& placement, std::size_t layer, std::size_t expert) {
    return static_cast<std::size_t>(
        std::ranges::count_if(placement.holders, [&](const Holdings& h) { return h[layer][expert]; }));
}

TEST(Placement, three_equal_workers_hold_a_third_each) {
    const auto model = sample_model(6, 16);
    const auto placement = place(model, {{"a", 1 << 20, {}}, {"b", 1 << 20, {}}, {"c", 1 << 20, {}}}, 1);
    EXPECT_EQ(placement.missing_slices, 0u);
    for (const Holdings& h : placement.holders) { EXPECT_EQ(count(h), 32u); }
    for (std::size_t l = 0; l < 6; ++l) {
        for (std::size_t e = 0; e < 16; ++e) { EXPECT_EQ(copies(placement, l, e), 1u); }
    }
    EXPECT_EQ(placement.moved_bytes, 96 * kSlice);
}

TEST(Placement, shares_follow_memory) {
    const auto model = sample_model(4, 100);
    const auto placement = place(model, {{"big", 300'000, {}}, {"small", 100'000, {}}}, 1);
    for (std::size_t l = 0; l < 4; ++l) {
        EXPECT_EQ(std::ranges::count(placement.holders[0][l], true), 75);
        EXPECT_EQ(std::ranges::count(placement.holders[1][l], true), 25);
    }
}

TEST(Placement, replicas_are_on_different_workers) {
    const auto model = sample_model(3, 10);
    const auto placement = place(model, {{"a", 1 << 20, {}}, {"b", 1 << 20, {}}, {"c", 1 << 20, {}}}, 2);
    EXPECT_EQ(placement.missing_copies, 0u);
    for (std::size_t l = 0; l < 3; ++l) {
        for (std::size_t e = 0; e < 10; ++e) { EXPECT_EQ(copies(placement, l, e), 2u); }
    }
}

TEST(Placement, equal_workers_hold_equally_much_however_many_they_are_and_copies_there_are) {
    const auto model = sample_model(6, 16);
    for (std::size_t n_holders = 2; n_holders <= 9; ++n_holders) {
        for (std::uint32_t n_replicas = 1; n_replicas <= n_holders; ++n_replicas) {
            std::vector<Holder> holders;
            for (std::size_t i = 0; i < n_holders; ++i) { holders.push_back({std::to_string(i), 1 << 20, {}}); }
            const auto placement = place(model, holders, n_replicas);
            EXPECT_EQ(placement.missing_copies, 0u);
            constexpr std::size_t kExperts = 16;
            for (std::size_t l = 0; l < 6; ++l) {
                for (std::size_t i = 0; i < n_holders; ++i) {
                    const auto n = static_cast<std::size_t>(std::ranges::count(placement.holders[i][l], true));
                    EXPECT_LE(n, (kExperts * n_replicas + n_holders - 1) / n_holders) << n_holders << " " << n_replicas;
                    EXPECT_GE(n, kExperts * n_replicas / n_holders) << n_holders << " " << n_replicas;
                }
            }
        }
    }
}

TEST(Placement, more_replicas_than_workers_gives_everybody_everything) {
    const auto placement = place(sample_model(2, 4), {{"a", 1 << 20, {}}, {"b", 1 << 20, {}}}, 5);
    EXPECT_EQ(count(placement.holders[0]), 8u);
    EXPECT_EQ(count(placement.holders[1]), 8u);
}

TEST(Placement, memory_is_never_exceeded_and_what_is_missing_is_counted) {
    const auto model = sample_model(2, 10);
    const auto placement = place(model, {{"a", 7 * kSlice, {}}, {"b", 6 * kSlice + 1, {}}}, 1);
    EXPECT_LE(bytes_of(model, placement.holders[0]), 7 * kSlice);
    EXPECT_LE(bytes_of(model, placement.holders[1]), 6 * kSlice);
    EXPECT_EQ(placement.missing_slices, 7u);
    EXPECT_EQ(place(model, {}, 1).missing_slices, 20u);
}

TEST(Placement, first_copies_come_before_second_ones) {
    const auto placement = place(sample_model(2, 10), {{"a", 15 * kSlice, {}}, {"b", 15 * kSlice, {}}}, 2);
    EXPECT_EQ(placement.missing_slices, 0u);
    EXPECT_EQ(placement.missing_copies, 10u);
}

TEST(Placement, nothing_moves_when_nothing_changed) {
    const auto model = sample_model(5, 12);
    std::vector<Holder> holders{{"a", 50'000, {}}, {"b", 30'000, {}}, {"c", 20'000, {}}};
    const auto first = place(model, holders, 1);
    for (std::size_t i = 0; i < holders.size(); ++i) { holders[i].held = first.holders[i]; }
    const auto second = place(model, holders, 1);
    EXPECT_EQ(second.moved_bytes, 0u);
    EXPECT_EQ(second.holders, first.holders);
}

TEST(Placement, a_newcomer_takes_its_share_and_no_more_moves) {
    const auto model = sample_model(5, 12);
    std::vector<Holder> holders{{"a", 1 << 20, {}}, {"b", 1 << 20, {}}};
    const auto first = place(model, holders, 1);
    for (std::size_t i = 0; i < holders.size(); ++i) { holders[i].held = first.holders[i]; }
    holders.push_back({"c", 1 << 20, {}});
    const auto second = place(model, holders, 1);
    EXPECT_EQ(second.missing_slices, 0u);
    EXPECT_EQ(second.moved_bytes, 20 * kSlice);
    EXPECT_EQ(count(second.holders[2]), 20u);
}

TEST(Placement, any_set_of_workers_gets_a_valid_placement) {
    std::mt19937 random(3);
    for (int i = 0; i < 300; ++i) {
        const auto model =
            sample_model(static_cast<std::uint32_t>(1 + random() % 4), static_cast<std::uint32_t>(1 + random() % 20));
        std::vector<Holder> holders;
        for (std::size_t h = random() % 5; h > 0; --h) {
            Holder holder{"w", random() % (30 * kSlice), {}};
            for (const auto& layer : model.layers) {
                ExpertSet set(layer.n_expert);
                for (auto&& held : set) { held = random() % 3 == 0; }
                holder.held.push_back(set);
            }
            holders.push_back(holder);
        }
        const auto replicas = static_cast<std::uint32_t>(1 + random() % 3);
        const auto placement = place(model, holders, replicas);
        std::uint64_t missing = 0;
        for (std::size_t l = 0; l < model.layers.size(); ++l) {
            for (std::size_t e = 0; e < model.layers[l].n_expert; ++e) {
                missing += copies(placement, l, e) == 0 ? 1 : 0;
                EXPECT_LE(copies(placement, l, e), replicas);
            }
        }
        EXPECT_EQ(missing, placement.missing_slices);
        std::uint64_t room = 0;
        for (std::size_t h = 0; h < holders.size(); ++h) {
            EXPECT_LE(bytes_of(model, placement.holders[h]), holders[h].memory_bytes);
            room += holders[h].memory_bytes / kSlice - count(placement.holders[h]);
        }
        EXPECT_TRUE(missing == 0 || room == 0) << "slices are missing although there is room";
    }
}

}  // namespace
}  // namespace linkcpp::plan
