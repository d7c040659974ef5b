// The expert FFN in double precision: dequantise, then plain loops. Slow, and the truth that devices are measured by.
#pragma once

#include <map>
#include <span>
#include <vector>

#include "base/error.h"
#include "expert/engine.h"
#include "model/moe.h"

namespace linkcpp::expert {

// One slab as numbers, in ggml order. Errors: unsupported (a type without dequantisation).
Result<std::vector<float>> dequantise(const model::ExpertTensor& tensor, ByteView slab);

// One slice, dequantised once.
class ReferenceExpert {
  public:
    // Errors: corrupt (slice of another length), unsupported.
    static Result<ReferenceExpert> make(const model::MoeLayer& layer, ByteView slice);

    // h: {n_embd}. out: {n_embd}, what ffn.h builds, every operation in double; of an unknown activation zeros.
    void compute(std::span<const double> h, std::span<double> out) const;

  private:
    // scale * (weight · rows) + bias
    std::vector<double> project(model::Role weight, model::Role scale, model::Role bias,
                                std::span<const double> rows) const;
    std::vector<double> activated(std::span<const double> h) const;

    model::ActivationOf activation_;
    std::map<model::Role, std::vector<float>> values_;
};

}  // namespace linkcpp::expert
