#include "trust/ruling.h"

namespace linkcpp::trust {

Result<std::vector<RowFit>> rule(const model::MoeLayer& layer, ByteView slice, PairInput input,
                                 std::span<const std::span<const float>> rows) {
    const model::Widths widths = model::widths_of(layer, input.product);
    if (widths.n_in == 0 || input.row.size() != widths.n_in) {
        return fail(ErrorKind::invalid, "ruling: expected a row of {}, got one of {}", widths.n_in, input.row.size());
    }
    if (!input.product && layer.activation.kind == model::Activation::unknown) {
        return fail(ErrorKind::invalid, "ruling: nobody has described the whole FFN of layer {}",
                    model::layer_name(layer.layer));
    }
    LINKCPP_TRY(ExpertTruth truth, ExpertTruth::make(layer, slice));
    std::vector<RowFit> fits;
    for (const std::span<const float> row : rows) {
        if (row.size() != widths.n_out) {
            return fail(ErrorKind::invalid, "ruling: expected a result of {}, got one of {}", widths.n_out, row.size());
        }
        fits.push_back(truth.recognise(input.product, input.row, row));
    }
    return fits;
}

}  // namespace linkcpp::trust
