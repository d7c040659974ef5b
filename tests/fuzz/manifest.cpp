// Manifests, as a hub sends them.
#include "model/manifest.h"

using namespace linkcpp;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const auto manifest = model::Manifest::from_json({reinterpret_cast<const char*>(data), size});
    if (!manifest) { return 0; }
    const std::string json = manifest->to_json();
    const auto again = model::Manifest::from_json(json);
    if (!again || again->to_json() != json) { __builtin_trap(); }
    for (const model::MoeLayer& layer : manifest->model.layers) {
        (void)layer.slice_bytes();
        for (std::uint32_t expert = 0; expert < std::min(layer.n_expert, 4u); ++expert) {
            (void)manifest->slice(layer.layer, expert);
        }
    }
    return 0;
}
