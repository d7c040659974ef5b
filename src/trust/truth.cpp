#include "trust/truth.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <set>

#include "base/text.h"
#include "model/parallel.h"

namespace linkcpp::trust {
namespace {

using expert::FfnRounding;
using expert::ReferenceExpert;
using expert::Rounding;
using model::MoeLayer;
using model::Role;

// No rounding puts a row so far off.
constexpr double kBeyondRounding = 0.3;

// Rows are only ever quantised to meet quantised weights.
bool is_possible(const MoeLayer& layer, Role weight, Rounding rounding) {
    const model::ExpertTensor* tensor = layer.find(weight);
    return tensor == nullptr || !expert::is_block(rounding) || ggml_is_quantized(tensor->type);
}

// Kernels of one device round alike for weights of one family; of two, perhaps not.
bool is_mixture(const MoeLayer& layer) {
    std::set<std::pair<bool, bool>> families;
    for (const model::ExpertTensor& tensor : layer.tensors) {
        if (!model::is_weight(tensor.role)) { continue; }
        families.emplace(ggml_is_quantized(tensor.type), ggml_blck_size(tensor.type) >= 256);
    }
    return families.size() > 1;
}

// What ggml's CPU kernels do with rows that meet such weights.
Rounding usual_rounding(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32: return Rounding::none;
        case GGML_TYPE_F16: return Rounding::f16;
        case GGML_TYPE_BF16: return Rounding::bf16;
        default: return ggml_blck_size(type) >= 256 ? Rounding::q8_k : Rounding::q8_0;
    }
}

// The rows of each expert, those of one input together: a slice is read and dequantised once, and what several parts
// have in common is computed once.
struct RowNumber {
    Part part;
    std::size_t row;
};
std::map<std::uint16_t, std::vector<RowNumber>> rows_by_expert(const MoeLayer& layer, const ProbeInput& input) {
    std::map<std::uint16_t, std::vector<RowNumber>> rows;
    for (const Part part : parts_of(layer)) {
        if (part == Part::sums) { continue; }
        for (std::size_t i = 0; i < shape_of(part, layer, input).n_rows; ++i) {
            rows[row_of(part, i, layer, input).expert].push_back({part, i});
        }
    }
    for (auto& [expert, its] : rows) {
        std::ranges::stable_sort(its, {}, [&](const RowNumber& number) {
            return row_of(number.part, number.row, layer, input).input.data();
        });
    }
    return rows;
}

// References that were made before, by expert.
using KnownTruths = std::map<std::uint16_t, ExpertTruth>;

// Calls work(expert, its reference, its rows) for each expert, on several threads. References are looked for in
// `known`, and left there when `keep` says so.
Status for_each_expert(const MoeLayer& layer, const SliceReader& read, const ProbeInput& input, JudgeOptions options,
                       KnownTruths& known, bool keep,
                       const std::function<void(std::uint16_t, ExpertTruth&, std::span<const RowNumber>)>& work) {
    const auto by_expert = rows_by_expert(layer, input);
    std::vector<std::uint16_t> experts;
    for (const auto& [expert, rows] : by_expert) { experts.push_back(expert); }
    std::swap(experts.front(), *std::ranges::find(experts, input.pairs.front().expert));
    if (options.n_experts != 0) { experts.resize(std::min(experts.size(), options.n_experts)); }
    std::mutex reading;  // held across I/O on purpose: a reader serves one thread at a time
    Progress progress("reference", experts.size(), Progress::Unit::items, options.quiet);
    std::mutex keeping;  // guards known
    return model::for_all(experts.size(), options.n_threads, progress, [&](std::size_t i) -> Result<std::uint64_t> {
        const std::uint16_t expert = experts[i];
        ExpertTruth* made = nullptr;
        {
            const std::lock_guard lock(keeping);
            if (const auto found = known.find(expert); found != known.end()) { made = &found->second; }
        }
        if (made != nullptr) {
            work(expert, *made, by_expert.at(expert));
            return 1;
        }
        Bytes slice;
        {
            const std::lock_guard lock(reading);
            LINKCPP_TRY(slice, read(expert));
        }
        LINKCPP_TRY(ExpertTruth truth, ExpertTruth::make(layer, slice));
        work(expert, truth, by_expert.at(expert));
        if (keep) {
            const std::lock_guard lock(keeping);
            known.emplace(expert, std::move(truth));
        }
        return 1;
    });
}

std::span<const float> row_at(const std::vector<float>& rows, std::size_t i, std::size_t n) {
    return std::span(rows).subspan(i * n, n);
}

void add_row(PartFindings& findings, const RowFit& fit, std::size_t row, std::uint16_t expert) {
    ++findings.n_rows;
    findings.n_wrong += fit.holds ? 0 : 1;
    if (findings.n_rows == 1 ||
        fit.tolerance.share(fit.difference) > findings.worst.tolerance.share(findings.worst.difference)) {
        findings.worst = fit;
        findings.worst_row = row;
        findings.worst_expert = expert;
    }
}

// The weighted sums of a batch's rows, in double precision.
std::vector<double> sums_of(const std::vector<float>& batch, const MoeLayer& layer, const ProbeInput& input) {
    const std::size_t n = layer.n_embd;
    std::vector<double> sums(n * input.n_tokens);
    for (std::size_t i = 0; i < input.n_pairs(); ++i) {
        const std::span<const float> row = row_at(batch, i, n);
        const std::span<double> sum = std::span(sums).subspan(input.pairs[i].row * n, n);
        for (std::size_t j = 0; j < n; ++j) {
            sum[j] += static_cast<double>(row[j]) * static_cast<double>(input.pairs[i].weight);
        }
    }
    return sums;
}

// The rounding that each part's rows are nearest to, by a vote among rows of a few experts, whose references stay in
// `voters`.
Result<std::map<Part, FfnRounding>> recognise(const MoeLayer& layer, const SliceReader& read, const ProbeInput& input,
                                              const ProbeRows& rows, unsigned n_threads, KnownTruths& voters) {
    constexpr std::size_t kVoters = 3;
    std::map<Part, std::map<std::uint16_t, FfnRounding>> votes;  // of each voter
    std::mutex mutex;                                            // guards votes
    LINKCPP_CHECK(for_each_expert(
        layer, read, input, {.n_threads = n_threads, .n_experts = kVoters, .quiet = true}, voters, true,
        [&](std::uint16_t expert, ExpertTruth& truth, std::span<const RowNumber> numbers) {
            std::set<Part> voted;  // one row of each part
            for (const auto& [part, i] : numbers) {
                if (!voted.insert(part).second) { continue; }
                const std::span<const float> row = row_at(rows.at(part), i, shape_of(part, layer, input).n);
                const auto fit = truth.recognise(product_of(part), row_of(part, i, layer, input).input, row);
                const std::lock_guard lock(mutex);
                votes[part][expert] = fit.rounding;
            }
        }));
    std::map<Part, FfnRounding> roundings;
    for (const auto& [part, all] : votes) {
        std::ptrdiff_t most = 0;
        for (const auto& [expert, vote] : all) {
            const auto n_like = std::ranges::count(all, vote, [](const auto& each) { return each.second; });
            if (n_like > most) {
                most = n_like;
                roundings[part] = vote;
            }
        }
    }
    // Rows of 16 bits may be added up in 32 or in 16; a row that by chance agrees with both does not tell.
    const bool sums_too = std::ranges::all_of(roundings, [](const auto& entry) {
        return !product_of(entry.first) || entry.second.input == Rounding::f16_sums;
    });
    for (auto& [part, rounding] : roundings) {
        if (!product_of(part) && sums_too && rounding == FfnRounding{Rounding::f16, Rounding::f16}) {
            rounding = {Rounding::f16_sums, Rounding::f16_sums};
        }
    }
    return roundings;
}

// Against the sums of the device's own rows, in double precision.
PartFindings judge_sums(const MoeLayer& layer, const ProbeInput& input, const ProbeRows& rows) {
    PartFindings findings;
    const std::size_t n = layer.n_embd;
    const std::vector<double> expected = sums_of(rows.at(Part::batch), layer, input);
    for (std::size_t t = 0; t < input.n_tokens; ++t) {
        const std::span<const float> got = row_at(rows.at(Part::sums), t, n);
        RowFit fit;
        fit.difference = *expert::compare(std::span<const double>(std::vector<double>(got.begin(), got.end())),
                                          std::span<const double>(expected).subspan(t * n, n));
        fit.tolerance = kSumTolerance;
        fit.decide(std::span<const double>(expected).subspan(t * n, n));
        add_row(findings, fit, t, 0);
    }
    return findings;
}

}  // namespace

std::vector<FfnRounding> possible_roundings(const MoeLayer& layer, std::optional<Role> product) {
    FfnRounding usual;
    for (const model::ExpertTensor& tensor : layer.tensors) {
        if (!model::is_weight(tensor.role) || (product && tensor.role != *product)) { continue; }
        const Rounding rounding = usual_rounding(tensor.type);
        if (product || tensor.role != Role::down) { usual.input = rounding; }
        if (product || tensor.role == Role::down) { usual.inner = rounding; }
    }
    std::vector<FfnRounding> all{usual};
    const auto add = [&](FfnRounding rounding) {
        bool possible = true;
        for (const Role weight : {Role::gate, Role::up, Role::gate_up, Role::down}) {
            if (product && weight != *product) { continue; }
            const bool is_inner = !product && weight == Role::down;
            possible = possible && is_possible(layer, weight, is_inner ? rounding.inner : rounding.input);
        }
        if (possible && rounding != usual) { all.push_back(rounding); }
    };
    for (const Rounding each : expert::kRoundings) { add({each, each}); }
    const bool mixture = is_mixture(layer);
    for (const Rounding input : expert::kRoundings) {
        for (const Rounding inner : expert::kRoundings) {
            if (!product && input != inner && mixture) { add({input, inner}); }
        }
    }
    return all;
}

Result<ExpertTruth> ExpertTruth::make(const MoeLayer& layer, ByteView slice) {
    LINKCPP_TRY(ReferenceExpert expert, ReferenceExpert::make(layer, slice));
    return ExpertTruth(layer, std::move(expert));
}

void RowFit::decide(std::span<const double> truth) {
    const bool is_finite = std::ranges::all_of(truth, [](double x) { return std::isfinite(x); });
    // Beside a zero any number is infinitely large; one that a device may as well have flushed to zero is none.
    const bool is_zero =
        difference.finite && difference.max_abs <= static_cast<double>(std::numeric_limits<float>::min());
    holds = !is_finite || is_zero || tolerance.holds(difference);
}

const ExpertTruth::Last& ExpertTruth::truth(std::optional<Role> product, std::span<const float> input,
                                            FfnRounding rounding) {
    Last& last = product ? product_ : ffn_;
    if (last.input == input.data() && last.product == product && last.rounding == rounding) { return last; }
    last = {.input = input.data(), .product = product, .rounding = rounding};
    const std::vector<double> exact(input.begin(), input.end());
    last.flip = flip_of(rounding.input, input);
    if (product) {
        last.row = expert_.multiply(*product, exact, rounding.input);
        return last;
    }
    const std::vector<double> inner = expert_.inner(exact, rounding.input);
    const std::vector<float> stored(inner.begin(), inner.end());
    last.flip = kFlipThroughFfn * last.flip + flip_of(rounding.inner, stored);
    last.row = expert_.outer(inner, rounding.inner);
    return last;
}

const std::vector<double>& ExpertTruth::row(std::optional<Role> product, std::span<const float> input,
                                            FfnRounding rounding) {
    return truth(product, input, rounding).row;
}

RowFit ExpertTruth::recognise(std::optional<Role> product, std::span<const float> input, std::span<const float> row) {
    RowFit best;
    for (const FfnRounding rounding : possible_roundings(layer_, product)) {
        const RowFit each = fit(product, input, row, rounding);
        const std::pair rank{!each.holds, each.difference.relative_l2};
        if (best.difference.n == 0 || rank < std::pair{!best.holds, best.difference.relative_l2}) { best = each; }
        // Where the first is far off, no other is near.
        if (each.is_exact() || !(each.difference.relative_l2 < kBeyondRounding)) { break; }
    }
    return best;
}

RowFit ExpertTruth::fit(std::optional<Role> product, std::span<const float> input, std::span<const float> row,
                        FfnRounding rounding) {
    const Last& expected = truth(product, input, rounding);
    RowFit fit{.rounding = rounding};
    fit.tolerance = with_flips(tolerance_of(layer_, product, rounding, rounding), expected.flip);
    const std::vector<double> got(row.begin(), row.end());
    if (const auto difference = expert::compare(std::span<const double>(got), std::span<const double>(expected.row))) {
        fit.difference = *difference;
        fit.decide(expected.row);
    }
    return fit;
}

bool Findings::passed() const {
    return !parts.empty() && std::ranges::all_of(parts, [](const auto& part) { return part.second.n_wrong == 0; });
}

std::string to_string(const RowFit& fit) {
    if (!fit.difference.finite) { return "with numbers that are not finite"; }
    const expert::Difference& off = fit.difference;
    // Small enough, and yet not held: then it is the way in which it is spread.
    const bool is_small =
        off.relative_l2 <= fit.tolerance.relative_l2 && off.relative_max <= fit.tolerance.relative_max;
    return fmt::format("off by {:.2e} of its length (tolerance {:.0e}), {:.2e} at one place ({:.0e}){}",
                       off.relative_l2, fit.tolerance.relative_l2, off.relative_max, fit.tolerance.relative_max,
                       is_small && !fit.holds ? ", which is little, but not spread as rounding spreads it" : "");
}

std::map<Part, FfnRounding> Findings::roundings() const {
    std::map<Part, FfnRounding> result;
    for (const auto& [part, findings] : parts) {
        if (part != Part::sums && findings.n_wrong == 0) { result[part] = findings.rounding; }
    }
    return result;
}

std::string Findings::why() const {
    constexpr std::size_t kNamed = 2;
    std::vector<std::pair<Part, const PartFindings*>> wrong;
    for (const auto& [part, findings] : parts) {
        if (findings.n_wrong != 0) { wrong.emplace_back(part, &findings); }
    }
    std::ranges::stable_sort(wrong, std::greater<>(), [](const auto& entry) {
        return entry.second->worst.tolerance.share(entry.second->worst.difference);
    });
    std::string text;
    for (std::size_t i = 0; i < std::min(wrong.size(), kNamed); ++i) {
        const auto& [part, findings] = wrong[i];
        if (!text.empty()) { text += "; "; }
        text +=
            fmt::format("{}: {} of {} wrong, ", to_string(part), counted(findings->n_wrong, "row"), findings->n_rows);
        if (part != Part::sums) { text += fmt::format("the worst of expert {}, ", findings->worst_expert); }
        text += to_string(findings->worst);
    }
    if (wrong.size() > kNamed) { text += fmt::format("; and {}", counted(wrong.size() - kNamed, "other part")); }
    return text;
}

Result<Findings> judge(const MoeLayer& layer, const SliceReader& read, const ProbeInput& input, const ProbeRows& rows,
                       JudgeOptions options) {
    for (const Part part : parts_of(layer)) {
        const PartShape shape = shape_of(part, layer, input);
        const auto found = rows.find(part);
        if (found == rows.end() || found->second.size() != shape.n * shape.n_rows) {
            return fail(ErrorKind::invalid, "probe: expected {} numbers of {}, got {}", shape.n * shape.n_rows,
                        to_string(part), found == rows.end() ? 0 : found->second.size());
        }
    }
    KnownTruths known;
    LINKCPP_TRY(const auto roundings, recognise(layer, read, input, rows, options.n_threads, known));
    Findings findings;
    std::mutex mutex;  // guards findings
    LINKCPP_CHECK(for_each_expert(
        layer, read, input, options, known, false,
        [&](std::uint16_t expert, ExpertTruth& truth, std::span<const RowNumber> numbers) {
            for (const auto& [part, i] : numbers) {
                const std::span<const float> row = row_at(rows.at(part), i, shape_of(part, layer, input).n);
                const RowFit fit =
                    truth.fit(product_of(part), row_of(part, i, layer, input).input, row, roundings.at(part));
                const std::lock_guard lock(mutex);
                findings.parts[part].rounding = fit.rounding;
                add_row(findings.parts[part], fit, i, expert);
            }
        }));
    if (rows.contains(Part::sums)) { findings.parts[Part::sums] = judge_sums(layer, input, rows); }
    return findings;
}

Result<ProbeRows> run_reference(const MoeLayer& layer, const SliceReader& read, const ProbeInput& input,
                                FfnRounding rounding, unsigned n_threads) {
    ProbeRows result;
    for (const Part part : parts_of(layer)) {
        const PartShape shape = shape_of(part, layer, input);
        result[part].resize(shape.n * shape.n_rows);
    }
    // Each thread writes rows of its own.
    KnownTruths none;
    LINKCPP_CHECK(for_each_expert(
        layer, read, input, {.n_threads = n_threads}, none, false,
        [&](std::uint16_t, ExpertTruth& truth, std::span<const RowNumber> numbers) {
            for (const auto& [part, i] : numbers) {
                if (part == Part::single) { continue; }  // as one request, below
                const std::size_t n = shape_of(part, layer, input).n;
                FfnRounding its = rounding;
                if (part == Part::down) { its.input = rounding.inner; }
                const std::vector<double>& row = truth.row(product_of(part), row_of(part, i, layer, input).input, its);
                std::ranges::transform(row, result.at(part).begin() + static_cast<std::ptrdiff_t>(i * n),
                                       [](double x) { return static_cast<float>(x); });
            }
        }));
    if (const auto sums = result.find(Part::sums); sums != result.end()) {
        result.at(Part::single) = result.at(Part::batch);
        std::ranges::transform(sums_of(result.at(Part::batch), layer, input), sums->second.begin(),
                               [](double x) { return static_cast<float>(x); });
    }
    return result;
}

}  // namespace linkcpp::trust
