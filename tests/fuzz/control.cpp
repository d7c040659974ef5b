// Control messages, hellos among them, and the sets of slices that they carry.
#include "wire/control.h"

using namespace linkcpp;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const auto message = wire::decode_control({reinterpret_cast<const std::byte*>(data), size});
    if (!message) { return 0; }
    if (const auto* assign = (*message)->body.AsAssign()) {
        (void)wire::decode_digest(assign->model_id);
        (void)wire::decode_slices(assign->slices);
    }
    if (const auto* routes = (*message)->body.AsRoutes()) {
        for (const auto& route : routes->workers) {
            if (route) { (void)wire::decode_slices(route->slices); }
        }
    }
    // What was understood can be said again.
    const Bytes again = wire::encode_control(**message);
    if (!wire::decode_control(again)) { __builtin_trap(); }
    return 0;
}
