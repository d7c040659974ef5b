#include "worker/prober.h"

#include "expert/device.h"
#include "trust/probe.h"

namespace linkcpp::worker {

struct Prober::Job {
    std::uint64_t sequence = 0;
    std::shared_ptr<const model::Manifest> manifest;  // keeps the layer
    const model::MoeLayer* layer = nullptr;
    std::uint64_t model = 0;
    trust::ProbeInput input;
    std::vector<trust::Part> parts;
    std::size_t n_done = 0;
};

void Prober::start(const wire::fb::ProbeT& probe, std::shared_ptr<const model::Manifest> manifest,
                   const Digest& model_id) {
    wire::fb::ProbeRowsT refusal;
    refusal.sequence = probe.sequence;
    const model::MoeLayer* layer = manifest ? manifest->model.find(probe.layer) : nullptr;
    if (layer == nullptr) {
        refusal.error = fmt::format("layer {} is not in the manifest", probe.layer);
        return put(std::move(refusal));
    }
    auto input = trust::make_input(*layer, probe.experts, probe.seed, probe.n_tokens);
    if (!input) {
        refusal.error = input.error().message;
        return put(std::move(refusal));
    }
    auto job = std::make_shared<Job>(Job{.sequence = probe.sequence,
                                         .manifest = std::move(manifest),
                                         .layer = layer,
                                         .model = model_id.prefix(),
                                         .input = *std::move(input),
                                         .parts = trust::parts_of(*layer)});
    server_.post([this, job] { compute(job); });
}

void Prober::compute(const std::shared_ptr<Job>& job) {
    const trust::Part part = job->parts[job->n_done++];
    wire::fb::ProbeRowsT result;
    result.sequence = job->sequence;
    result.part = static_cast<std::uint8_t>(part);
    auto rows = trust::run_part(engine_, job->model, *job->layer, job->input, part);
    if (rows) {
        result.rows = *std::move(rows);
        if (job->n_done < job->parts.size()) {
            server_.post([this, job] { compute(job); });
        } else {
            result.driver = expert::driver_libraries();
        }
    } else {
        result.error = rows.error().message;
    }
    put(std::move(result));
}

void Prober::put(wire::fb::ProbeRowsT rows) {
    {
        const std::lock_guard lock(mutex_);
        results_.push_back(std::move(rows));
    }
    done_.signal();
}

std::vector<wire::fb::ProbeRowsT> Prober::take() {
    done_.clear();
    const std::lock_guard lock(mutex_);
    return std::exchange(results_, {});
}

}  // namespace linkcpp::worker
