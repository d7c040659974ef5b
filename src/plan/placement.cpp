#include "plan/placement.h"

#include <algorithm>
#include <numeric>

namespace linkcpp::plan {
namespace {

using model::MoeModel;

// How many experts of a layer each holder should have: proportional to `weights`, at most `limit` each, `total` in sum
// if the limits allow. Largest remainders get the last ones; `turn` rotates ties so that layers do not all favour the
// same holder.
std::vector<std::uint64_t> quotas(const std::vector<double>& weights, std::uint64_t total, std::uint64_t limit,
                                  std::size_t turn) {
    const std::size_t n = weights.size();
    std::vector<std::uint64_t> quota(n, 0);
    std::vector<bool> full(n, false);
    std::uint64_t left = total;
    while (left > 0) {
        double sum = 0;
        for (std::size_t i = 0; i < n; ++i) { sum += full[i] ? 0 : weights[i]; }
        if (sum <= 0) { break; }
        std::vector<std::pair<double, std::size_t>> remainders;
        std::uint64_t given = 0;
        for (std::size_t i = 0; i < n; ++i) {
            if (full[i]) { continue; }
            const double share = static_cast<double>(left) * weights[i] / sum;
            const std::uint64_t whole = std::min<std::uint64_t>(static_cast<std::uint64_t>(share), limit - quota[i]);
            quota[i] += whole;
            given += whole;
            full[i] = quota[i] == limit;
            if (!full[i] && weights[i] > 0) {
                remainders.emplace_back(-(share - static_cast<double>(whole)), (i + n - turn % n) % n);
            }
        }
        left -= given;
        std::ranges::sort(remainders);
        for (const auto& [remainder, rotated] : remainders) {
            if (left == 0 || given > 0) { break; }
            const std::size_t i = (rotated + turn) % n;
            ++quota[i];
            --left;
            full[i] = quota[i] == limit;
        }
        if (given == 0 && remainders.empty()) { break; }
    }
    return quota;
}

bool has(const Holder& holder, std::size_t layer, std::size_t expert) {
    return layer < holder.held.size() && expert < holder.held[layer].size() && holder.held[layer][expert];
}

class Placer {
  public:
    Placer(const MoeModel& model, const std::vector<Holder>& holders, std::uint32_t n_replicas)
        : model_(model), holders_(holders), n_replicas_(std::min<std::size_t>(n_replicas, holders.size())) {
        for (const Holder& holder : holders) {
            free_.push_back(holder.memory_bytes);
            placement_.holders.push_back(nothing(model));
        }
    }

    Placement run() {
        // Every slice's first copy finds its place in all layers before any second copy takes room.
        for (std::size_t copy = 1; copy <= n_replicas_; ++copy) {
            for (std::size_t layer = 0; layer < model_.layers.size(); ++layer) { place_layer(layer, copy); }
        }
        for (std::size_t layer = 0; layer < model_.layers.size(); ++layer) {
            for (std::size_t e = 0; e < model_.layers[layer].n_expert; ++e) {
                const std::size_t copies = n_copies(layer, e);
                placement_.missing_slices += copies == 0 ? 1 : 0;
                placement_.missing_copies += std::max<std::size_t>(n_replicas_, 1) - copies;
            }
        }
        return std::move(placement_);
    }

  private:
    std::size_t n_copies(std::size_t layer, std::size_t expert) const {
        return static_cast<std::size_t>(
            std::ranges::count_if(placement_.holders, [&](const Holdings& h) { return h[layer][expert]; }));
    }

    bool give(std::size_t holder, std::size_t layer, std::size_t expert) {
        const std::uint64_t bytes = model_.layers[layer].slice_bytes();
        if (placement_.holders[holder][layer][expert] || free_[holder] < bytes) { return false; }
        placement_.holders[holder][layer][expert] = true;
        free_[holder] -= bytes;
        if (!has(holders_[holder], layer, expert)) { placement_.moved_bytes += bytes; }
        return true;
    }

    void place_layer(std::size_t layer, std::size_t copy) {
        const std::size_t n_expert = model_.layers[layer].n_expert;
        std::vector<double> weights;
        for (const Holder& holder : holders_) { weights.push_back(static_cast<double>(holder.memory_bytes)); }
        const std::vector<std::uint64_t> quota = quotas(weights, n_expert * copy, n_expert, layer);
        std::vector<std::uint64_t> used;
        for (std::size_t i = 0; i < holders_.size(); ++i) { used.push_back(n_held(i, layer)); }
        std::vector<std::size_t> copies(n_expert);
        for (std::size_t e = 0; e < n_expert; ++e) { copies[e] = n_copies(layer, e); }

        // First what is there already, then the rest in runs of neighbours, last whoever still has room.
        for (std::size_t i = 0; i < holders_.size(); ++i) {
            for (std::size_t e = 0; e < n_expert && used[i] < quota[i]; ++e) {
                if (copies[e] < copy && has(holders_[i], layer, e) && give(i, layer, e)) {
                    ++copies[e];
                    ++used[i];
                }
            }
        }
        for (std::size_t i = 0; i < holders_.size(); ++i) {
            for (std::size_t e = 0; e < n_expert && used[i] < quota[i]; ++e) {
                if (copies[e] < copy && give(i, layer, e)) {
                    ++copies[e];
                    ++used[i];
                }
            }
        }
        for (std::size_t e = 0; e < n_expert; ++e) {
            while (copies[e] < copy && exchange(layer, e, quota)) { ++copies[e]; }
            while (copies[e] < copy && give_to_emptiest(layer, e)) { ++copies[e]; }
        }
    }

    std::uint64_t n_held(std::size_t holder, std::size_t layer) const {
        return static_cast<std::uint64_t>(std::ranges::count(placement_.holders[holder][layer], true));
    }

    // Finds `expert` a place where those below their quota hold it already: one of them takes an expert from a holder
    // that lacks this one. What that holder would have to fetch goes first.
    bool exchange(std::size_t layer, std::size_t expert, const std::vector<std::uint64_t>& quota) {
        const auto holds_it = [&](std::size_t i) { return placement_.holders[i][layer][expert]; };
        for (const bool fetched : {true, false}) {
            for (std::size_t taker = 0; taker < holders_.size(); ++taker) {
                if (!holds_it(taker) || n_held(taker, layer) >= quota[taker]) { continue; }
                for (std::size_t giver = 0; giver < holders_.size(); ++giver) {
                    if (!holds_it(giver) && hand_over(giver, taker, layer, fetched)) {
                        return give(giver, layer, expert);
                    }
                }
            }
        }
        return false;
    }

    // One expert of `giver` that `taker` lacks: of those that the giver has not yet (`fetched`), or of those it has.
    bool hand_over(std::size_t giver, std::size_t taker, std::size_t layer, bool fetched) {
        for (std::size_t e = 0; e < model_.layers[layer].n_expert; ++e) {
            if (placement_.holders[giver][layer][e] && has(holders_[giver], layer, e) != fetched &&
                give(taker, layer, e)) {
                take(giver, layer, e);
                return true;
            }
        }
        return false;
    }

    void take(std::size_t holder, std::size_t layer, std::size_t expert) {
        const std::uint64_t bytes = model_.layers[layer].slice_bytes();
        placement_.holders[holder][layer][expert] = false;
        free_[holder] += bytes;
        if (!has(holders_[holder], layer, expert)) { placement_.moved_bytes -= bytes; }
    }

    bool give_to_emptiest(std::size_t layer, std::size_t expert) {
        std::vector<std::size_t> order(holders_.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return free_[a] > free_[b]; });
        return std::ranges::any_of(order, [&](std::size_t i) { return give(i, layer, expert); });
    }

    const MoeModel& model_;
    const std::vector<Holder>& holders_;
    std::size_t n_replicas_;
    std::vector<std::uint64_t> free_;
    Placement placement_;
};

}  // namespace

Placement place(const MoeModel& model, const std::vector<Holder>& holders, std::uint32_t n_replicas) {
    return Placer(model, holders, std::max(1u, n_replicas)).run();
}

Holdings nothing(const model::MoeModel& model) {
    Holdings holdings;
    for (const model::MoeLayer& layer : model.layers) { holdings.emplace_back(layer.n_expert, false); }
    return holdings;
}

std::uint64_t bytes_of(const MoeModel& model, const Holdings& holdings) {
    std::uint64_t bytes = 0;
    for (std::size_t layer = 0; layer < holdings.size() && layer < model.layers.size(); ++layer) {
        bytes +=
            static_cast<std::uint64_t>(std::ranges::count(holdings[layer], true)) * model.layers[layer].slice_bytes();
    }
    return bytes;
}

std::uint64_t count(const Holdings& holdings) {
    std::uint64_t n = 0;
    for (const ExpertSet& experts : holdings) { n += static_cast<std::uint64_t>(std::ranges::count(experts, true)); }
    return n;
}

}  // namespace linkcpp::plan
