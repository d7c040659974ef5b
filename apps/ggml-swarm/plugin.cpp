// libggml-swarm.so: the symbol that ggml's registry looks for in a backend module.

#include "coordinator/ggml_backend.h"

extern "C" __attribute__((visibility("default"))) ggml_backend_reg* ggml_backend_init() {
    return linkcpp::coordinator::swarm_registry();
}
