#include "hub/swarm.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "hub/find_worker.h"

namespace linkcpp::hub {
namespace {

namespace fb = wire::fb;

constexpr int kMaxRetryDoublings = 5;
constexpr std::size_t kMaxError = 1000;  // bytes of what a worker says

plan::Holdings combine(const plan::Holdings& a, const plan::Holdings& b, const auto& keep) {
    plan::Holdings out = a;
    for (std::size_t layer = 0; layer < out.size(); ++layer) {
        for (std::size_t e = 0; e < out[layer].size(); ++e) {
            out[layer][e] = keep(a[layer][e], layer < b.size() && b[layer][e], layer, e);
        }
    }
    return out;
}

plan::Holdings both(const plan::Holdings& a, const plan::Holdings& b) {
    return combine(a, b, [](bool x, bool y, std::size_t, std::size_t) { return x && y; });
}

}  // namespace

Swarm::Swarm(const model::Manifest& manifest, const Digest& model_id, Options options)
    : model_(manifest.model), model_id_(model_id), options_(options) {}

void Swarm::remember(std::vector<RememberedWorker> workers, TimePoint now) {
    for (RememberedWorker& known : workers) {
        WorkerRecord& worker = workers_[known.id];
        worker.id = known.id;
        worker.hello.name = std::move(known.name);
        worker.hello.memory_bytes = known.memory_bytes;
        worker.share = std::move(known.share);
        worker.drained = known.drained;
        worker.assigned = worker.ready = worker.proven = plan::nothing(model_);
        worker.left_at = now + options_.restart_grace - options_.grace;
        placed_ = true;
    }
    first_join_ = now;
}

void Swarm::joined(const std::string& id, const fb::HelloT& hello, TimePoint now) {
    if (workers_.empty()) { first_join_ = now; }
    const auto [entry, is_new] = workers_.try_emplace(id);
    WorkerRecord& worker = entry->second;
    if (is_new) {
        worker.id = id;
        worker.share = worker.assigned = plan::nothing(model_);
    }
    // Whoever it was before, it holds nothing until it says so, and can do nothing until it has shown it.
    worker.heard = false;
    worker.must_assign = true;
    worker.ready = worker.proven = plan::nothing(model_);
    worker.hello = hello;
    worker.hello.token.clear();
    worker.connected = true;
    worker.seen_at = now;
    worker.shard = {};
    worker.retry_at = {};
    worker.told_epoch = 0;
    // It gets its assignment again under a new epoch; placement only changes for a new one.
    worker.assigned = plan::nothing(model_);
    must_place_ = true;
    changed_at_ = now;
}

void Swarm::left(const std::string& id, TimePoint now) {
    const auto found = workers_.find(id);
    if (found == workers_.end() || !found->second.connected) { return; }
    found->second.connected = false;
    found->second.left_at = now;
    found->second.ready = found->second.proven = plan::nothing(model_);
}

void Swarm::said_goodbye(const std::string& id, TimePoint now) {
    if (workers_.erase(id) == 0) { return; }
    must_place_ = true;
    changed_at_ = now;
}

bool Swarm::reported(const std::string& id, const fb::ShardT& shard, TimePoint now) {
    const auto found = workers_.find(id);
    if (found == workers_.end()) { return false; }
    WorkerRecord& worker = found->second;
    worker.seen_at = now;
    worker.shard = shard;
    worker.shard.held.clear();
    worker.shard.error.resize(std::min(worker.shard.error.size(), kMaxError));
    if (!std::exchange(worker.heard, true)) {
        worker.ready = said(worker, shard);
        must_assign_ = true;
    }
    const bool is_current = shard.epoch == worker.epoch && worker.epoch != 0;
    const bool is_told = is_current && std::exchange(worker.told_epoch, worker.epoch) != worker.epoch;
    if (shard.state == fb::ShardState::failed && is_current) {
        ask_again_later(worker, fmt::format("cannot load: {}", worker.shard.error), now);
        return is_told;
    }
    const bool is_ready = shard.state == fb::ShardState::ready && is_current;
    if (!is_ready || worker.ready_epoch == worker.epoch) { return is_told; }
    worker.ready_epoch = worker.epoch;
    worker.ready = worker.assigned;
    // What it was admitted for before it still is: those slices have not moved.
    must_assign_ = true;
    return is_told;
}

bool Swarm::admitted(const std::string& id, std::uint32_t epoch) {
    const auto found = workers_.find(id);
    if (found == workers_.end() || !found->second.connected || found->second.quarantined) { return false; }
    WorkerRecord& worker = found->second;
    if (worker.ready_epoch != epoch || worker.epoch != epoch) { return false; }
    worker.n_failures = 0;
    worker.proven = worker.ready;
    must_assign_ = true;
    return true;
}

void Swarm::failed(const std::string& id, const std::string& why, TimePoint now) {
    const auto found = workers_.find(id);
    if (found == workers_.end()) { return; }
    ask_again_later(found->second, why, now);
    found->second.ready = found->second.proven = plan::nothing(model_);
}

void Swarm::ask_again_later(WorkerRecord& worker, const std::string& why, TimePoint now) {
    if (worker.retry_at != TimePoint{}) { return; }
    const Duration pause = options_.retry * (1 << std::min(worker.n_failures++, kMaxRetryDoublings));
    log_warn("worker {} {}; its slices go elsewhere, it is asked again in {:.0f} s", worker.hello.name, why,
             to_seconds(pause));
    worker.retry_at = now + pause;
    worker.share = worker.assigned = plan::nothing(model_);
    must_place_ = true;
    changed_at_ = now;
}

void Swarm::set_quarantined(const std::string& id, bool quarantined, TimePoint now) {
    const auto found = workers_.find(id);
    if (found == workers_.end() || found->second.quarantined == quarantined) { return; }
    WorkerRecord& worker = found->second;
    worker.quarantined = quarantined;
    worker.must_assign = true;
    worker.share = worker.ready = worker.proven = plan::nothing(model_);
    must_place_ = true;
    changed_at_ = now;
}

bool Swarm::set_drained(const std::string& id, bool drained, TimePoint now) {
    const auto found = workers_.find(id);
    if (found == workers_.end() || found->second.drained == drained) { return false; }
    found->second.drained = drained;
    must_place_ = true;
    changed_at_ = now;
    return true;
}

Result<std::string> Swarm::find(std::string_view worker) const {
    return find_worker(
        worker, workers_, [](const WorkerRecord& record) { return record.hello.name; }, "worker", "has joined");
}

void Swarm::reported(const std::string& id, const fb::StatsT& stats, TimePoint now) {
    const auto found = workers_.find(id);
    if (found == workers_.end()) { return; }
    found->second.seen_at = now;
    found->second.stats = stats;
}

TimePoint Swarm::next_replan(TimePoint now) const {
    TimePoint next = now + std::chrono::hours(1);
    if (must_assign_ && !must_place_) { return now; }
    if (must_place_) { next = std::min(next, place_at()); }
    for (const auto& [id, worker] : workers_) {
        if (!worker.connected) { next = std::min(next, worker.left_at + options_.grace); }
        if (worker.retry_at != TimePoint{}) { next = std::min(next, worker.retry_at); }
    }
    return std::max(now, next);
}

TimePoint Swarm::place_at() const {
    const TimePoint settled = changed_at_ + options_.settle;
    const bool enough = placed_ || workers_.size() >= options_.expected_workers;
    return enough ? settled : std::max(settled, first_join_ + options_.patience);
}

std::vector<std::string> Swarm::replan(TimePoint now) {
    for (auto it = workers_.begin(); it != workers_.end();) {
        const bool gone = !it->second.connected && now >= it->second.left_at + options_.grace;
        if (gone) {
            log_info("worker {} has not come back; its slices go elsewhere", it->second.hello.name);
            must_place_ = true;
            it = workers_.erase(it);
        } else {
            ++it;
        }
    }
    for (auto& [id, worker] : workers_) {
        if (worker.retry_at == TimePoint{} || now < worker.retry_at) { continue; }
        worker.retry_at = {};
        must_place_ = true;
    }
    if (must_place_ && now >= place_at()) {
        std::vector<plan::Holder> holders;
        for (const auto& [id, worker] : workers_) {
            const bool idle = worker.retry_at != TimePoint{} || worker.quarantined || worker.drained;
            holders.push_back({id, idle ? 0 : worker.hello.memory_bytes, worker.share});
        }
        plan::Placement placement = plan::place(model_, holders, options_.n_replicas);
        std::size_t i = 0;
        for (auto& [id, worker] : workers_) { worker.share = std::move(placement.holders[i++]); }
        if (placement.missing_slices > 0 && !workers_.empty()) {
            const auto n_out = static_cast<std::uint64_t>(std::ranges::count_if(workers_, [](const auto& entry) {
                const WorkerRecord& worker = entry.second;
                return worker.quarantined || worker.drained || worker.retry_at != TimePoint{};
            }));
            log_warn(
                "{} of {} slices find no place: {}", placement.missing_slices, total_slices(),
                n_out == workers_.size()
                    ? "every worker is in quarantine, drained, or cannot load (`linkcpp status` says why)"
                    : fmt::format(
                          "the memory of the workers that may serve is too small{}; add workers or give "
                          "them more (join --memory)",
                          n_out == 0 ? "" : fmt::format(" ({} in quarantine, drained, or unable to load)", n_out)));
        }
        must_place_ = false;
        must_assign_ = true;
        placed_ = true;
        ++n_placements_;
    }
    std::vector<std::string> changed;
    if (!must_assign_ || must_place_) { return changed; }
    must_assign_ = false;
    for (auto& [id, worker] : workers_) {
        if (!worker.heard || !worker.connected || worker.retry_at != TimePoint{}) { continue; }
        plan::Holdings wanted = this->wanted(worker);
        if (wanted == worker.assigned && !worker.must_assign) { continue; }
        worker.must_assign = false;
        worker.ready = both(worker.ready, wanted);
        worker.proven = both(worker.proven, worker.ready);
        worker.assigned = std::move(wanted);
        worker.epoch = std::max(worker.epoch + 1, options_.first_epoch);
        changed.push_back(id);
    }
    return changed;
}

plan::Holdings Swarm::wanted(const WorkerRecord& worker) const {
    const auto has_another = [&](std::size_t layer, std::size_t e) {
        return std::ranges::any_of(workers_, [&](const auto& entry) {
            const WorkerRecord& other = entry.second;
            return other.id != worker.id && other.connected && other.share[layer][e] && other.ready[layer][e] &&
                   other.proven[layer][e];
        });
    };
    const plan::Holdings kept =
        combine(worker.share, worker.ready, [&](bool share, bool ready, std::size_t layer, std::size_t e) {
            return ready && (share || !has_another(layer, e));
        });
    // Where there is no room for both: as long as others are under way, what nobody else has stays; when all have come
    // to rest, each waits for another, and one must begin.
    const bool may_wait = std::ranges::any_of(
        workers_, [&](const auto& entry) { return entry.second.id != worker.id && is_under_way(entry.second); });
    return may_wait ? up_to(worker.hello.memory_bytes, kept, worker.share)
                    : up_to(worker.hello.memory_bytes, worker.share, kept);
}

bool Swarm::is_under_way(const WorkerRecord& worker) const {
    return worker.connected && !worker.quarantined && worker.retry_at == TimePoint{} &&
           (worker.must_assign || worker.ready_epoch != worker.epoch || plan::count(unproven(worker)) != 0);
}

plan::Holdings Swarm::up_to(std::uint64_t bytes, const plan::Holdings& first, const plan::Holdings& then) const {
    plan::Holdings out = plan::nothing(model_);
    std::uint64_t left = bytes;
    for (const plan::Holdings* each : {&first, &then}) {
        for (std::size_t i = 0; i < out.size(); ++i) {
            const std::uint64_t slice = model_.layers[i].slice_bytes();
            for (std::size_t e = 0; e < out[i].size(); ++e) {
                if (!(*each)[i][e] || out[i][e] || slice > left) { continue; }
                out[i][e] = true;
                left -= slice;
            }
        }
    }
    return out;
}

plan::Holdings Swarm::said(const WorkerRecord& worker, const fb::ShardT& shard) const {
    plan::Holdings held = plan::nothing(model_);
    const auto slices = wire::decode_slices(shard.held);
    if (!slices || worker.quarantined || shard.model_id != wire::encode_digest(model_id_)) { return held; }
    for (const wire::LayerExperts& each : *slices) {
        const auto layer = std::ranges::find(model_.layers, each.layer, &model::MoeLayer::layer);
        if (layer == model_.layers.end()) { continue; }
        plan::ExpertSet& experts = held[static_cast<std::size_t>(layer - model_.layers.begin())];
        for (const std::uint16_t expert : each.experts) {
            if (expert < experts.size()) { experts[expert] = true; }
        }
    }
    return held;
}

plan::Holdings Swarm::routable(const WorkerRecord& worker) const {
    return worker.connected && !worker.quarantined ? both(worker.ready, worker.proven) : plan::nothing(model_);
}

plan::Holdings Swarm::unproven(const WorkerRecord& worker) const {
    return combine(worker.ready, worker.proven, [](bool a, bool b, std::size_t, std::size_t) { return a && !b; });
}

wire::SliceSet Swarm::to_slices(const plan::Holdings& holdings) const {
    wire::SliceSet slices;
    for (std::size_t i = 0; i < holdings.size(); ++i) {
        wire::LayerExperts layer{model_.layers[i].layer, {}};
        for (std::size_t e = 0; e < holdings[i].size(); ++e) {
            if (holdings[i][e]) { layer.experts.push_back(static_cast<std::uint16_t>(e)); }
        }
        if (!layer.experts.empty()) { slices.push_back(std::move(layer)); }
    }
    return slices;
}

fb::AssignT Swarm::assignment(const std::string& id) const {
    const WorkerRecord& worker = workers_.at(id);
    fb::AssignT assign;
    assign.epoch = worker.epoch;
    assign.model_id = wire::encode_digest(model_id_);
    assign.slices = wire::encode_slices(to_slices(worker.assigned));
    return assign;
}

fb::RoutesT Swarm::routes() const {
    fb::RoutesT routes;
    routes.model_id = wire::encode_digest(model_id_);
    routes.n_replicas = options_.n_replicas;
    routes.complete = missing_slices() == 0;
    for (const auto& [id, worker] : workers_) {
        // Also those who hold nothing yet: coordinators let in whom the hub names.
        if (!worker.connected) { continue; }
        auto route = std::make_unique<fb::RouteT>();
        route->worker = id;
        route->name = worker.hello.name;
        route->epoch = worker.told_epoch;
        route->slices = wire::encode_slices(to_slices(routable(worker)));
        route->quarantined = worker.quarantined;
        routes.workers.push_back(std::move(route));
    }
    return routes;
}

bool Swarm::settled() const {
    if (!placed_ || must_place_ || must_assign_) { return false; }
    return std::ranges::all_of(workers_, [this](const auto& entry) {
        const WorkerRecord& worker = entry.second;
        if (worker.retry_at != TimePoint{} || worker.quarantined) { return true; }
        if (!worker.connected) { return plan::count(worker.share) == 0; }  // it may come back
        return worker.shard.state == fb::ShardState::ready && worker.shard.epoch == worker.epoch &&
               plan::count(unproven(worker)) == 0;
    });
}

std::uint64_t Swarm::total_slices() const {
    std::uint64_t total = 0;
    for (const model::MoeLayer& layer : model_.layers) { total += layer.n_expert; }
    return total;
}

std::uint64_t Swarm::missing_slices() const {
    plan::Holdings live = plan::nothing(model_);
    for (const auto& [id, worker] : workers_) {
        live = combine(live, routable(worker), [](bool a, bool b, std::size_t, std::size_t) { return a || b; });
    }
    return total_slices() - plan::count(live);
}

}  // namespace linkcpp::hub
