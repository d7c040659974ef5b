#include <algorithm>
#include <map>

#include "base/log.h"
#include "coordinator/call.h"
#include "expert/half.h"
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

// As a worker sees what travels so.
void round_to_halves(std::vector<float>& row) {
    std::vector<std::byte> halves(row.size() * 2);
    expert::floats_to_halves(row, halves);
    expert::halves_to_floats(halves, row);
}

}  // namespace

std::uint16_t Dispatcher::Call::expert_at(std::uint32_t position) const {
    const std::uint32_t token = position / work_.n_used;
    return static_cast<std::uint16_t>(work_.ids[token * work_.ids_stride + position % work_.n_used]);
}

void Dispatcher::Call::draw_checks(const Task& task, const Holder* holder, Chosen& chosen) {
    if (mode_ != wire::Mode::exact) {
        for (const std::uint32_t i : d_.auditor_.draw(task.positions.size())) { drawn_.insert(task.positions[i]); }
        return;
    }
    Task check{.expert = task.expert, .positions = {}, .failed = {}, .is_check = true};
    for (const std::uint32_t i : d_.auditor_.draw(task.positions.size())) {
        check.positions.push_back(task.positions[i]);
        checks_[task.positions[i]] = {.expert = task.expert, .by = nullptr, .row = {}};
    }
    if (check.positions.empty()) { return; }
    // Where nothing may be used unchecked this program is the better judge: two holders may be wrong in the same way.
    if (d_.auditor_.checks_all() && d_.checker_ != nullptr) {
        local_checks_.push_back(std::move(check));
        return;
    }
    Holder* by = nullptr;
    const TimePoint time = steady_now();
    for (const std::uint16_t index : d_.routes_->holders[layer_][task.expert]) {
        Holder* other = d_.by_route_[index];
        const bool can = other != nullptr && other != holder && other->usable() && takes(*other, task) &&
                         other->watch.failures_in_a_row() == 0 && other->watch.preferred(time);
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
        const std::vector<float> rows = gather(task.positions);
        std::vector<float> results(task.positions.size() * work_.n_out);
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
        const std::span<float> row = out_.subspan(std::size_t{position} * work_.n_out, work_.n_out);
        const bool checked = !check.row.empty() && check.by != worker && (check.by == nullptr || !check.by->distrusted);
        const std::string& by = check.by != nullptr ? check.by->id : std::string();
        const model::MoeLayer& layer = d_.manifest_->model.layers[layer_];
        if (checked && d_.auditor_.agree(layer, work_.product, worker->id, row, by, check.row)) {
            count_audit(*worker, true);
            continue;
        }
        LINKCPP_CHECK(
            rule_on(dispute_about(position), checked ? check : Check{check.expert, nullptr, {}}, row, *worker));
        // Both may be right; what this program has made itself is beyond doubt.
        if (checked && check.by == nullptr && d_.checker_ != nullptr) { std::ranges::copy(check.row, row.begin()); }
    }
    return {};
}

Status Dispatcher::Call::settle_sums() {
    const std::set<std::uint32_t> drawn = std::exchange(drawn_, {});
    if (drawn.empty()) { return {}; }
    const bool halves = row_type() == wire::RowType::f16;
    const trust::Tolerance more = halves ? trust::kHalfTolerance : trust::Tolerance{};
    const model::MoeLayer& layer = d_.manifest_->model.layers[layer_];
    for (PartialSums& sums : partial_) {
        for (std::size_t i = 0; i < sums.tokens.size() && !sums.by->distrusted; ++i) {
            const std::uint32_t token = sums.tokens[i];
            std::vector<std::uint32_t> positions;
            std::ranges::copy_if(sums.positions, std::back_inserter(positions),
                                 [&](std::uint32_t position) { return position / work_.n_used == token; });
            if (std::ranges::none_of(positions, [&](std::uint32_t p) { return drawn.contains(p); })) { continue; }
            fb::DisputeT dispute = dispute_about(positions.front());
            for (const std::uint32_t position : positions) {
                dispute.experts.push_back(expert_at(position));
                dispute.weights.push_back(work_.weights[token * work_.weights_stride + position % work_.n_used]);
            }
            dispute.halves = halves;
            if (halves) { round_to_halves(dispute.input); }
            Check check{dispute.expert, nullptr, {}};
            LINKCPP_CHECK(compute_sum(dispute, check.row));
            const std::span<float> row(sums.rows.data() + i * work_.n_out, work_.n_out);
            if (!check.row.empty() && d_.auditor_.agree(layer, work_.product, sums.by->id, row, "", check.row, more)) {
                count_audit(*sums.by, true);
            } else {
                LINKCPP_CHECK(rule_on(std::move(dispute), check, row, *sums.by));
                if (!check.row.empty() && d_.checker_ != nullptr) { std::ranges::copy(check.row, row.begin()); }
            }
        }
    }
    std::erase_if(partial_, [](const PartialSums& sums) { return sums.by->distrusted; });
    return {};
}

Status Dispatcher::Call::compute_sum(const fb::DisputeT& dispute, std::vector<float>& sum) {
    if (d_.checker_ == nullptr) { return {}; }
    std::vector<float> row(work_.n_out);
    std::vector<float> total(work_.n_out);
    for (std::size_t i = 0; i < dispute.experts.size(); ++i) {
        const Status computed =
            d_.checker_->compute(work_.layer, work_.product, dispute.experts[i], dispute.input, row);
        if (!computed) {
            log_warn("an audit cannot be computed here: {}", computed.error().message);
            return {};
        }
        for (std::size_t j = 0; j < row.size(); ++j) { total[j] += row[j] * dispute.weights[i]; }
    }
    sum = std::move(total);
    return {};
}

fb::DisputeT Dispatcher::Call::dispute_about(std::uint32_t position) const {
    fb::DisputeT dispute;
    dispute.layer = work_.layer;
    dispute.expert = expert_at(position);
    dispute.product = static_cast<std::uint8_t>(work_.product.value_or(model::Role{}));
    const float* input = row_data(row_of(position));
    dispute.input.assign(input, input + work_.n_in);
    return dispute;
}

Result<fb::VerdictT> Dispatcher::Call::judge_here(const fb::DisputeT& dispute) const {
    std::vector<Bytes> slices;
    std::vector<trust::Term> terms;
    const bool is_sum = !dispute.experts.empty();
    for (std::size_t i = 0; i < (is_sum ? dispute.experts.size() : 1); ++i) {
        LINKCPP_TRY(slices.emplace_back(),
                    d_.checker_->slice(dispute.layer, is_sum ? dispute.experts[i] : dispute.expert));
        terms.push_back({slices.back(), is_sum ? dispute.weights[i] : 1});
    }
    std::vector<std::span<const float>> rows;
    for (const auto& claim : dispute.claims) { rows.emplace_back(claim->row); }
    LINKCPP_TRY(const auto fits, trust::rule(d_.manifest_->model.layers[layer_], terms, {work_.product, dispute.input},
                                             rows, dispute.halves ? trust::kHalfTolerance : trust::Tolerance{}));
    fb::VerdictT verdict;
    for (const trust::RowFit& fit : fits) {
        verdict.right.push_back(fit.holds);
        verdict.input_rounding.push_back(static_cast<std::uint8_t>(fit.rounding.input));
        verdict.inner_rounding.push_back(static_cast<std::uint8_t>(fit.rounding.inner));
        verdict.why.push_back(fit.holds ? "" : trust::to_string(fit));
    }
    return verdict;
}

Result<Dispatcher::Call::Ruling> Dispatcher::Call::ask(const fb::DisputeT& dispute, bool must_wait) const {
    if (d_.checker_ != nullptr) {
        auto verdict = judge_here(dispute);
        if (verdict) { return Ruling{.verdict = *std::move(verdict), .here = true}; }
        log_warn("an audit cannot be ruled on here: {}", verdict.error().message);
    }
    if (!d_.ask_hub_) { return fail(ErrorKind::disconnected, "the hub cannot be asked"); }
    LINKCPP_TRY(fb::VerdictT verdict, d_.ask_hub_(dispute, must_wait ? d_.options_.ruling_wait : Duration::zero()));
    if (!must_wait) { return Ruling{.verdict = {}, .later = true}; }
    const std::size_t n = dispute.claims.size();
    if (!verdict.error.empty() || verdict.right.size() != n || verdict.input_rounding.size() != n ||
        verdict.inner_rounding.size() != n || verdict.why.size() != n) {
        return fail(ErrorKind::failed, "the hub cannot say: {}", verdict.error);
    }
    return Ruling{.verdict = std::move(verdict)};
}

bool Dispatcher::Call::checks_with_model(const fb::DisputeT& dispute) {
    std::vector<std::uint16_t> experts = dispute.experts;
    if (experts.empty()) { experts.push_back(dispute.expert); }
    for (const std::uint16_t expert : experts) {
        const auto slice = d_.checker_->slice(dispute.layer, expert);
        if (slice) { continue; }
        log_error("{}; nothing is checked here any more: restart the hub and this program", slice.error().message);
        d_.checker_.reset();
        return false;
    }
    return true;
}

Status Dispatcher::Call::rule_on(fb::DisputeT dispute, const Check& check, std::span<const float> row, Holder& worker) {
    // What was computed here from bytes that are not the model's says nothing.
    const bool is_ours = check.by == nullptr && !check.row.empty();
    const bool is_void = is_ours && d_.checker_ != nullptr && !checks_with_model(dispute);
    const bool alone = check.row.empty() || is_void;
    dispute.claims.push_back(make_claim(worker.id, row));
    if (!alone) { dispute.claims.push_back(make_claim(check.by != nullptr ? check.by->id : "", check.row)); }
    const bool must_wait = !alone || d_.auditor_.checks_all();
    const auto ruling = ask(dispute, must_wait);
    if (!ruling) {
        ++d_.stats_.unchecked;
        if (!must_wait) { return {}; }
        return fail(ruling.error().kind, "layer {}, expert {}: {}, and there is no telling which is right: {}",
                    work_.layer, check.expert,
                    alone ? fmt::format("nobody else can check what worker {} has computed", worker.name)
                          : fmt::format("worker {} and {} have computed different results", worker.name,
                                        check.by != nullptr ? "worker " + check.by->name : "this program"),
                    ruling.error().message);
    }
    if (ruling->later) { return {}; }  // the hub sees to it, and counts it
    ++d_.stats_.rulings;
    const fb::VerdictT& verdict = ruling->verdict;
    count_audit(worker, verdict.right[0]);
    if (ruling->here && d_.ask_hub_ && std::ranges::find(verdict.right, false) != verdict.right.end()) {
        static_cast<void>(d_.ask_hub_(dispute, Duration::zero()));  // so that it is in quarantine for everybody
    }
    take_verdict(verdict, 0, &worker, check.expert);
    if (alone) { return {}; }
    Holder* other = nullptr;
    for (const auto& holder : d_.holders_) { other = holder.get() == check.by ? holder.get() : other; }
    if (other != nullptr && !verdict.right[1]) { count_audit(*other, false); }
    take_verdict(verdict, 1, other, check.expert);
    return {};
}

void Dispatcher::Call::take_verdict(const fb::VerdictT& verdict, std::size_t i, Holder* holder, std::uint16_t expert) {
    if (verdict.right[i]) {
        d_.auditor_.learn(d_.manifest_->model.layers[layer_], work_.product,
                          holder != nullptr ? holder->id : std::string(),
                          {static_cast<expert::Rounding>(verdict.input_rounding[i]),
                           static_cast<expert::Rounding>(verdict.inner_rounding[i])});
        return;
    }
    const std::string why = fmt::format("layer {}, expert {}: {}", work_.layer, expert, verdict.why[i]);
    if (holder != nullptr) { return accuse(*holder, why); }
    log_error("this program itself computes wrong ({}); it computes no experts any more", why);
    d_.local_.reset();
    d_.checker_.reset();
}

void Dispatcher::Call::accuse(Holder& holder, const std::string& why) {
    log_error("worker {} computes wrong ({}); it is not used any more, and this layer's part of it is computed again",
              holder.name, why);
    holder.distrusted = true;
    holder.distrusted_epoch = epoch_of(holder);
    // Whole experts, or a kernel would see another batch than one process would show it.
    std::set<std::uint16_t> again;
    for (std::uint32_t position = 0; position < answered_by_.size(); ++position) {
        if (answered_by_[position] != &holder) { continue; }
        delivered_[position] = false;
        again.insert(expert_at(position));
    }
    for (const PartialSums& sums : partial_) {
        if (sums.by != &holder) { continue; }
        for (const std::uint32_t position : sums.positions) { again.insert(expert_at(position)); }
    }
    for (const std::uint16_t expert : again) {
        summed_.erase(expert);
        put_back(whole_task(expert));
    }
}

void Dispatcher::Call::count_audit(const Holder& worker, bool right) {
    ++d_.stats_.audits;
    const std::lock_guard lock(d_.notes_mutex_);
    AuditCount& count = d_.audits_[worker.id];
    ++count.pairs;
    count.wrong += right ? 0 : 1;
}

}  // namespace linkcpp::coordinator
