// The same work on many items, on several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "base/error.h"
#include "base/progress.h"

namespace linkcpp::model {

// Calls work(0) to work(n - 1), each once, on `n_threads` threads of which the caller's is one (0: all processors).
// `work` returns the amount by which the progress advances. After the first error no new item is begun; that error is
// returned.
Status for_all(std::size_t n, unsigned n_threads, Progress& progress,
               const std::function<Result<std::uint64_t>(std::size_t)>& work);

}  // namespace linkcpp::model
