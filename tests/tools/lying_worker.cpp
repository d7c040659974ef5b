// A worker that computes wrong. One that lies is honest in probes and in its first answers, and then flips one sign in
// one expert's row, in one of every 200 answers on average. A broken one flips a sign in all that it computes, probes
// and all, after AFTER of their requests. It is a worker of this project whose engine is wrapped by the linker
// (CMakeLists.txt): all but its numbers is real.
//
// Usage: lying_worker NAME HONEST_ANSWERS [SHARE]
//        lying_worker NAME broken [AFTER]
// The join line is in LINKCPP_HUB. Prints "lie LAYER EXPERT" for each lie.

#include <cstdio>
#include <cstdlib>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "base/log.h"
#include "base/platform.h"
#include "net/join_line.h"
#include "worker/worker.h"

using namespace linkcpp;

namespace {

double g_share = 1.0 / 200;
long g_honest = 0;
bool g_broken = false;
long g_after = 0;  // probes' requests
std::mt19937_64 g_random{std::random_device{}()};

double chance() {
    return std::uniform_real_distribution<double>(0, 1)(g_random);
}

}  // namespace

// As compilers write compute(), compute_rows() and compute_sums() of Engine.
#define COMPUTE _ZN7linkcpp6expert6Engine7computeERKNS0_5BatchERKSt8functionIFSt8expectedIvNS_5ErrorEERKNS0_7RowPartEEE
#define COMPUTE_ROWS _ZN7linkcpp6expert6Engine12compute_rowsERKNS0_5BatchESt4spanIfLm18446744073709551615EE
#define COMPUTE_SUMS _ZN7linkcpp6expert6Engine12compute_sumsERKNS0_5BatchESt4spanIfLm18446744073709551615EE
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

extern "C" {
Status JOIN(__real_, COMPUTE)(expert::Engine* self, const expert::Batch& batch, const expert::RowSink& sink);
Status JOIN(__wrap_, COMPUTE)(expert::Engine* self, const expert::Batch& batch, const expert::RowSink& sink);
Status JOIN(__real_, COMPUTE_ROWS)(expert::Engine* self, const expert::Batch& batch, std::span<float> out);
Status JOIN(__wrap_, COMPUTE_ROWS)(expert::Engine* self, const expert::Batch& batch, std::span<float> out);
Status JOIN(__real_, COMPUTE_SUMS)(expert::Engine* self, const expert::Batch& batch, std::span<float> out);
Status JOIN(__wrap_, COMPUTE_SUMS)(expert::Engine* self, const expert::Batch& batch, std::span<float> out);

// Answers to coordinators.
Status JOIN(__wrap_, COMPUTE)(expert::Engine* self, const expert::Batch& batch, const expert::RowSink& sink) {
    const bool lies = g_honest-- <= 0 && chance() < g_share && !batch.pairs.empty();
    if (!lies) { return JOIN(__real_, COMPUTE)(self, batch, sink); }
    const std::size_t victim = g_random() % batch.pairs.size();
    return JOIN(__real_, COMPUTE)(self, batch, [&](const expert::RowPart& part) {
        const std::size_t n_rows = part.rows.size() / part.n_out;
        if (victim < part.first || victim >= part.first + n_rows) { return sink(part); }
        std::vector<float> rows(part.rows.begin(), part.rows.end());
        float& number = rows[(victim - part.first) * part.n_out + g_random() % part.n_out];
        number = -number;
        std::printf("lie %u %u\n", batch.layer, unsigned{batch.pairs[victim].expert});
        std::fflush(stdout);
        return sink({part.first, part.n_out, rows});
    });
}

// Answers to probes.
Status JOIN(__wrap_, COMPUTE_ROWS)(expert::Engine* self, const expert::Batch& batch, std::span<float> out) {
    const Status status = JOIN(__real_, COMPUTE_ROWS)(self, batch, out);
    if (g_broken && status && g_after-- <= 0) { out[out.size() / 2] = -out[out.size() / 2]; }
    return status;
}

// Both: partial sums.
Status JOIN(__wrap_, COMPUTE_SUMS)(expert::Engine* self, const expert::Batch& batch, std::span<float> out) {
    const Status status = JOIN(__real_, COMPUTE_SUMS)(self, batch, out);
    if (status && !g_broken && g_honest-- <= 0 && chance() < g_share) {
        float& number = out[g_random() % out.size()];
        number = -number;
        std::printf("lie %u %u\n", batch.layer, unsigned{batch.pairs.front().expert});
        std::fflush(stdout);
    }
    return status;
}
}

namespace {

Status run(const std::string& name) {
    worker::WorkerOptions options;
    options.name = name;
    options.n_threads = 1;
    const char* line = std::getenv("LINKCPP_HUB");
    LINKCPP_TRY(options.hub, net::parse_join_line(line != nullptr ? line : ""));
    LINKCPP_TRY(const std::filesystem::path cache, cache_dir());
    options.store_dir = cache / "slices";
    LINKCPP_TRY(const std::filesystem::path state, state_dir());
    LINKCPP_TRY(net::Identity identity, net::Identity::load_or_make(state, "worker-" + name));
    set_log_name("worker " + name);
    LINKCPP_TRY(const auto running, worker::Worker::make(std::move(options), std::move(identity)));
    return running->run(std::stop_token());
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) {
        std::fprintf(stderr, "usage: lying_worker NAME HONEST_ANSWERS [SHARE] | NAME broken [AFTER]\n");
        return 2;
    }
    g_broken = std::string_view(argv[2]) == "broken";
    g_honest = std::atol(argv[2]);
    if (g_broken) {
        g_share = 1;
        g_after = argc > 3 ? std::atol(argv[3]) : 0;
    } else if (argc > 3) {
        g_share = std::atof(argv[3]);
    }
    if (const Status status = run(argv[1]); !status) {
        std::fprintf(stderr, "%s\n", status.error().message.c_str());
        return 1;
    }
    return 0;
}
