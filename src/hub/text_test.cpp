#include "hub/text.h"

#include <gtest/gtest.h>

#include <memory>

namespace linkcpp::hub {
namespace {

namespace fb = wire::fb;

template <class Entry>
void fill(std::vector<std::unique_ptr<Entry>>& entries, std::string Entry::* text) {
    for (int i = 0; i < 5000; ++i) {
        entries.push_back(i % 100 == 0 ? nullptr : std::make_unique<Entry>());
        if (entries.back()) { (*entries.back()).*text = std::string(30'000, 'x'); }
    }
}

template <class Entry>
std::size_t bytes_of(const std::vector<std::unique_ptr<Entry>>& entries, std::string Entry::* text) {
    std::size_t n = 0;
    for (const auto& entry : entries) { n += ((*entry).*text).capacity() + sizeof(Entry); }
    return n;
}

TEST(Text, of_a_peers_figures_only_so_much_is_kept) {
    fb::StatsT stats;
    stats.pairs = 7;
    fill(stats.unknown, &fb::UnknownLayerT::nodes);
    fill(stats.audits, &fb::AuditsT::worker);
    fill(stats.links, &fb::LinkStateT::worker);
    fill(stats.turned_away, &fb::TurnedAwayT::name);
    const fb::StatsT kept = cut(std::move(stats));
    EXPECT_EQ(kept.pairs, 7u);
    EXPECT_GT(kept.unknown.size(), 500u);
    const std::size_t n_bytes =
        bytes_of(kept.unknown, &fb::UnknownLayerT::nodes) + bytes_of(kept.audits, &fb::AuditsT::worker) +
        bytes_of(kept.links, &fb::LinkStateT::worker) + bytes_of(kept.turned_away, &fb::TurnedAwayT::name);
    EXPECT_LT(n_bytes, 3u << 20);
}

}  // namespace
}  // namespace linkcpp::hub
