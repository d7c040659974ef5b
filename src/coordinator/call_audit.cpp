#include <algorithm>
#include <map>

#include "base/log.h"
#include "coordinator/call.h"
#include "trust/ruling.h"

namespace linkcpp::coordinator {
namespace {

namespace fb = wire::fb;

std::unique_ptr<fb::ClaimT> make_claim(const std::string& worker, std::span<const float> row) {
    auto claim = std::make_unique<fb::ClaimT>();
    claim->worker = worker;
    claim->row.assign(row.begin(), row.end());
    return claim;
}

}  // namespace

std::uint16_t Dispatcher::Call::expert_at(std::uint32_t position) const {
    const std::uint32_t token = position / work_.n_used;
    return static_cast<std::uint16_t>(work_.ids[token * work_.ids_stride + position % work_.n_used]);
}

void Dispatcher::Call::draw_checks(const Task& task, const Holder* holder, Chosen& chosen) {
    if (mode_ != wire::Mode::exact) { return; }
    Task check{.expert = task.expert, .positions = {}, .failed = {}, .is_check = true};
    for (const std::uint32_t i : d_.auditor_.draw(task.positions.size())) {
        check.positions.push_back(task.positions[i]);
        checks_[task.positions[i]] = {.expert = task.expert, .by = nullptr, .row = {}};
    }
    if (check.positions.empty()) { return; }
    Holder* by = nullptr;
    for (const std::uint16_t index : d_.routes_->holders[layer_][task.expert]) {
        Holder* other = d_.by_route_[index];
        const bool can = other != nullptr && other != holder && other->usable() && other->n_failures == 0;
        if (can && (by == nullptr || other->load < by->load)) { by = other; }
    }
    if (by == nullptr) {
        local_checks_.push_back(std::move(check));
        return;
    }
    by->load += units_of(check);
    tasks_for(chosen, by).push_back(std::move(check));
}

Status Dispatcher::Call::compute_checks() {
    std::vector<Task> tasks = std::move(local_checks_);
    local_checks_.clear();
    if (d_.checker_ == nullptr) { return {}; }  // they stay without a row
    for (const Task& task : tasks) {
        std::vector<float> rows(task.positions.size() * work_.n_in);
        std::vector<float> results(task.positions.size() * work_.n_out);
        for (std::size_t i = 0; i < task.positions.size(); ++i) {
            std::copy_n(row_data(row_of(task.positions[i])), work_.n_in, rows.data() + i * work_.n_in);
        }
        const Status computed = d_.checker_->compute(work_.layer, work_.product, task.expert, rows, results);
        if (!computed) {
            log_warn("an audit cannot be computed here: {}", computed.error().message);
            continue;
        }
        for (std::size_t i = 0; i < task.positions.size(); ++i) {
            const auto check = checks_.find(task.positions[i]);
            if (check == checks_.end()) { continue; }
            check->second.by = nullptr;
            check->second.row.assign(results.begin() + static_cast<std::ptrdiff_t>(i * work_.n_out),
                                     results.begin() + static_cast<std::ptrdiff_t>((i + 1) * work_.n_out));
        }
        LINKCPP_CHECK(progress(Duration::zero()));
    }
    return {};
}

Status Dispatcher::Call::settle_checks() {
    const std::map<std::uint32_t, Check> checks = std::exchange(checks_, {});
    for (const auto& [position, check] : checks) {
        Holder* worker = answered_by_[position];
        // What this program has computed itself needs no check, and what a liar has is done again.
        if (worker == nullptr || worker->distrusted) { continue; }
        const std::span<const float> row = out_.subspan(std::size_t{position} * work_.n_out, work_.n_out);
        const bool checked = !check.row.empty() && check.by != worker && !(check.by != nullptr && check.by->distrusted);
        const std::string& by = check.by != nullptr ? check.by->id : std::string();
        const model::MoeLayer& layer = d_.manifest_->model.layers[layer_];
        if (checked && d_.auditor_.agree(layer, work_.product, worker->id, row, by, check.row)) {
            count_audit(*worker, true);
            continue;
        }
        LINKCPP_CHECK(
            rule_on(position, checked ? check : Check{.expert = check.expert, .by = nullptr, .row = {}}, *worker));
    }
    return {};
}

fb::DisputeT Dispatcher::Call::make_dispute(std::uint32_t position, const Check& check, const Holder& worker) const {
    fb::DisputeT dispute;
    dispute.layer = work_.layer;
    dispute.expert = check.expert;
    dispute.product = static_cast<std::uint8_t>(work_.product.value_or(model::Role{}));
    const float* input = row_data(row_of(position));
    dispute.input.assign(input, input + work_.n_in);
    dispute.claims.push_back(make_claim(worker.id, out_.subspan(std::size_t{position} * work_.n_out, work_.n_out)));
    if (!check.row.empty()) {
        dispute.claims.push_back(make_claim(check.by != nullptr ? check.by->id : "", check.row));
    }
    return dispute;
}

Result<fb::VerdictT> Dispatcher::Call::judge_here(const fb::DisputeT& dispute) const {
    LINKCPP_TRY(const Bytes slice, d_.checker_->slice(dispute.layer, dispute.expert));
    std::vector<std::span<const float>> rows;
    for (const auto& claim : dispute.claims) { rows.emplace_back(claim->row); }
    LINKCPP_TRY(const auto fits,
                trust::rule(d_.manifest_->model.layers[layer_], slice, {work_.product, dispute.input}, rows));
    fb::VerdictT verdict;
    for (const trust::RowFit& fit : fits) {
        verdict.right.push_back(fit.holds);
        verdict.input_rounding.push_back(static_cast<std::uint8_t>(fit.rounding.input));
        verdict.inner_rounding.push_back(static_cast<std::uint8_t>(fit.rounding.inner));
        verdict.why.push_back(fit.holds ? "" : trust::to_string(fit));
    }
    return verdict;
}

Status Dispatcher::Call::rule_on(std::uint32_t position, const Check& check, Holder& worker) {
    const fb::DisputeT dispute = make_dispute(position, check, worker);
    const bool alone = check.row.empty();
    const bool must_wait = !alone || d_.auditor_.checks_all();
    Result<fb::VerdictT> verdict = fail(ErrorKind::disconnected, "the hub cannot be asked");
    if (d_.checker_ != nullptr) { verdict = judge_here(dispute); }
    const bool ruled_here = verdict.has_value();
    if (!ruled_here && d_.ask_hub_) {
        verdict = d_.ask_hub_(dispute, must_wait ? d_.options_.ruling_wait : Duration::zero());
    }
    if (verdict && verdict->error.empty() && !must_wait) {  // the hub sees to it
        count_audit(worker, true);
        return {};
    }
    const std::size_t n = dispute.claims.size();
    if (verdict && (!verdict->error.empty() || verdict->right.size() != n || verdict->input_rounding.size() != n ||
                    verdict->inner_rounding.size() != n || verdict->why.size() != n)) {
        verdict = fail(ErrorKind::failed, "the hub cannot say: {}", verdict->error);
    }
    if (!verdict) {
        ++d_.stats_.unchecked;
        if (!must_wait) { return {}; }
        return fail(verdict.error().kind, "layer {}, expert {}: {}, and there is no telling which is right: {}",
                    work_.layer, check.expert,
                    alone ? fmt::format("nobody else can check what worker {} has computed", worker.name)
                          : fmt::format("worker {} and {} have computed different results", worker.name,
                                        check.by != nullptr ? "worker " + check.by->name : "this program"),
                    verdict.error().message);
    }
    ++d_.stats_.rulings;
    count_audit(worker, verdict->right[0]);
    const std::array<Holder*, 2> holders{&worker, const_cast<Holder*>(check.by)};
    for (std::size_t i = 0; i < n; ++i) {
        if (verdict->right[i]) {
            d_.auditor_.learn(d_.manifest_->model.layers[layer_], work_.product,
                              holders[i] != nullptr ? holders[i]->id : std::string(),
                              {static_cast<expert::Rounding>(verdict->input_rounding[i]),
                               static_cast<expert::Rounding>(verdict->inner_rounding[i])});
        } else if (holders[i] != nullptr) {
            if (holders[i] != &worker) { count_audit(*holders[i], false); }
            accuse(*holders[i], fmt::format("layer {}, expert {}: {}", work_.layer, check.expert, verdict->why[i]));
        } else {
            log_error("this program itself computes wrong: layer {}, expert {}: {}; it computes no experts any more",
                      work_.layer, check.expert, verdict->why[i]);
        }
    }
    const bool here_is_wrong = n == 2 && check.by == nullptr && !verdict->right[1];
    const bool somebody_is = std::ranges::find(verdict->right, false) != verdict->right.end();
    if (somebody_is && ruled_here && d_.ask_hub_) {
        static_cast<void>(d_.ask_hub_(dispute, Duration::zero()));  // so that it is in quarantine for everybody
    }
    if (here_is_wrong) {
        d_.local_.reset();
        d_.checker_.reset();
    }
    return {};
}

void Dispatcher::Call::accuse(Holder& holder, const std::string& why) {
    log_error("worker {} computes wrong ({}); it is not used any more, and this layer's part of it is computed again",
              holder.name, why);
    const Routes::Worker* route = d_.routes_->find(holder.id);
    holder.distrusted = true;
    holder.distrusted_epoch = route != nullptr ? route->epoch : 0;
    std::map<std::uint16_t, Task> again;
    for (std::uint32_t position = 0; position < answered_by_.size(); ++position) {
        if (answered_by_[position] != &holder) { continue; }
        Task& task = again[expert_at(position)];
        task.expert = expert_at(position);
        task.positions.push_back(position);
        ++d_.stats_.retries;
    }
    for (auto& [expert, task] : again) { todo_.push_back(std::move(task)); }
}

void Dispatcher::Call::count_audit(const Holder& worker, bool right) {
    ++d_.stats_.audits;
    const std::lock_guard lock(d_.notes_mutex_);
    AuditCount& count = d_.audits_[worker.id];
    ++count.pairs;
    count.wrong += right ? 0 : 1;
}

}  // namespace linkcpp::coordinator
