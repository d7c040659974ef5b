#include "hub/judge.h"

#include "base/log.h"

namespace linkcpp::hub {
namespace {

constexpr std::size_t kMaxCases = 64;

}  // namespace

Judge::Judge(const model::GgufFile& file, const model::Manifest& manifest)
    : file_(file), manifest_(manifest), thread_([this](const std::stop_token& stop) { run(stop); }) {}

Judge::~Judge() {
    thread_.request_stop();
}

void Judge::judge(ProbeAnswer answer) {
    const std::lock_guard lock(mutex_);
    cases_.emplace_back(std::move(answer));
    more_.notify_one();
}

bool Judge::judge(const std::string& coordinator, const wire::fb::DisputeT& dispute) {
    const std::lock_guard lock(mutex_);
    if (cases_.size() >= kMaxCases) { return false; }
    cases_.emplace_back(JudgedDispute{coordinator, dispute, {}});
    more_.notify_one();
    return true;
}

std::vector<Judgement> Judge::take() {
    done_.clear();
    const std::lock_guard lock(mutex_);
    return std::exchange(results_, {});
}

void Judge::run(const std::stop_token& stop) {
    while (true) {
        std::unique_lock lock(mutex_);
        if (!more_.wait(lock, stop, [this] { return !cases_.empty(); })) { return; }
        Case next = std::move(cases_.front());
        cases_.pop_front();
        lock.unlock();
        Judgement judgement = std::visit([this](auto& each) { return decide(std::move(each)); }, next);
        lock.lock();
        results_.push_back(std::move(judgement));
        lock.unlock();
        done_.signal();
    }
}

Judgement Judge::decide(const ProbeAnswer& answer) const {
    const auto read_slice = [&](std::uint32_t expert) {
        return model::read_slice(file_, manifest_, answer.layer->layer, expert);
    };
    // Who waits to be admitted gets all processors; else a program that decodes here has them.
    const unsigned n_threads = answer.first ? 0 : 1;
    return JudgedProbe{
        answer.worker, answer.sequence,
        trust::judge(*answer.layer, read_slice, answer.input, answer.rows, {.n_threads = n_threads, .quiet = true})};
}

Judgement Judge::decide(JudgedDispute dispute) const {
    dispute.fits = rule(dispute.dispute);
    return dispute;
}

Result<std::vector<trust::RowFit>> Judge::rule(const wire::fb::DisputeT& dispute) const {
    const model::MoeLayer* layer = manifest_.model.find(dispute.layer);
    if (layer == nullptr || dispute.expert >= layer->n_expert) {
        return fail(ErrorKind::invalid, "layer {} has no expert {}", dispute.layer, dispute.expert);
    }
    trust::PairInput input{.product = {}, .row = dispute.input};
    if (dispute.product != 0) { input.product = static_cast<model::Role>(dispute.product); }
    std::vector<std::span<const float>> rows;
    for (const auto& claim : dispute.claims) { rows.emplace_back(claim->row); }
    const bool is_sum = !dispute.experts.empty();
    if (is_sum && (dispute.experts.size() != dispute.weights.size() || dispute.experts.size() > layer->n_expert)) {
        return fail(ErrorKind::invalid, "a sum of {} experts with {} weights", dispute.experts.size(),
                    dispute.weights.size());
    }
    std::vector<Bytes> slices;
    std::vector<trust::Term> terms;
    for (std::size_t i = 0; i < (is_sum ? dispute.experts.size() : 1); ++i) {
        const std::uint32_t expert = is_sum ? dispute.experts[i] : dispute.expert;
        if (expert >= layer->n_expert) {
            return fail(ErrorKind::invalid, "layer {} has no expert {}", dispute.layer, expert);
        }
        LINKCPP_TRY(slices.emplace_back(), model::read_slice(file_, manifest_, layer->layer, expert));
        terms.push_back({slices.back(), is_sum ? dispute.weights[i] : 1});
    }
    return trust::rule(*layer, terms, input, rows, dispute.halves ? trust::kHalfTolerance : trust::Tolerance{});
}

}  // namespace linkcpp::hub
