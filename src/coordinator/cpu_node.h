// Single nodes on data in host memory: the tail behind the experts, and what is between the products of a block that
// nobody has described.
#pragma once

#include <mutex>

#include <ggml-cpp.h>
#include <ggml.h>

#include "base/error.h"

namespace linkcpp::coordinator {

// From any thread.
class CpuNodes {
  public:
    // Multiplications and additions are done directly, rounding as ggml's CPU backend does: one operation, one
    // rounding. All else by that backend, on this thread. Errors: unsupported, failed.
    Status compute(ggml_tensor* node);

  private:
    Status start();

    std::mutex mutex_;  // guards all that follows
    ggml_backend_ptr backend_;
    ggml_context_ptr context_;
    ggml_cgraph* graph_ = nullptr;
};

}  // namespace linkcpp::coordinator
