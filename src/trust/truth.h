// The truth about a probe's rows: the reference in double precision under the device's own rounding. Which that is
// shows in a few rows of each part; all rows of the part must then agree with it.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "base/error.h"
#include "expert/metrics.h"
#include "expert/reference.h"
#include "trust/probe.h"
#include "trust/tolerances.h"

namespace linkcpp::trust {

// One row against the reference. Where the reference itself is not finite, as with a model that has a NaN, no row is
// wrong.
struct RowFit {
    expert::FfnRounding rounding;  // of a product alone the input's is used
    expert::Difference difference;
    Tolerance tolerance;
    bool holds = false;

    // Fills in `holds`; `truth` is what `difference` was taken from.
    void decide(std::span<const double> truth);
    // So near that no other rounding is.
    bool is_exact() const { return holds && difference.relative_l2 < 1e-6; }
};
// For people: "off by 1.20e-01 of its length (tolerance 1e-05), 3.10e+00 at one place (1e-04)".
std::string to_string(const RowFit& fit);

// One expert. One thread at a time.
class ExpertTruth {
  public:
    // Errors: those of ReferenceExpert::make().
    static Result<ExpertTruth> make(const model::MoeLayer& layer, ByteView slice);

    // What it makes of `input`, of its whole FFN or by one weight alone.
    const std::vector<double>& row(std::optional<model::Role> product, std::span<const float> input,
                                   expert::FfnRounding rounding);
    // How far a number of it that was rounded to its other neighbour moves it; see with_flips().
    double flip(std::optional<model::Role> product, std::span<const float> input, expert::FfnRounding rounding) {
        return truth(product, input, rounding).flip;
    }
    // How far a device's row is from that.
    RowFit fit(std::optional<model::Role> product, std::span<const float> input, std::span<const float> row,
               expert::FfnRounding rounding);
    // The same under the rounding that the row agrees with, of several the nearest; where it agrees with none, under
    // the one that it is nearest to.
    RowFit recognise(std::optional<model::Role> product, std::span<const float> input, std::span<const float> row);

  private:
    // The last row of the FFN, which several parts have in common, and of a product.
    struct Last {
        const float* input = nullptr;
        std::optional<model::Role> product;
        expert::FfnRounding rounding;
        std::vector<double> row;
        double flip = 0;  // see with_flips()
    };

    ExpertTruth(const model::MoeLayer& layer, expert::ReferenceExpert expert)
        : layer_(layer), expert_(std::move(expert)) {}
    const Last& truth(std::optional<model::Role> product, std::span<const float> input, expert::FfnRounding rounding);

    const model::MoeLayer& layer_;
    expert::ReferenceExpert expert_;
    Last ffn_;
    Last product_;
};

// The roundings that devices may have for such weights: of a product, or of the whole FFN. What is likely comes first:
// what ggml's CPU kernels do, one rounding for all products, then mixtures.
std::vector<expert::FfnRounding> possible_roundings(const model::MoeLayer& layer, std::optional<model::Role> product);

struct PartFindings {
    expert::FfnRounding rounding;  // the one that its rows are nearest to
    RowFit worst;
    std::size_t worst_row = 0;
    std::uint16_t worst_expert = 0;
    std::size_t n_rows = 0;
    std::size_t n_wrong = 0;
};

struct Findings {
    std::map<Part, PartFindings> parts;

    bool passed() const;
    // Of the parts in which every row agrees with it.
    std::map<Part, expert::FfnRounding> roundings() const;
    // For people: what is wrong where, and by how much, the worst first; empty when nothing is.
    std::string why() const;
};

// Reads the slice of an expert of the layer.
using SliceReader = std::function<Result<Bytes>(std::uint32_t expert)>;

struct JudgeOptions {
    unsigned n_threads = 0;     // 0: all processors
    std::size_t n_experts = 0;  // look at so many of the experts only, the crowd's first; 0: all of them
    bool quiet = false;         // without a line of progress
};

// Errors: those of `read`, invalid (`rows` lack a part, or have another length).
Result<Findings> judge(const model::MoeLayer& layer, const SliceReader& read, const ProbeInput& input,
                       const ProbeRows& rows, JudgeOptions options);

// What the reference itself makes of the input, under one rounding.
Result<ProbeRows> run_reference(const model::MoeLayer& layer, const SliceReader& read, const ProbeInput& input,
                                expert::FfnRounding rounding, unsigned n_threads);

}  // namespace linkcpp::trust
