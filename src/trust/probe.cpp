#include "trust/probe.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <set>

#include "model/random_weights.h"

namespace linkcpp::trust {
namespace {

using expert::Pair;
using model::MoeLayer;
using model::Role;

constexpr std::array<std::string_view, 9> kNames{"",     "sums", "batch",   "single", "crowd",
                                                 "gate", "up",   "gate_up", "down"};

std::vector<float> random_rows(std::uint64_t seed, std::string_view name, std::uint32_t n, std::size_t n_rows) {
    const model::RandomWeights random{
        .type = GGML_TYPE_F32, .n_columns = n, .deviation = 1, .mean = 0, .key = model::key_of(seed, name)};
    std::vector<float> rows(n * n_rows);
    random.fill(0, std::as_writable_bytes(std::span(rows)));
    return rows;
}

// Cards are dealt from a shuffled deck of all experts, and from a new one when it is empty. The standard says to the
// bit what this engine gives, though not what its distributions and std::shuffle() make of it.
class Deck {
  public:
    Deck(std::span<const std::uint16_t> experts, std::uint64_t seed)
        : experts_(experts.begin(), experts.end()), random_(model::key_of(seed, "experts")) {}

    // One that is not in `taken` yet.
    std::uint16_t deal(const std::vector<std::uint16_t>& taken) {
        while (true) {
            const auto next = std::ranges::find_if(
                left_, [&](std::uint16_t e) { return std::ranges::find(taken, e) == taken.end(); });
            if (next != left_.end()) {
                const std::uint16_t expert = *next;
                left_.erase(next);
                return expert;
            }
            std::vector<std::uint16_t> fresh = experts_;
            for (std::size_t i = fresh.size(); i > 1; --i) { std::swap(fresh[i - 1], fresh[number(i)]); }
            left_.insert(left_.end(), fresh.begin(), fresh.end());
        }
    }
    std::uint64_t number(std::uint64_t below) { return random_() % below; }

  private:
    std::vector<std::uint16_t> experts_;
    std::vector<std::uint16_t> left_;
    std::mt19937_64 random_;
};

}  // namespace

std::string_view to_string(Part part) {
    const auto number = static_cast<std::size_t>(part);
    return number < kNames.size() ? kNames[number] : "unknown";
}

Result<ProbeInput> make_input(const MoeLayer& layer, std::span<const std::uint16_t> experts, std::uint64_t seed,
                              std::uint32_t n_tokens) {
    if (experts.empty()) { return fail(ErrorKind::invalid, "probe: expected at least one expert"); }
    if (n_tokens == 0 || n_tokens > kMaxProbeTokens) {
        return fail(ErrorKind::invalid, "probe: expected 1 to {} tokens, got {}", kMaxProbeTokens, n_tokens);
    }
    ProbeInput input{.seed = seed, .n_tokens = n_tokens};
    input.n_used = static_cast<std::uint32_t>(std::clamp<std::size_t>(layer.n_expert_used, 1, experts.size()));
    input.rows = random_rows(seed, "rows", layer.n_embd, n_tokens);
    if (std::size_t{n_tokens} * input.n_used > kMaxProbePairs) {
        return fail(ErrorKind::invalid, "probe: expected at most {} pairs, got {} tokens with {} experts each",
                    kMaxProbePairs, n_tokens, input.n_used);
    }
    Deck deck(experts, seed);
    for (std::uint32_t token = 0; token < n_tokens; ++token) {
        std::vector<std::uint16_t> chosen;
        std::vector<std::uint64_t> shares;
        for (std::uint32_t i = 0; i < input.n_used; ++i) {
            chosen.push_back(deck.deal(chosen));
            shares.push_back(1 + deck.number(1000));
        }
        const auto total = static_cast<float>(std::accumulate(shares.begin(), shares.end(), std::uint64_t{0}));
        for (std::uint32_t i = 0; i < input.n_used; ++i) {
            input.pairs.push_back(
                {static_cast<std::uint16_t>(token), chosen[i], static_cast<float>(shares[i]) / total});
        }
    }
    input.inner = random_rows(seed, "inner", layer.n_ff, input.n_pairs());
    return input;
}

std::vector<std::uint16_t> used_experts(const ProbeInput& input) {
    std::set<std::uint16_t> used;
    for (const Pair& pair : input.pairs) { used.insert(pair.expert); }
    return {used.begin(), used.end()};
}

std::vector<Part> parts_of(const MoeLayer& layer) {
    std::vector<Part> parts;
    if (layer.activation.kind != model::Activation::unknown) {
        parts = {Part::sums, Part::batch, Part::single, Part::crowd};
    }
    for (const Part part : {Part::gate, Part::up, Part::gate_up, Part::down}) {
        if (layer.find(*product_of(part)) != nullptr) { parts.push_back(part); }
    }
    return parts;
}

std::optional<Role> product_of(Part part) {
    switch (part) {
        case Part::gate: return Role::gate;
        case Part::up: return Role::up;
        case Part::gate_up: return Role::gate_up;
        case Part::down: return Role::down;
        default: return {};
    }
}

PartShape shape_of(Part part, const MoeLayer& layer, const ProbeInput& input) {
    const bool by_token = part == Part::sums || part == Part::crowd;
    return {model::widths_of(layer, product_of(part)).n_out, by_token ? input.n_tokens : input.n_pairs()};
}

PartRow row_of(Part part, std::size_t row, const MoeLayer& layer, const ProbeInput& input) {
    const std::size_t n_in = model::widths_of(layer, product_of(part)).n_in;
    if (part == Part::crowd) { return {input.pairs.front().expert, std::span(input.rows).subspan(row * n_in, n_in)}; }
    const Pair& pair = input.pairs[row];
    if (part == Part::down) { return {pair.expert, std::span(input.inner).subspan(row * n_in, n_in)}; }
    return {pair.expert, std::span(input.rows).subspan(pair.row * n_in, n_in)};
}

Result<std::vector<float>> run_part(expert::Engine& engine, std::uint64_t model, const MoeLayer& layer,
                                    const ProbeInput& input, Part part) {
    const auto batch = [&](std::span<const float> rows, std::span<const Pair> pairs, std::optional<Role> product = {}) {
        return expert::Batch{model, layer.layer, model::widths_of(layer, product).n_in, rows, pairs, product};
    };
    const PartShape shape = shape_of(part, layer, input);
    std::vector<float> out(shape.n * shape.n_rows);
    switch (part) {
        case Part::sums: LINKCPP_CHECK(engine.compute_sums(batch(input.rows, input.pairs), out)); break;
        case Part::batch: LINKCPP_CHECK(engine.compute_rows(batch(input.rows, input.pairs), out)); break;
        case Part::single:
            for (std::uint32_t token = 0; token < input.n_tokens; ++token) {
                const std::span<const Pair> its =
                    std::span(input.pairs).subspan(std::size_t{token} * input.n_used, input.n_used);
                std::vector<Pair> pairs(its.begin(), its.end());
                for (Pair& pair : pairs) { pair.row = 0; }
                const auto row = std::span(input.rows).subspan(token * std::size_t{layer.n_embd}, layer.n_embd);
                const std::size_t n = shape.n * input.n_used;
                LINKCPP_CHECK(engine.compute_rows(batch(row, pairs), std::span(out).subspan(token * n, n)));
            }
            break;
        case Part::crowd: {
            std::vector<Pair> pairs;
            for (std::uint32_t token = 0; token < input.n_tokens; ++token) {
                pairs.push_back({static_cast<std::uint16_t>(token), input.pairs.front().expert, 1});
            }
            LINKCPP_CHECK(engine.compute_rows(batch(input.rows, pairs), out));
            break;
        }
        case Part::gate:
        case Part::up:
        case Part::gate_up:
        case Part::down: {
            std::vector<Pair> pairs = input.pairs;
            if (part == Part::down) {
                for (std::size_t i = 0; i < pairs.size(); ++i) { pairs[i].row = static_cast<std::uint16_t>(i); }
            }
            const std::span<const float> rows = part == Part::down ? input.inner : input.rows;
            LINKCPP_CHECK(engine.compute_rows(batch(rows, pairs, product_of(part)), out));
            break;
        }
    }
    return out;
}

Result<ProbeRows> run_probe(expert::Engine& engine, std::uint64_t model, const MoeLayer& layer,
                            const ProbeInput& input) {
    ProbeRows result;
    for (const Part part : parts_of(layer)) { LINKCPP_TRY(result[part], run_part(engine, model, layer, input, part)); }
    return result;
}

}  // namespace linkcpp::trust
