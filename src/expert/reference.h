// The expert FFN in double precision: dequantise, then plain loops. Slow, and the truth that devices are measured by:
// plain, or with the one thing that right devices do differently, their rounding of what they multiply (rounding.h).
#pragma once

#include <map>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/raw_buffer.h"
#include "expert/engine.h"
#include "expert/rounding.h"
#include "model/moe.h"

namespace linkcpp::expert {

// One slab as numbers, in ggml order. Errors: unsupported (a type without dequantisation).
Result<RawFloats> dequantise(const model::ExpertTensor& tensor, ByteView slab);

// One slice, dequantised once.
class ReferenceExpert {
  public:
    // Errors: corrupt (slice of another length), unsupported.
    static Result<ReferenceExpert> make(const model::MoeLayer& layer, ByteView slice);

    // h: {n_embd}. out: {n_embd}, what ffn.h builds, every operation in double; of an unknown activation zeros.
    void compute(std::span<const double> h, std::span<double> out, FfnRounding rounding = {}) const;
    // Its two halves: what down multiplies, {n_ff}, and what comes of it.
    std::vector<double> inner(std::span<const double> h, Rounding rounding) const;
    std::vector<double> outer(std::span<const double> inner, Rounding rounding) const;

    // The product by one of the layer's weights alone, whose rows are the weight's.
    std::vector<double> multiply(model::Role weight, std::span<const double> row,
                                 Rounding rounding = Rounding::none) const;

  private:
    // scale * (weight · row) + bias
    std::vector<double> project(model::Role weight, model::Role scale, model::Role bias, std::span<const double> row,
                                Rounding rounding) const;

    model::ActivationOf activation_;
    std::map<model::Role, RawFloats> values_;
};

}  // namespace linkcpp::expert
