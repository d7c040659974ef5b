#include "coordinator/dispatcher.h"

#include <algorithm>
#include <random>

#include "base/log.h"
#include "coordinator/call.h"

namespace linkcpp::coordinator {
namespace {

// That wait while the hub is away.
constexpr std::size_t kMaxNotices = 256;
constexpr Duration kNoteLinksEvery = std::chrono::milliseconds(200);

}  // namespace

Dispatcher::Dispatcher(DispatchOptions options)
    : options_(options), twice_(options.patience.twice), auditor_(options.audit, std::random_device{}()) {}

void Dispatcher::Holder::drop_link() {
    if (link == nullptr) { return; }
    past_bytes_in += link->counters().bytes_in;
    past_bytes_out += link->counters().bytes_out;
    link.reset();
}

void Dispatcher::Holder::take_next_link(TimePoint now) {
    if (next_link == nullptr) { return; }
    drop_link();
    link = std::move(next_link);
    watch.connected(now);
}

void Dispatcher::set_manifest(std::shared_ptr<const model::Manifest> manifest, const Digest& id) {
    const std::lock_guard lock(inbox_mutex_);
    inbox_manifest_ = std::move(manifest);
    inbox_model_id_ = id;
    inbox_full_ = true;
}

void Dispatcher::set_routes(std::shared_ptr<const Routes> routes) {
    const std::lock_guard lock(inbox_mutex_);
    inbox_routes_ = std::move(routes);
    inbox_full_ = true;
}

void Dispatcher::set_local(std::unique_ptr<LocalExperts> local, std::unique_ptr<LocalExperts> checker) {
    const std::lock_guard lock(inbox_mutex_);
    inbox_local_ = std::move(local);
    inbox_checker_ = std::move(checker);
    inbox_full_ = true;
}

void Dispatcher::add_link(std::string worker, std::unique_ptr<net::Link> link) {
    const std::lock_guard lock(inbox_mutex_);
    inbox_links_.emplace_back(std::move(worker), std::move(link));
    inbox_full_ = true;
}

void Dispatcher::note_unknown(std::uint32_t layer, const std::string& nodes) {
    const std::lock_guard lock(notes_mutex_);
    if (!unknown_.try_emplace(layer, nodes).second || unknown_.size() > 1) { return; }
    log_warn(
        "layer {}: its expert block is computed one product at a time, which is right and slow; `linkcpp status` names "
        "such layers (nodes: {})",
        model::layer_name(layer), unknown_.begin()->second);
}

std::map<std::uint32_t, std::string> Dispatcher::unknown() const {
    const std::lock_guard lock(notes_mutex_);
    return unknown_;
}

std::map<std::string, AuditCount> Dispatcher::audits() const {
    const std::lock_guard lock(notes_mutex_);
    return audits_;
}

std::map<std::string, LinkReport> Dispatcher::links() const {
    const std::lock_guard lock(notes_mutex_);
    return links_;
}

std::vector<Notice> Dispatcher::take_notices() {
    const std::lock_guard lock(notes_mutex_);
    return std::exchange(notices_, {});
}

void Dispatcher::note(const Holder& holder, LogLevel level, std::string text) {
    log_line(level, fmt::format("worker {}: {}", holder.name, text));
    const std::lock_guard lock(notes_mutex_);
    if (notices_.size() < kMaxNotices) { notices_.push_back({holder.id, std::move(text)}); }
}

void Dispatcher::note_links() {
    const TimePoint time = steady_now();
    if (time - links_noted_ < kNoteLinksEvery) { return; }
    links_noted_ = time;
    const std::lock_guard lock(notes_mutex_);
    for (const auto& holder : holders_) {
        LinkReport& report = links_[holder->id];
        using Condition = wire::fb::LinkCondition;
        report.condition = holder->distrusted               ? Condition::distrusted
                           : holder->watch.rests(time)      ? Condition::resting
                           : holder->link == nullptr        ? Condition::none
                           : !holder->watch.preferred(time) ? Condition::late
                                                            : Condition::good;
        report.wait_us = holder->watch.wait_us(time);
        for (std::size_t i = 0; i < kFaults; ++i) { report.faults.at(i) = holder->watch.count(static_cast<Fault>(i)); }
    }
}

void Dispatcher::refresh() {
    if (!inbox_full_.load(std::memory_order_acquire)) { return; }
    const std::lock_guard lock(inbox_mutex_);
    inbox_full_ = false;
    if (inbox_manifest_) {
        manifest_ = std::move(inbox_manifest_);
        model_id_ = inbox_model_id_;
    }
    if (inbox_local_) { local_ = std::move(inbox_local_); }
    if (inbox_checker_) { checker_ = std::move(inbox_checker_); }
    if (inbox_routes_) { routes_ = std::move(inbox_routes_); }
    for (auto& [worker, link] : inbox_links_) {
        auto found = std::ranges::find(holders_, worker, [](const auto& holder) { return holder->id; });
        if (found == holders_.end()) {
            holders_.push_back(std::make_unique<Holder>(options_.patience));
            found = holders_.end() - 1;
            (*found)->id = worker;
        }
        link->set_limit(options_.max_frame);
        (*found)->next_link = std::move(link);
        if (!(*found)->watch.busy()) { (*found)->take_next_link(steady_now()); }
    }
    inbox_links_.clear();
    by_route_.clear();
    if (!routes_) { return; }
    for (const Routes::Worker& worker : routes_->workers) {
        const auto found = std::ranges::find(holders_, worker.id, [](const auto& holder) { return holder->id; });
        by_route_.push_back(found == holders_.end() ? nullptr : found->get());
        if (by_route_.back() == nullptr) { continue; }
        Holder& holder = *by_route_.back();
        holder.name = worker.name;
        if (holder.distrusted && worker.epoch != holder.distrusted_epoch && worker.n_slices > 0) {
            holder.distrusted = false;  // the hub knows of it by now, and its operator has cleared it
        }
    }
}

bool Dispatcher::covered(std::size_t* missing, std::size_t* to_come) {
    const std::lock_guard lock(call_mutex_);
    refresh();
    if (!routes_) { return false; }
    std::size_t n_missing = 0;
    std::size_t n_to_come = 0;
    for (const auto& layer : routes_->holders) {
        for (const auto& holders : layer) {
            const bool held = std::ranges::any_of(
                holders, [&](std::uint16_t i) { return by_route_[i] != nullptr && by_route_[i]->usable(); });
            n_missing += held ? 0 : 1;
            n_to_come += held || holders.empty() ? 0 : 1;
        }
    }
    if (missing != nullptr) { *missing = n_missing; }
    if (to_come != nullptr) { *to_come = n_to_come; }
    return n_missing == 0 || local_ != nullptr;
}

std::size_t Dispatcher::n_quarantined() {
    const std::lock_guard lock(call_mutex_);
    if (!routes_) { return 0; }
    return static_cast<std::size_t>(std::ranges::count_if(routes_->workers, &Routes::Worker::quarantined));
}

Status Dispatcher::compute(const Work& work, wire::Mode mode, std::span<float> out) {
    const std::lock_guard lock(call_mutex_);
    refresh();
    if (!routes_ || !manifest_) { return fail(ErrorKind::disconnected, "the hub has not said yet who holds what"); }
    const TimePoint begun = steady_now();
    for (const auto& holder : holders_) { holder->watch.away(begun - last_call_ended_); }
    const Status status = Call(*this, work, mode, out).run();
    last_call_ended_ = steady_now();
    note_links();
    ++stats_.layers;
    stats_.products += work.product ? 1 : 0;
    stats_.rows += work.n_tokens;
    stats_.failures += status ? 0 : 1;
    std::uint64_t bytes_in = 0;
    std::uint64_t bytes_out = 0;
    for (const auto& holder : holders_) {
        bytes_in += holder->past_bytes_in + (holder->link ? holder->link->counters().bytes_in : 0);
        bytes_out += holder->past_bytes_out + (holder->link ? holder->link->counters().bytes_out : 0);
    }
    stats_.bytes_in = bytes_in;
    stats_.bytes_out = bytes_out;
    return status;
}

Status Dispatcher::compute_rows(const Work& work, std::span<float> out) {
    return compute(work, wire::Mode::exact, out);
}

Status Dispatcher::compute_sums(const Work& work, std::span<float> out) {
    return compute(work, wire::Mode::partial, out);
}

}  // namespace linkcpp::coordinator
