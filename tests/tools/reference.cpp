// The dispatch in double precision, for one test: a worker process computes its experts' rows from a file of slices and
// writes them as float64; the combining process adds them and compares with the sum that one process computes from the
// whole model.
//
//   reference rows SLICES.gguf SEED TOKENS USED OUT.f64     rows of the pairs whose experts the slices hold
//   reference combine MODEL.gguf SEED TOKENS USED ROWS.f64… prints the largest difference and the scale of the outputs
//
// Inputs are made from the seed: h Gaussian, USED different experts a token, weights that add up to 1.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "expert/reference.h"
#include "model/manifest.h"
#include "model/slicer.h"

namespace linkcpp {
namespace {

struct Choice {
    std::uint32_t token;
    std::uint32_t expert;
    double weight;
};

struct Inputs {
    std::vector<double> h;  // {n_embd, n_tokens}
    std::vector<Choice> pairs;
};

Inputs make_inputs(unsigned seed, std::uint32_t n_tokens, std::uint32_t n_used, const model::MoeLayer& layer) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    Inputs inputs;
    inputs.h.resize(std::size_t{n_tokens} * layer.n_embd);
    std::ranges::generate(inputs.h, [&] { return normal(random); });
    for (std::uint32_t t = 0; t < n_tokens; ++t) {
        std::vector<std::uint32_t> experts(layer.n_expert);
        for (std::uint32_t e = 0; e < layer.n_expert; ++e) { experts[e] = e; }
        std::ranges::shuffle(experts, random);
        double sum = 0;
        std::vector<double> weights(n_used);
        for (double& w : weights) { sum += w = std::exp(normal(random)); }
        for (std::uint32_t k = 0; k < n_used; ++k) { inputs.pairs.push_back({t, experts[k], weights[k] / sum}); }
    }
    return inputs;
}

// Rows of the pairs that `slice` has an expert for, in the pairs' order; each expert is dequantised once.
Result<std::map<std::size_t, std::vector<double>>> compute(const Inputs& inputs, const model::MoeLayer& layer,
                                                           const std::function<Result<Bytes>(std::uint32_t)>& slice) {
    std::map<std::uint32_t, std::vector<std::size_t>> by_expert;
    for (std::size_t i = 0; i < inputs.pairs.size(); ++i) { by_expert[inputs.pairs[i].expert].push_back(i); }
    std::map<std::size_t, std::vector<double>> rows;
    for (const auto& [expert, pairs] : by_expert) {
        const auto bytes = slice(expert);
        if (!bytes && bytes.error().kind == ErrorKind::not_found) { continue; }
        if (!bytes) { return std::unexpected(bytes.error()); }
        LINKCPP_TRY(const auto reference, expert::ReferenceExpert::make(layer, *bytes));
        for (const std::size_t i : pairs) {
            rows[i].resize(layer.n_embd);
            reference.compute(
                std::span(inputs.h).subspan(inputs.pairs[i].token * std::size_t{layer.n_embd}, layer.n_embd), rows[i]);
        }
    }
    return rows;
}

Status write_rows(const std::string& out, const std::map<std::size_t, std::vector<double>>& rows) {
    std::ofstream file(out, std::ios::binary);
    for (const auto& [pair, row] : rows) {
        const auto index = static_cast<double>(pair);
        file.write(reinterpret_cast<const char*>(&index), sizeof index);
        file.write(reinterpret_cast<const char*>(row.data()),
                   static_cast<std::streamsize>(row.size() * sizeof(double)));
    }
    return file ? Status() : Status(fail(ErrorKind::failed, "{}: cannot be written", out));
}

Status combine(const Inputs& inputs, const model::MoeLayer& layer,
               const std::map<std::size_t, std::vector<double>>& whole, std::span<char*> files) {
    const std::size_t n = inputs.h.size();
    std::vector<double> one(n);
    for (const auto& [i, row] : whole) {
        for (std::size_t j = 0; j < row.size(); ++j) {
            one[inputs.pairs[i].token * std::size_t{layer.n_embd} + j] += inputs.pairs[i].weight * row[j];
        }
    }
    // Each worker's sum, then the sum of the sums.
    std::vector<double> combined(n);
    std::size_t n_pairs = 0;
    for (const char* path : files) {
        std::ifstream file(path, std::ios::binary);
        std::vector<double> sum(n);
        std::vector<double> row(layer.n_embd + 1);
        while (
            file.read(reinterpret_cast<char*>(row.data()), static_cast<std::streamsize>(row.size() * sizeof(double)))) {
            const Choice& pair = inputs.pairs.at(static_cast<std::size_t>(row[0]));
            for (std::size_t j = 0; j < layer.n_embd; ++j) {
                sum[pair.token * std::size_t{layer.n_embd} + j] += pair.weight * row[j + 1];
            }
            ++n_pairs;
        }
        for (std::size_t j = 0; j < n; ++j) { combined[j] += sum[j]; }
    }
    double worst = 0;
    double energy = 0;
    for (std::size_t j = 0; j < n; ++j) {
        worst = std::max(worst, std::abs(one[j] - combined[j]));
        energy += one[j] * one[j];
    }
    fmt::print("values {} pairs {} of {} rms {:.6f} max_abs_difference {:.3e}\n", n, n_pairs, inputs.pairs.size(),
               std::sqrt(energy / static_cast<double>(n)), worst);
    return {};
}

Status run(std::span<char*> arguments) {
    if (arguments.size() < 7) { return fail(ErrorKind::invalid, "see the comment on top of the source"); }
    const std::string mode = arguments[1];
    const auto seed = static_cast<unsigned>(std::atoi(arguments[3]));
    const auto n_tokens = static_cast<std::uint32_t>(std::atoi(arguments[4]));
    const auto n_used = static_cast<std::uint32_t>(std::atoi(arguments[5]));
    if (mode == "rows") {
        LINKCPP_TRY(const model::SliceFile slices, model::open_slices(arguments[2]));
        const Inputs inputs = make_inputs(seed, n_tokens, n_used, slices.layer);
        LINKCPP_TRY(const auto rows, compute(inputs, slices.layer, [&](std::uint32_t expert) -> Result<Bytes> {
                        const auto found = std::ranges::find(slices.experts, expert);
                        if (found == slices.experts.end()) { return fail(ErrorKind::not_found, "not held"); }
                        return slices.read(static_cast<std::size_t>(found - slices.experts.begin()));
                    }));
        return write_rows(arguments[6], rows);
    }
    LINKCPP_TRY(const model::GgufFile file, model::GgufFile::open(arguments[2]));
    LINKCPP_TRY(const model::MoeModel model, model::read_moe(file));
    const model::MoeLayer& layer = model.layers.at(0);
    const Inputs inputs = make_inputs(seed, n_tokens, n_used, layer);
    LINKCPP_TRY(const auto whole,
                compute(inputs, layer, [&](std::uint32_t e) { return model::read_slice(file, layer, e); }));
    return combine(inputs, layer, whole, arguments.subspan(6));
}

}  // namespace
}  // namespace linkcpp

int main(int argc, char** argv) {
    const linkcpp::Status status = linkcpp::run({argv, static_cast<std::size_t>(argc)});
    if (!status) { fmt::print(stderr, "reference: {}\n", status.error().message); }
    return status ? 0 : 1;
}
