// What `linkcpp status` shows of the hub.
#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "hub/hub.h"
#include "hub/text.h"

namespace linkcpp::hub {
namespace {

using namespace std::chrono_literals;
namespace fb = wire::fb;
using nlohmann::json;

constexpr Duration kStatusWait = 300ms;

json turned_away_json(const fb::StatsT& stats) {
    json counts = json::object();
    for (const auto& entry : stats.turned_away) {
        counts[one_line(entry->name)] = entry->n;  // cut() has been over these
    }
    return counts;
}

json stats_json(const fb::StatsT& stats) {
    return {{"requests", stats.requests},
            {"pairs", stats.pairs},
            {"rows", stats.rows},
            {"busy_us", stats.busy_us},
            {"bytes_in", stats.bytes_in},
            {"bytes_out", stats.bytes_out},
            {"refused", stats.refused},
            {"resident_bytes", stats.resident_bytes},
            {"expired", stats.expired},
            {"stale", stats.stale},
            {"slices_out", stats.slices_out},
            {"turned_away", turned_away_json(stats)}};
}

json trust_json(const TrustRecord& record) {
    return {{"state", to_string(record.trust)},
            {"since", time_json(record.since)},
            {"last_good", time_json(record.last_good)},
            {"in_doubt_since", time_json(record.in_doubt_since)},
            {"why", record.why},
            {"probes", record.n_probes},
            {"probed_slices", plan::count(record.probed)},
            {"rounding", record.rounding},
            {"worst_row",
             {{"part", record.worst_part}, {"relative_l2", record.worst_l2}, {"tolerance", record.tolerance_l2}}},
            {"driver", record.driver}};
}

json patience_json(const fb::StatsT& stats) {
    if (stats.patience == nullptr) { return nullptr; }
    return {{"hang_s", stats.patience->hang_ms / 1e3},
            {"stuck_s", stats.patience->stuck_ms / 1e3},
            {"late_s", stats.patience->late_ms / 1e3},
            {"twice", std::round(stats.patience->twice * 1e4) / 1e4}};
}

std::string_view to_text(fb::LinkCondition condition) {
    switch (condition) {
        case fb::LinkCondition::none: return "no link";
        case fb::LinkCondition::good: return "good";
        case fb::LinkCondition::late: return "late";
        case fb::LinkCondition::resting: return "resting";
        case fb::LinkCondition::distrusted: return "distrusted";
    }
    return "unknown";
}

json links_json(const fb::StatsT& stats, const Admission& admission) {
    json links = json::array();
    for (const auto& link : stats.links) {
        const auto record = admission.records().find(link->worker);
        links.push_back({{"worker", link->worker},
                         {"name", record != admission.records().end() ? record->second.name : ""},
                         {"condition", to_text(link->condition)},
                         {"wait_us", link->wait_us},
                         {"faults",
                          {{"dead", link->dead},
                           {"hung", link->hung},
                           {"stuck", link->stuck},
                           {"corrupt", link->corrupt},
                           {"refused", link->refused},
                           {"moved", link->moved}}}});
    }
    return links;
}

std::string_view state_name(const WorkerRecord& worker, const Swarm& swarm) {
    if (!worker.connected) { return "gone"; }
    if (worker.quarantined) { return "quarantined"; }
    if (worker.drained) { return plan::count(worker.assigned) == 0 ? "drained" : "draining"; }
    if (worker.retry_at != TimePoint{}) { return "failed"; }
    switch (worker.shard.state) {
        case fb::ShardState::empty: return "waiting";
        case fb::ShardState::loading: return "loading";
        case fb::ShardState::ready: return plan::count(swarm.unproven(worker)) == 0 ? "ready" : "probing";
        case fb::ShardState::failed: return "failed";
    }
    return "unknown";
}

// A worker's figures: any numbers.
json loading_json(const wire::fb::ShardT& shard) {
    const std::uint64_t left = shard.fetch_bytes - std::min(shard.fetch_bytes, shard.fetched_bytes);
    json seconds_left;
    if (left == 0) { seconds_left = 0; }
    if (left > 0 && shard.fetch_rate > 0) {
        seconds_left = static_cast<double>(left) / static_cast<double>(shard.fetch_rate);
    }
    return {{"done_bytes", shard.done_bytes},       {"total_bytes", shard.total_bytes},
            {"fetched_bytes", shard.fetched_bytes}, {"fetch_bytes", shard.fetch_bytes},
            {"bytes_per_second", shard.fetch_rate}, {"seconds_left", seconds_left}};
}

}  // namespace

std::string Hub::status_json() {
    std::unique_lock lock(status_mutex_);
    const std::uint64_t mine = ++status_wanted_;
    wake_.signal();
    status_ready_.wait_for(lock, 2 * kStatusWait, [&] { return status_done_ >= mine; });
    return status_;
}

void Hub::answer_status() {
    std::uint64_t wanted = 0;
    {
        const std::lock_guard lock(status_mutex_);
        wanted = status_wanted_;
        if (wanted == status_done_ && !status_.empty()) { return; }
    }
    if (status_asked_ < wanted && status_asked_ == 0) {
        status_asked_ = wanted;
        status_deadline_ = steady_now() + kStatusWait;
        for (const auto& peer : peers_) {
            if (peer->role == fb::Role::none) { continue; }
            fb::AskT ask;
            ask.sequence = wanted;
            send(*peer, ask);
        }
    }
    const bool all = std::ranges::all_of(
        peers_, [&](const auto& peer) { return peer->role == fb::Role::none || peer->answered >= status_asked_; });
    if (!all && steady_now() < status_deadline_) { return; }
    std::string status = make_status();
    {
        const std::lock_guard lock(status_mutex_);
        status_ = std::move(status);
        status_done_ = status_asked_;
    }
    status_asked_ = 0;
    status_ready_.notify_all();
    wake_.signal();  // perhaps another question waits
}

std::string Hub::make_status() const {
    std::map<std::string, AuditSum> audited = past_audits_;
    for (const auto& peer : peers_) { add_audits(audited, peer->stats); }
    json workers = json::array();
    for (const auto& [id, worker] : swarm_.workers()) {
        json entry = stats_json(worker.stats);
        entry["id"] = id;
        entry["name"] = worker.hello.name;
        entry["device"] = worker.hello.device;
        entry["backend"] = worker.hello.backend;
        entry["boot_id"] = worker.hello.boot_id;
        entry["threads"] = worker.hello.n_threads;
        entry["memory_bytes"] = worker.hello.memory_bytes;
        entry["state"] = state_name(worker, swarm_);
        entry["slices"] = plan::count(worker.ready);
        entry["bytes"] = plan::bytes_of(manifest_.model, worker.ready);
        entry["assigned_slices"] = plan::count(worker.assigned);
        entry["loading"] = loading_json(worker.shard);
        entry["error"] = worker.shard.error;
        entry["epoch"] = worker.epoch;
        if (const auto record = admission_.records().find(id); record != admission_.records().end()) {
            entry["trust"] = trust_json(record->second);
        }
        entry["audits"] = {{"pairs", audited[id].pairs}, {"wrong", audited[id].wrong}};
        workers.push_back(std::move(entry));
    }
    std::stable_sort(workers.begin(), workers.end(), [](const json& a, const json& b) {
        return a["name"].get<std::string>() < b["name"].get<std::string>();
    });
    json coordinators = json::array();
    for (const auto& peer : peers_) {
        if (peer->role != fb::Role::coordinator) { continue; }
        json entry = stats_json(peer->stats);
        entry["id"] = peer->id;
        entry["process"] = peer->hello.process;
        entry["layers"] = peer->stats.layers;
        entry["local_pairs"] = peer->stats.local_pairs;
        entry["retries"] = peer->stats.retries;
        entry["failures"] = peer->stats.failures;
        entry["products"] = peer->stats.products;
        std::uint64_t n_audited = 0;
        for (const auto& audits : peer->stats.audits) { n_audited += audits->pairs; }
        entry["audits"] = {{"pairs", n_audited}, {"unchecked", peer->stats.unchecked}};
        entry["late"] = peer->stats.late;
        entry["twice"] = {{"requests", peer->stats.twice}, {"other_first", peer->stats.twice_first}};
        entry["patience"] = patience_json(peer->stats);
        entry["links"] = links_json(peer->stats, admission_);
        coordinators.push_back(std::move(entry));
    }
    json unknown = json::array();
    for (const auto& [layer, nodes] : unknown_layers_) { unknown.push_back({{"layer", layer}, {"nodes", nodes}}); }
    json quarantined = json::array();
    for (const auto& [id, record] : admission_.records()) {
        if (record.trust != Trust::quarantined) { continue; }
        json entry = trust_json(record);
        entry["id"] = id;
        entry["name"] = record.name;
        quarantined.push_back(std::move(entry));
    }
    json events = json::array();
    for (const Event& event : events_) {
        events.push_back({{"time", time_json(event.time)},
                          {"worker", event.worker},
                          {"text", event.text},
                          {"by", event.by.empty() ? "hub" : event.by}});
    }
    json revoked = json::array();
    for (const auto& [key, member] : access_.members()) {
        if (member.revoked) { revoked.push_back({{"name", member.name}, {"id", key}}); }
    }
    json refused = json::object();
    for (const auto& [name, n] : refusals_.counts()) { refused[name] = n; }
    const std::uint64_t total = swarm_.total_slices();
    const std::uint64_t missing = swarm_.missing_slices();
    const model::MoeModel& model = manifest_.model;
    const json status = {
        {"release", LINKCPP_VERSION},
        {"hub",
         {{"address", listener_.address().text()},
          {"https_port", http_->port()},
          {"fingerprint", identity_.fingerprint().hex()},
          {"slices_sent", http_->slices_sent()},
          {"bytes_sent", http_->bytes_sent()},
          {"uptime_s", to_seconds(steady_now() - started_)}}},
        {"model",
         {{"name", model.name},
          {"architecture", model.architecture},
          {"path", file_.path().string()},
          {"id", model_id_.hex()},
          {"layers", model.n_layer},
          {"moe_layers", model.layers.size()},
          {"slices", total},
          {"expert_bytes", model.expert_bytes()}}},
        {"coverage",
         {{"share", total == 0 ? 0.0 : static_cast<double>(total - missing) / static_cast<double>(total)},
          {"missing_slices", missing},
          {"settled", swarm_.settled()},
          {"replicas", swarm_.options().n_replicas}}},
        {"workers", workers},
        {"coordinators", coordinators},
        {"computed_for", computed_for_},
        {"quarantine", quarantined},
        {"unknown_layers", unknown},
        {"revoked", revoked},
        {"refused", refused},
        {"events", events}};
    return to_text(status);
}

}  // namespace linkcpp::hub
