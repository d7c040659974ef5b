// The seam to llama.cpp: a ggml backend "Swarm" with one device of type ACCEL, into whose buffer type llama.cpp puts
// every routed expert tensor, and which computes expert blocks by dispatching them to workers.
//
// Settings come from the environment (docs/configuration.md lists them): LINKCPP_HUB and the rest. Without LINKCPP_HUB
// the device claims nothing and the program runs as if the plugin were not there.
//
// Nothing here may end the host process: no exception and no failed check leaves this file, whatever a peer, a file or
// a user does. What cannot be computed is GGML_STATUS_FAILED.
#pragma once

struct ggml_backend_reg;

namespace linkcpp::coordinator {

// The registry entry; made at the first call, never freed (ggml keeps it until the process ends).
ggml_backend_reg* swarm_registry();

}  // namespace linkcpp::coordinator
