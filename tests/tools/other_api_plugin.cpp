// A stand-in for a swarm plugin that was built for another ggml: the same symbol, the next version of the interface.

#include <ggml-backend-impl.h>

extern "C" __attribute__((visibility("default"))) ggml_backend_reg* ggml_backend_init() {
    static ggml_backend_reg registry = {
        .api_version = GGML_BACKEND_API_VERSION + 1,
        .iface = {.get_name = [](ggml_backend_reg_t) { return "Swarm"; },
                  .get_device_count = [](ggml_backend_reg_t) -> size_t { return 0; },
                  .get_device = [](ggml_backend_reg_t, size_t) -> ggml_backend_dev_t { return nullptr; },
                  .get_proc_address = nullptr},
        .context = nullptr,
    };
    return &registry;
}
