// What llama.cpp makes of the experts of each architecture: the one place that knows architectures by name. It only
// says what to expect: the coordinator compares it with every graph that llama.cpp hands over, and a layer that is
// described wrongly, or not at all, is computed one product at a time.
#pragma once

#include <cstdint>

#include "model/gguf_file.h"
#include "model/moe.h"

namespace linkcpp::model {

// The activation of a layer that has a gate or not, separate from up or merged with it. An architecture without an
// entry is taken to be what most are: SwiGLU with a gate, SiLU without.
ActivationOf activation_of(const GgufFile& file, std::uint32_t layer, bool gated, bool merged);

// Whether the architecture's graph uses tensors of that role where a file has them. Of one without an entry: yes.
bool is_used(std::string_view architecture, Role role);

// Whether there is an entry for it.
bool is_known_architecture(std::string_view architecture);

// Whether the router's weights multiply the experts' input.
bool weights_come_first(std::string_view architecture);

}  // namespace linkcpp::model
