#include "trust/ruling.h"

#include <cmath>

namespace linkcpp::trust {
namespace {

double length_of(std::span<const double> row) {
    double squares = 0;
    for (const double x : row) { squares += x * x; }
    return std::sqrt(squares);
}

// The truth about a sum under one rounding, and how far a right one may be from it.
struct SumTruth {
    std::vector<double> sum;
    Tolerance tolerance;
};

SumTruth truth_of(const model::MoeLayer& layer, std::span<ExpertTruth> experts, std::span<const Term> terms,
                  PairInput input, expert::FfnRounding rounding, Tolerance more) {
    SumTruth truth;
    double lengths = 0;
    double flip = 0;
    for (std::size_t i = 0; i < terms.size(); ++i) {
        const std::vector<double>& row = experts[i].row(input.product, input.row, rounding);
        const auto weight = static_cast<double>(terms[i].weight);
        truth.sum.resize(row.size());
        for (std::size_t j = 0; j < row.size(); ++j) { truth.sum[j] += row[j] * weight; }
        lengths += length_of(row) * std::abs(weight);
        flip = std::max(flip, experts[i].flip(input.product, input.row, rounding));
    }
    // Rows may cancel each other; what they are off by does not.
    const double sum_length = length_of(truth.sum);
    const double factor = sum_length > 0 ? std::max(1.0, lengths / sum_length) : 1;
    truth.tolerance = with_flips(tolerance_of(layer, input.product, rounding, rounding), flip);
    truth.tolerance.relative_l2 = truth.tolerance.relative_l2 * factor + more.relative_l2;
    truth.tolerance.relative_max = truth.tolerance.relative_max * factor + more.relative_max;
    return truth;
}

}  // namespace

Result<std::vector<RowFit>> rule(const model::MoeLayer& layer, std::span<const Term> terms, PairInput input,
                                 std::span<const std::span<const float>> rows, Tolerance more) {
    const model::Widths widths = model::widths_of(layer, input.product);
    if (widths.n_in == 0 || input.row.size() != widths.n_in || terms.empty()) {
        return fail(ErrorKind::invalid,
                    "ruling: expected a row of {} and the experts it went through, got one of {} and {}", widths.n_in,
                    input.row.size(), terms.size());
    }
    if (!input.product && layer.activation.kind == model::Activation::unknown) {
        return fail(ErrorKind::invalid, "ruling: nobody has described the whole FFN of layer {}",
                    model::layer_name(layer.layer));
    }
    std::vector<ExpertTruth> experts;
    for (const Term& term : terms) {
        LINKCPP_TRY(ExpertTruth truth, ExpertTruth::make(layer, term.slice));
        experts.push_back(std::move(truth));
    }
    std::vector<RowFit> fits(rows.size());
    for (const std::span<const float> row : rows) {
        if (row.size() != widths.n_out) {
            return fail(ErrorKind::invalid, "ruling: expected a result of {}, got one of {}", widths.n_out, row.size());
        }
    }
    for (const expert::FfnRounding rounding : possible_roundings(layer, input.product)) {
        const SumTruth truth = truth_of(layer, experts, terms, input, rounding, more);
        for (std::size_t i = 0; i < rows.size(); ++i) {
            RowFit fit{.rounding = rounding, .difference = {}, .tolerance = truth.tolerance, .holds = false};
            const std::vector<double> got(rows[i].begin(), rows[i].end());
            fit.difference = *expert::compare(std::span<const double>(got), std::span<const double>(truth.sum));
            fit.decide(truth.sum);
            const bool is_nearer = std::pair(!fit.holds, fit.difference.relative_l2) <
                                   std::pair(!fits[i].holds, fits[i].difference.relative_l2);
            if (fits[i].difference.n == 0 || is_nearer) { fits[i] = fit; }
        }
        // The usual rounding comes first and is nearly always the one.
        if (std::ranges::all_of(fits, [](const RowFit& fit) { return fit.is_exact(); })) { break; }
    }
    return fits;
}

}  // namespace linkcpp::trust
