#include "model/parallel.h"

#include <atomic>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "base/platform.h"

namespace linkcpp::model {

Status for_all(std::size_t n, unsigned n_threads, Progress& progress,
               const std::function<Result<std::uint64_t>(std::size_t)>& work) {
    std::atomic<std::size_t> next = 0;
    std::atomic<std::uint64_t> done = 0;
    std::atomic<bool> stop = false;
    std::mutex mutex;  // guards error
    std::optional<Error> error;

    const auto take_items = [&](bool draws) {
        while (!stop) {
            const std::size_t i = next++;
            if (i >= n) { return; }
            auto amount = work(i);
            if (!amount) {
                const std::scoped_lock lock(mutex);
                if (!error) { error = std::move(amount).error(); }
                stop = true;
                return;
            }
            done += *amount;
            if (draws) { progress.set(done); }
        }
    };
    {
        std::vector<std::jthread> others;
        try {
            const unsigned wanted = n_threads == 0 ? n_processors() : n_threads;
            for (unsigned i = 1; i < wanted && i < n; ++i) { others.emplace_back(take_items, false); }
        } catch (const std::system_error&) {
            // Fewer threads do the same work.
        }
        take_items(true);
    }
    progress.set(done);
    if (error) { return std::unexpected(*std::move(error)); }
    return {};
}

}  // namespace linkcpp::model
