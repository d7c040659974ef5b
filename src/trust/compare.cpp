#include "trust/compare.h"

#include <algorithm>
#include <cmath>

namespace linkcpp::trust {
namespace {

using expert::FfnRounding;

Status check_same_probe(const Record& a, const Record& b) {
    const auto differ = [](std::string_view what, const auto& x, const auto& y) {
        return fail(ErrorKind::invalid, "they are not of one probe: {} {} and {}", what, x, y);
    };
    const model::MoeLayer first = a.layer();
    const model::MoeLayer second = b.layer();
    if (first.layer != second.layer) { return differ("layers", first.layer, second.layer); }
    if (a.seed != b.seed) { return differ("seeds", a.seed, b.seed); }
    if (a.n_tokens != b.n_tokens) { return differ("tokens", a.n_tokens, b.n_tokens); }
    if (first != second) {
        return fail(ErrorKind::invalid, "they are not of one probe: the layer's shapes or types differ");
    }
    if (a.experts != b.experts || a.manifest.slices != b.manifest.slices) {
        return fail(ErrorKind::invalid, "they are not of one probe: the slices differ");
    }
    return {};
}

// What kind of rows a part's are, for the tolerance.
FfnRounding rounding_of(const Record& record, Part part) {
    const auto found = record.roundings.find(part == Part::sums ? Part::batch : part);
    return found == record.roundings.end() ? FfnRounding{} : found->second;
}

// Of a row of normally distributed numbers, and of the inner row of an FFN, whose distribution has longer tails: its
// largest number in units of its root mean square, at most.
constexpr double kLargestOfRow = 4;
constexpr double kLargestOfInner = 12;
double usual_flip(expert::Rounding rounding, double largest, std::size_t n) {
    const std::vector<float> one{static_cast<float>(largest)};
    return expert::largest_step(rounding, one) / std::sqrt(static_cast<double>(n));
}

Tolerance tolerance_for(Part part, const model::MoeLayer& layer, const FfnRounding& a, const FfnRounding& b) {
    const auto product = product_of(part);
    const model::Widths widths = model::widths_of(layer, product);
    double flip = a.input == b.input ? usual_flip(a.input, kLargestOfRow, widths.n_in) : 0;
    if (!product) {
        flip = kFlipThroughFfn * flip + (a.inner == b.inner ? usual_flip(a.inner, kLargestOfInner, layer.n_ff) : 0);
    }
    return with_flips(tolerance_of(layer, product, a, b), flip);
}

}  // namespace

std::string_view to_string(Verdict verdict) {
    switch (verdict) {
        case Verdict::identical: return "bit-identical";
        case Verdict::equivalent: return "equivalent";
        case Verdict::different: return "different";
    }
    return "unknown";
}

Result<Comparison> compare(const Record& a, const Record& b) {
    LINKCPP_CHECK(check_same_probe(a, b));
    const model::MoeLayer layer = a.layer();
    LINKCPP_TRY(const ProbeInput input, a.input());
    Comparison comparison{.verdict = Verdict::identical};
    double decisive = -1;
    for (const Part part : parts_of(layer)) {
        const std::vector<float>& x = a.rows.at(part);
        const std::vector<float>& y = b.rows.at(part);
        PartComparison& result = comparison.parts[part];
        LINKCPP_TRY(result.all, expert::compare(std::span<const float>(x), std::span<const float>(y)));
        result.tolerance = tolerance_for(part, layer, rounding_of(a, part), rounding_of(b, part));
        result.verdict = result.all.identical && result.all.finite ? Verdict::identical : Verdict::equivalent;
        const PartShape shape = shape_of(part, layer, input);
        double worst = -1;
        for (std::size_t i = 0; i < shape.n_rows; ++i) {
            LINKCPP_TRY(const expert::Difference row,
                        expert::compare(std::span<const float>(x).subspan(i * shape.n, shape.n),
                                        std::span<const float>(y).subspan(i * shape.n, shape.n)));
            if (!result.tolerance.holds(row)) { result.verdict = Verdict::different; }
            if (const double share = result.tolerance.share(row); share > worst) {
                worst = share;
                result.worst = row;
                result.worst_row = i;
            }
        }
        comparison.verdict = std::max(comparison.verdict, result.verdict);
        if (worst > decisive) {
            decisive = worst;
            comparison.decisive = part;
        }
    }
    return comparison;
}

}  // namespace linkcpp::trust
