#include "hub/admission.h"

#include <algorithm>
#include <set>

#include "base/log.h"
#include "base/text.h"
#include "hub/find_worker.h"

namespace linkcpp::hub {
namespace {

namespace fb = wire::fb;

constexpr std::size_t kMinExperts = 2;
constexpr std::size_t kMaxExperts = 64;
constexpr std::uint32_t kMinTokens = 3;  // so that one expert's rows in one request are a batch
constexpr std::size_t kMaxText = 300;

bool alike(const model::MoeLayer& a, const model::MoeLayer& b) {
    return a.n_embd == b.n_embd && a.n_ff == b.n_ff && a.activation == b.activation &&
           a.weights_first == b.weights_first &&
           std::ranges::equal(a.tensors, b.tensors,
                              [](const auto& x, const auto& y) { return x.role == y.role && x.type == y.type; });
}

std::uint64_t n_weights(const model::MoeLayer& layer) {
    std::uint64_t n = 0;
    for (const model::ExpertTensor& tensor : layer.tensors) {
        n += static_cast<std::uint64_t>(tensor.ne[0]) * static_cast<std::uint64_t>(tensor.ne[1]);
    }
    return std::max<std::uint64_t>(n, 1);
}

bool has_any(const plan::ExpertSet& experts) {
    return std::ranges::find(experts, true) != experts.end();
}

}  // namespace

std::string_view to_string(Trust trust) {
    switch (trust) {
        case Trust::unproven: return "unproven";
        case Trust::admitted: return "admitted";
        case Trust::quarantined: return "quarantined";
    }
    return "unknown";
}

Admission::Admission(const model::MoeModel& model, Options options, std::uint64_t seed)
    : model_(model), options_(options), random_(seed) {
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
        const auto like =
            std::ranges::find_if(model.layers, [&](const auto& other) { return alike(other, model.layers[i]); });
        kind_.push_back(static_cast<std::size_t>(like - model.layers.begin()));
    }
}

void Admission::restore(std::map<std::string, TrustRecord> known) {
    records_ = std::move(known);
    for (auto& [id, record] : records_) { record.probed = plan::nothing(model_); }
}

void Admission::joined(const std::string& worker, const std::string& name) {
    left(worker);
    TrustRecord& record = records_[worker];
    record.name = name;
    record.n_probes = 0;
    if (record.trust != Trust::quarantined) { record.why.clear(); }
    record.probed = plan::nothing(model_);
}

void Admission::left(const std::string& worker) {
    rounds_.erase(worker);
    next_round_.erase(worker);
    const auto found = records_.find(worker);
    if (found != records_.end() && found->second.trust == Trust::admitted) {
        found->second.trust = Trust::unproven;  // kept: what it was, and with which driver
    }
}

fb::ProbeT Admission::make_probe(std::size_t layer, const plan::ExpertSet& held, const plan::ExpertSet& probed,
                                 std::size_t n_layers) {
    const model::MoeLayer& described = model_.layers[layer];
    const std::uint64_t each = options_.n_weights / n_layers / n_weights(described);
    const auto n = static_cast<std::size_t>(std::clamp<std::uint64_t>(each, kMinExperts, kMaxExperts));
    // At random, those that it was not probed with yet before the others.
    std::vector<std::pair<std::pair<bool, std::uint64_t>, std::uint16_t>> order;
    for (std::size_t e = 0; e < held.size(); ++e) {
        if (held[e]) { order.push_back({{probed[e], random_()}, static_cast<std::uint16_t>(e)}); }
    }
    std::ranges::sort(order);
    order.resize(std::min(order.size(), n));
    fb::ProbeT probe;
    probe.sequence = next_sequence_++;
    probe.layer = described.layer;
    for (const auto& [rank, expert] : order) { probe.experts.push_back(expert); }
    probe.seed = random_();
    const std::size_t n_used = std::clamp<std::size_t>(described.n_expert_used, 1, order.size());
    probe.n_tokens = std::max(kMinTokens, static_cast<std::uint32_t>((order.size() + n_used - 1) / n_used));
    return probe;
}

Admission::Round Admission::make_round(const WorkerRecord& worker, const plan::Holdings& unproven) {
    Round round{.epoch = worker.epoch, .first = plan::count(unproven) != 0, .left = {}, .asked = {}, .deadline = {}};
    const plan::Holdings& probed = records_[worker.id].probed;
    std::vector<std::size_t> layers;
    if (round.first) {
        // A layer of each kind, at random among those with slices that are new.
        std::map<std::size_t, std::vector<std::size_t>> by_kind;
        for (std::size_t i = 0; i < unproven.size(); ++i) {
            if (has_any(unproven[i])) { by_kind[kind_[i]].push_back(i); }
        }
        for (const auto& [kind, its] : by_kind) { layers.push_back(its[random_() % its.size()]); }
    } else {
        // The next layer that it holds anything of.
        std::size_t& next = next_layer_[worker.id];
        for (std::size_t i = 0; i < worker.ready.size() && layers.empty(); ++i) {
            const std::size_t layer = next++ % worker.ready.size();
            if (has_any(worker.ready[layer])) { layers.push_back(layer); }
        }
    }
    for (const std::size_t layer : layers) {
        const plan::ExpertSet& held = round.first ? unproven[layer] : worker.ready[layer];
        round.left.push_back(make_probe(layer, held, probed[layer], layers.size()));
        round.left.back().epoch = round.epoch;
    }
    return round;
}

std::vector<std::pair<std::string, fb::ProbeT>> Admission::due(const Swarm& swarm, TimePoint now) {
    std::vector<std::pair<std::string, fb::ProbeT>> probes;
    for (const auto& [id, worker] : swarm.workers()) {
        const bool is_ready = worker.connected && !worker.quarantined && worker.retry_at == TimePoint{} &&
                              worker.epoch != 0 && worker.ready_epoch == worker.epoch && records_.contains(id);
        const auto found = rounds_.find(id);
        // Given something else to hold meanwhile: what is under way says nothing about it.
        if (found != rounds_.end() && (!is_ready || found->second.epoch != worker.epoch)) { rounds_.erase(found); }
        if (!is_ready || plan::count(worker.ready) == 0) { continue; }
        if (!rounds_.contains(id)) {
            const plan::Holdings unproven = swarm.unproven(worker);
            const auto next = next_round_.find(id);
            const bool waits = next != next_round_.end() && now < next->second;
            // One that could not be judged is not asked again at once either.
            const bool is_new = plan::count(unproven) != 0 && (!waits || records_.at(id).why.empty());
            if (waits && !is_new) { continue; }
            rounds_[id] = make_round(worker, unproven);
        }
        Round& round = rounds_[id];
        if (round.asked || round.left.empty()) { continue; }
        fb::ProbeT probe = std::move(round.left.back());
        round.left.pop_back();
        const model::MoeLayer* layer = model_.find(probe.layer);
        auto input = trust::make_input(*layer, probe.experts, probe.seed, probe.n_tokens);
        if (!input) {
            log_error("layer {} cannot be probed: {}", model::layer_name(probe.layer), input.error().message);
            continue;
        }
        round.asked = ProbeAnswer{id, probe.sequence, layer, *std::move(input), {}, round.first};
        round.deadline = now + options_.patience;
        probes.emplace_back(id, std::move(probe));
    }
    return probes;
}

TimePoint Admission::next(TimePoint now) const {
    TimePoint next = now + std::chrono::hours(1);
    for (const auto& [id, time] : next_round_) {
        if (!rounds_.contains(id)) { next = std::min(next, time); }
    }
    for (const auto& [id, round] : rounds_) {
        if (round.asked) { next = std::min(next, round.deadline); }
    }
    return std::max(now, next);
}

std::vector<Admission::Change> Admission::overdue(TimePoint now) {
    std::vector<Change> changes;
    for (const auto& [id, round] : rounds_) {
        if (!round.asked || now < round.deadline) { continue; }
        changes.push_back({id, Outcome::failed, round.epoch,
                           fmt::format("has not answered a probe within {:.0f} s", to_seconds(options_.patience))});
    }
    for (const Change& change : changes) { left(change.worker); }
    return changes;
}

std::optional<ProbeAnswer> Admission::received(const std::string& worker, fb::ProbeRowsT& rows, std::int64_t wall,
                                               Change& change) {
    const auto found = rounds_.find(worker);
    if (found == rounds_.end() || !found->second.asked || found->second.asked->sequence != rows.sequence) { return {}; }
    Round& round = found->second;
    ProbeAnswer& answer = *round.asked;
    const std::vector<trust::Part> parts = trust::parts_of(*answer.layer);
    const auto refuse = [&](const std::string& why) {
        change = {worker, Outcome::failed, round.epoch, why};
        records_[worker].why = why;
        records_[worker].since = wall;
        left(worker);
        return std::nullopt;
    };
    if (!rows.error.empty()) {
        return refuse(fmt::format("cannot be probed: {}", one_line(rows.error.substr(0, kMaxText))));
    }
    if (answer.rows.size() >= parts.size()) { return {}; }
    const trust::Part part = parts[answer.rows.size()];
    const trust::PartShape shape = trust::shape_of(part, *answer.layer, answer.input);
    if (rows.part != static_cast<std::uint8_t>(part) || rows.rows.size() != shape.n * shape.n_rows) {
        return refuse(fmt::format("answers a probe with {} numbers of part {} where {} of {} are expected",
                                  rows.rows.size(), rows.part, shape.n * shape.n_rows, trust::to_string(part)));
    }
    answer.rows[part] = std::move(rows.rows);
    if (answer.rows.size() < parts.size()) { return {}; }
    std::vector<std::string> driver;
    for (std::string& library : rows.driver) { driver.push_back(one_line(library.substr(0, kMaxText))); }
    TrustRecord& record = records_[worker];
    if (!record.driver.empty() && record.driver != driver) {
        log_info("worker {} has another driver than before: {}", record.name, fmt::join(driver, ", "));
    }
    record.driver = std::move(driver);
    return answer;
}

Admission::Change Admission::judged(const std::string& worker, std::uint64_t sequence,
                                    const Result<trust::Findings>& findings, TimePoint now, std::int64_t wall) {
    const auto found = rounds_.find(worker);
    const auto known = records_.find(worker);
    if (found == rounds_.end() || known == records_.end() || !found->second.asked ||
        found->second.asked->sequence != sequence) {
        return {};
    }
    Round& round = found->second;
    TrustRecord& record = known->second;
    Change change{worker, Outcome::pending, round.epoch, {}};
    if (!findings) {
        // Not its fault: whoever was admitted stays so, and who waits for it goes on waiting.
        const std::string why = findings.error().message;
        if (record.why != why) {
            log_error("a probe cannot be judged: {}; restart this hub if its model file has changed", why);
        }
        record.why = why;
        rounds_.erase(found);
        next_round_[worker] = now + options_.interval;
        return change;
    }
    ++record.n_probes;
    double worst = -1;
    for (const auto& [part, its] : findings->parts) {
        const double share = its.worst.tolerance.share(its.worst.difference);
        if (share <= worst) { continue; }
        worst = share;
        record.worst_part = trust::to_string(part);
        record.worst_l2 = its.worst.difference.relative_l2;
        record.tolerance_l2 = its.worst.tolerance.relative_l2;
    }
    std::set<std::string> roundings;
    for (const auto& [part, rounding] : findings->roundings()) { roundings.insert(expert::to_string(rounding)); }
    record.rounding = fmt::format("{}", fmt::join(roundings, "; "));
    if (!findings->passed()) {
        const std::string why =
            fmt::format("a probe of layer {}: {}", model::layer_name(round.asked->layer->layer), findings->why());
        quarantine(worker, why, wall);
        return {worker, Outcome::wrong, change.epoch, why};
    }
    record.last_good = wall;
    for (const std::uint16_t expert : trust::used_experts(round.asked->input)) {
        record.probed[static_cast<std::size_t>(round.asked->layer - model_.layers.data())][expert] = true;
    }
    round.asked.reset();
    if (!round.left.empty()) { return change; }
    const bool first = round.first;
    rounds_.erase(found);
    next_round_[worker] = now + options_.interval;
    if (!first) { return change; }
    if (record.trust != Trust::admitted) { record.since = wall; }
    if (record.served_since == 0) { record.served_since = wall; }
    record.trust = Trust::admitted;
    record.why.clear();
    return {worker, Outcome::admitted, change.epoch, {}};
}

bool Admission::quarantine(const std::string& worker, const std::string& why, std::int64_t wall) {
    const auto [found, is_new] = records_.try_emplace(worker);
    TrustRecord& record = found->second;
    if (record.trust == Trust::quarantined) { return false; }
    if (is_new) {  // it is away: when it comes it is known
        record.name = worker.substr(0, kShortId);
        record.probed = plan::nothing(model_);
    }
    // A worker that is wrong now and then passes most checks: all of its work is in doubt since it first served.
    record.in_doubt_since = record.served_since;
    record.trust = Trust::quarantined;
    record.since = wall;
    record.why = why;
    rounds_.erase(worker);
    next_round_.erase(worker);
    return true;
}

Result<std::string> Admission::clear(std::string_view worker, std::int64_t wall) {
    LINKCPP_TRY(const std::string id, find_worker(
                                          worker, records_,
                                          [](const TrustRecord& record) {
                                              return record.trust == Trust::quarantined ? record.name : std::string();
                                          },
                                          "worker", "is in quarantine"));
    TrustRecord& record = records_[id];
    record.trust = Trust::unproven;
    record.since = wall;
    record.in_doubt_since = 0;
    record.why.clear();
    return id;
}

bool Admission::is_quarantined(const std::string& worker) const {
    const auto found = records_.find(worker);
    return found != records_.end() && found->second.trust == Trust::quarantined;
}

}  // namespace linkcpp::hub
