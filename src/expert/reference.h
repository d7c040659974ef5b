// The expert FFN in double precision: dequantise, then plain loops. Slow, and the truth that devices are measured by.
#pragma once

#include <span>
#include <vector>

#include "base/error.h"
#include "expert/engine.h"
#include "model/moe.h"

namespace linkcpp::expert {

// One slab as numbers: {columns, rows} in ggml order. Errors: unsupported (a type without dequantisation).
Result<std::vector<float>> dequantise(const model::ExpertTensor& tensor, ByteView slab);

// One slice, dequantised once.
class ReferenceExpert {
  public:
    // Errors: corrupt (slice of another length), unsupported.
    static Result<ReferenceExpert> make(const model::MoeLayer& layer, ByteView slice);

    // h: {n_embd}. out: {n_embd} = down · (silu(gate · h) * (up · h)), every operation in double.
    void compute(std::span<const double> h, std::span<double> out) const;

  private:
    std::size_t n_embd_ = 0;
    std::size_t n_ff_ = 0;
    std::vector<float> gate_;  // {n_embd, n_ff}; the first half of a merged tensor
    std::vector<float> up_;    // {n_embd, n_ff}
    std::vector<float> down_;  // {n_ff, n_embd}
};

}  // namespace linkcpp::expert
