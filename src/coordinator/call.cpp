#include "coordinator/call.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include <poll.h>

#include "base/log.h"
#include "expert/half.h"
#include "wire/frame.h"

namespace linkcpp::coordinator {
namespace {

using namespace std::chrono_literals;

// What an expert's work costs: reading its weights, and then each further row of it; in units of a MiB read.
constexpr double kFirstPair = 1.0;
constexpr double kNextPair = 0.25;
double units_for(std::size_t n_pairs) {
    return kFirstPair + kNextPair * static_cast<double>(n_pairs - 1);
}

// Requests are cut about here, so that a worker starts while the rest is still being sent.
constexpr std::size_t kRequestBytes = 16u << 20;
// Requests with more pairs are in the experts' order, so that the answer can be computed and sent in parts; smaller
// ones in the tokens' order, in which several tokens with all their experts make one rectangle.
constexpr std::size_t kTokenOrderPairs = 32;
// A holder may take this many times what its work has taken on average before it counts as hung.
constexpr double kSlack = 8;
constexpr double kSmoothing = 0.1;
// How long a holder that has failed is used only when nobody else can: doubled with each failure in a row.
constexpr Duration kShunned = 500ms;
constexpr int kMaxShunDoublings = 7;
constexpr int kForgivenHangUps = 2;

TimePoint now() {
    return std::chrono::steady_clock::now();
}

void add_weighted(std::span<float> sum, const float* row, float weight) {
    for (std::size_t i = 0; i < sum.size(); ++i) { sum[i] += row[i] * weight; }
}

}  // namespace

Status Dispatcher::Call::run() {
    LINKCPP_CHECK(check_sizes());
    LINKCPP_CHECK(make_tasks());
    if (mode_ == wire::Mode::partial) { std::ranges::fill(out_, 0.0f); }
    for (auto& holder : d_.holders_) { holder->load = 0; }
    if (mode_ == wire::Mode::exact) { answered_by_.resize(std::size_t{work_.n_tokens} * work_.n_used); }
    while (true) {
        d_.refresh();
        LINKCPP_CHECK(assign());
        LINKCPP_CHECK(compute_local());
        LINKCPP_CHECK(compute_checks());
        if (requests_.empty() && todo_.empty()) {
            LINKCPP_CHECK(settle_checks());
            LINKCPP_CHECK(settle_sums());
            if (todo_.empty()) { break; }
            continue;
        }
        LINKCPP_CHECK(await());
    }
    add_partial_sums();
    return {};
}

Dispatcher::Call::~Call() {
    for (auto& holder : d_.holders_) { holder->in_flight = 0; }
}

Status Dispatcher::Call::check_sizes() const {
    // The largest request that an expert can lead to: all tokens chose it.
    const wire::ComputeRequest largest{
        .n_rows = work_.n_tokens, .n_pairs = work_.n_tokens, .n_in = work_.n_in, .row_type = row_type()};
    if (work_.n_tokens <= wire::kMaxRows && largest.payload_bytes() <= wire::kMaxComputeBytes) { return {}; }
    return fail(ErrorKind::invalid,
                "layer {}: a batch of {} tokens is too large for the swarm; use a smaller --ubatch-size", work_.layer,
                work_.n_tokens);
}

Status Dispatcher::Call::make_tasks() {
    const auto layer = d_.routes_->layer_index.find(work_.layer);
    if (layer == d_.routes_->layer_index.end()) {
        return fail(ErrorKind::invalid, "layer {} is not in the model that the hub serves", work_.layer);
    }
    layer_ = layer->second;
    const model::MoeLayer* described = d_.manifest_->model.find(work_.layer);
    if (described == nullptr) { return fail(ErrorKind::invalid, "layer {} is not in the manifest", work_.layer); }
    const model::ExpertTensor* weight = work_.product ? described->find(*work_.product) : nullptr;
    const std::uint64_t bytes = weight != nullptr ? weight->slab_bytes : described->slice_bytes();
    units_a_pair_ = static_cast<double>(std::max<std::uint64_t>(bytes, 1)) / (1 << 20);
    const std::size_t n_expert = d_.routes_->holders[layer_].size();
    const std::uint32_t n_slots = mode_ == wire::Mode::partial ? work_.n_summed : work_.n_used;
    std::vector<std::int32_t> task_of(n_expert, -1);
    for (std::uint32_t t = 0; t < work_.n_tokens; ++t) {
        for (std::uint32_t s = 0; s < n_slots; ++s) {
            const std::int32_t expert = work_.ids[t * work_.ids_stride + s];
            if (expert < 0 || static_cast<std::size_t>(expert) >= n_expert) {
                return fail(ErrorKind::invalid, "layer {}: the router chose expert {} of {}", work_.layer, expert,
                            n_expert);
            }
            std::int32_t& task = task_of[static_cast<std::size_t>(expert)];
            if (task < 0) {
                task = static_cast<std::int32_t>(todo_.size());
                todo_.push_back({static_cast<std::uint16_t>(expert), {}, {}});
            }
            todo_[static_cast<std::size_t>(task)].positions.push_back(t * work_.n_used + s);
        }
    }
    std::ranges::stable_sort(todo_, [](const Task& a, const Task& b) {
        return a.positions.size() != b.positions.size() ? a.positions.size() > b.positions.size() : a.expert < b.expert;
    });
    return {};
}

double Dispatcher::Call::units_of(const Task& task) const {
    return units_a_pair_ * units_for(task.positions.size());
}

Dispatcher::Holder* Dispatcher::Call::choose(const Task& task) const {
    Holder* best = nullptr;
    double best_time = 0;
    bool best_is_shunned = false;
    const double units = units_of(task);
    for (const std::uint16_t index : d_.routes_->holders[layer_][task.expert]) {
        Holder* holder = d_.by_route_[index];
        if (holder == nullptr || !holder->usable() || std::ranges::find(task.failed, holder) != task.failed.end()) {
            continue;
        }
        const double speed = mode_ == wire::Mode::partial ? 1 : speed_of(*holder);
        const double time = (holder->load + units) * speed;
        // The clock is read only when it matters: this runs for every expert of every layer.
        const bool is_shunned = holder->shunned_until != TimePoint{} && now() < holder->shunned_until;
        if (best == nullptr || (best_is_shunned && !is_shunned) ||
            (best_is_shunned == is_shunned && time < best_time)) {
            best = holder;
            best_time = time;
            best_is_shunned = is_shunned;
        }
    }
    return best_is_shunned && d_.local_ != nullptr ? nullptr : best;
}

double Dispatcher::Call::speed_of(const Holder& holder) const {
    if (holder.us_per_unit > 0) { return holder.us_per_unit; }
    double fastest = 0;
    for (const auto& other : d_.holders_) {
        if (other->us_per_unit > 0 && (fastest == 0 || other->us_per_unit < fastest)) { fastest = other->us_per_unit; }
    }
    return fastest > 0 ? fastest : 1;
}

std::vector<Dispatcher::Task>& Dispatcher::Call::tasks_for(Chosen& chosen, Holder* holder) {
    auto found = std::ranges::find(chosen, holder, &Chosen::value_type::first);
    if (found == chosen.end()) { found = chosen.insert(found, {holder, {}}); }
    return found->second;
}

Status Dispatcher::Call::assign() {
    Chosen chosen;
    Chosen checking;
    std::vector<Task> waiting;
    for (Task& task : todo_) {
        Holder* holder = choose(task);
        if (holder != nullptr) {
            holder->load += units_of(task);
            draw_checks(task, holder, checking);
            tasks_for(chosen, holder).push_back(std::move(task));
        } else if (d_.local_ != nullptr) {
            local_.push_back(std::move(task));
        } else {
            waiting.push_back(std::move(task));
        }
    }
    todo_ = std::move(waiting);
    if (!todo_.empty() && !stalled_since_) { stalled_since_ = now(); }
    for (auto& [holder, tasks] : chosen) { send_all(*holder, std::move(tasks)); }
    for (auto& [holder, tasks] : checking) { send_all(*holder, std::move(tasks)); }
    if (!todo_.empty() && stalled_since_ && now() - *stalled_since_ > d_.options_.coverage_wait) {
        return fail(ErrorKind::disconnected,
                    "layer {}: no worker holds expert {} ({} experts lack one) and the coordinator does not compute "
                    "experts itself; is a worker still loading, gone, or in quarantine? See `linkcpp status`",
                    work_.layer, todo_.front().expert, todo_.size());
    }
    return {};
}

std::size_t Dispatcher::Call::bytes_for(std::size_t n_pairs) const {
    const std::size_t n_rows = std::min<std::size_t>(n_pairs, n_all_rows());
    return n_pairs * sizeof(wire::Pair) + n_rows * work_.n_in * wire::bytes_per_value(row_type());
}

void Dispatcher::Call::send_all(Holder& holder, std::vector<Task> tasks) {
    std::vector<Task> batch;
    std::size_t n_pairs = 0;
    const auto flush = [&] {
        if (!batch.empty()) { send(holder, std::move(batch)); }
        batch.clear();
        n_pairs = 0;
    };
    for (Task& task : tasks) {
        if (holder.link == nullptr) {  // lost while sending: back to the others
            (task.is_check ? local_checks_ : todo_).push_back(std::move(task));
            continue;
        }
        const std::size_t more = n_pairs + task.positions.size();
        const bool too_many = more > wire::kMaxPairs || (has_own_rows() && more > wire::kMaxRows);
        if (bytes_for(more) > kRequestBytes || too_many) { flush(); }
        n_pairs += task.positions.size();
        batch.push_back(std::move(task));
    }
    if (holder.link == nullptr) {
        for (Task& task : batch) { (task.is_check ? local_checks_ : todo_).push_back(std::move(task)); }
        return;
    }
    flush();
}

void Dispatcher::Call::send(Holder& holder, std::vector<Task> tasks) {
    Request request{.holder = &holder, .tasks = std::move(tasks), .sent = now()};
    request.is_check = request.tasks.front().is_check;
    const std::vector<wire::Pair> pairs = list_pairs(request);
    const Routes::Worker* route = d_.routes_->find(holder.id);
    const wire::ComputeRequest header{.id = d_.next_request_++,
                                      .model = d_.model_id_.prefix(),
                                      .epoch = route != nullptr ? route->epoch : 0,
                                      .layer = work_.layer,
                                      .n_rows = static_cast<std::uint32_t>(request.rows.size()),
                                      .n_pairs = static_cast<std::uint32_t>(pairs.size()),
                                      .n_in = work_.n_in,
                                      .mode = mode_,
                                      .row_type = row_type(),
                                      .product = static_cast<std::uint8_t>(work_.product.value_or(model::Role{}))};
    const double expected_us = holder.us_per_unit * request.units;
    const Duration patience =
        holder.us_per_unit > 0 ? d_.options_.hang + std::chrono::microseconds(static_cast<long>(kSlack * expected_us))
                               : std::max(d_.options_.hang_unmeasured, d_.options_.hang);
    // Requests wait in line behind those that were sent before them.
    request.deadline = std::max(now(), holder.in_flight > 0 ? holder.deadline : TimePoint{}) + patience;
    holder.deadline = request.deadline;
    ++holder.in_flight;
    ++d_.stats_.requests;
    const Request& queued = requests_.emplace(header.id, std::move(request)).first->second;
    if (const Status status = write(*holder.link, header, pairs, queued.rows); !status) {
        lose(holder, status.error());
    }
}

Status Dispatcher::Call::write(net::Link& link, const wire::ComputeRequest& header, std::span<const wire::Pair> pairs,
                               std::span<const std::uint32_t> rows) {
    const bool dense = has_own_rows()
                           ? work_.slot_stride == work_.n_in && work_.token_stride == work_.n_used * work_.slot_stride
                           : work_.token_stride == work_.n_in;
    const bool all = rows.size() == n_all_rows() && dense;
    if (all && header.row_type == wire::RowType::f32) {
        // As they lie in llama.cpp's tensor: no copy but the kernel's.
        d_.head_.resize(header.payload_bytes() - header.n_rows * header.row_bytes());
        wire::encode(header, pairs, d_.head_);
        const std::span numbers(work_.rows, std::size_t{n_all_rows()} * work_.n_in);
        return link.send(wire::FrameType::compute_request, {d_.head_, std::as_bytes(numbers)});
    }
    LINKCPP_TRY(const std::span<std::byte> place,
                link.append(wire::FrameType::compute_request, header.payload_bytes()));
    copy_rows(rows, header, wire::encode(header, pairs, place));
    return link.flush();
}

std::vector<wire::Pair> Dispatcher::Call::list_pairs(Request& request) const {
    std::vector<std::uint16_t> experts;
    for (const Task& task : request.tasks) {
        request.units += units_of(task);
        request.positions.insert(request.positions.end(), task.positions.begin(), task.positions.end());
        experts.insert(experts.end(), task.positions.size(), task.expert);
    }
    if (request.positions.size() <= kTokenOrderPairs) {
        std::vector<std::pair<std::uint32_t, std::uint16_t>> entries;
        for (std::size_t i = 0; i < experts.size(); ++i) { entries.emplace_back(request.positions[i], experts[i]); }
        std::ranges::sort(entries);
        for (std::size_t i = 0; i < experts.size(); ++i) { std::tie(request.positions[i], experts[i]) = entries[i]; }
    }
    const std::uint32_t n_rows = n_all_rows();
    std::vector<std::int32_t> place_of(n_rows, -1);
    std::size_t n_needed = 0;
    for (const std::uint32_t position : request.positions) {
        n_needed += place_of[row_of(position)] < 0 ? 1 : 0;
        place_of[row_of(position)] = 0;
    }
    // Where nearly all rows are needed, all go: to pick out a few costs more than to send them.
    const bool all = mode_ == wire::Mode::exact && n_rows <= wire::kMaxRows && n_needed >= n_rows - n_rows / 16 &&
                     experts.size() >= n_rows;
    for (std::uint32_t row = 0; row < n_rows; ++row) {
        if (!all && place_of[row] < 0) { continue; }
        place_of[row] = static_cast<std::int32_t>(request.rows.size());
        request.rows.push_back(row);
    }
    std::vector<wire::Pair> pairs;
    pairs.reserve(experts.size());
    for (std::size_t i = 0; i < experts.size(); ++i) {
        const std::uint32_t token = request.positions[i] / work_.n_used;
        const std::uint32_t slot = request.positions[i] % work_.n_used;
        const float weight = mode_ == wire::Mode::partial ? work_.weights[token * work_.weights_stride + slot] : 0.0f;
        pairs.push_back({static_cast<std::uint16_t>(place_of[row_of(request.positions[i])]), experts[i], weight});
    }
    return pairs;
}

const float* Dispatcher::Call::row_data(std::uint32_t row) const {
    if (!has_own_rows()) { return work_.rows + row * work_.token_stride; }
    return work_.rows + row / work_.n_used * work_.token_stride + row % work_.n_used * work_.slot_stride;
}

std::vector<float> Dispatcher::Call::gather(std::span<const std::uint32_t> positions) const {
    std::vector<float> rows(positions.size() * work_.n_in);
    for (std::size_t i = 0; i < positions.size(); ++i) {
        std::copy_n(row_data(row_of(positions[i])), work_.n_in, rows.data() + i * work_.n_in);
    }
    return rows;
}

void Dispatcher::Call::copy_rows(std::span<const std::uint32_t> rows, const wire::ComputeRequest& header,
                                 std::span<std::byte> to) const {
    for (const std::uint32_t row : rows) {
        if (header.row_type == wire::RowType::f32) {
            std::memcpy(to.data(), row_data(row), header.row_bytes());
        } else {
            expert::floats_to_halves({row_data(row), work_.n_in}, to.first(header.row_bytes()));
        }
        to = to.subspan(header.row_bytes());
    }
}

void Dispatcher::Call::lose(Holder& holder, const Error& error) {
    log_warn("worker {}: {}; its work goes to others", holder.name, error.message);
    shun(holder, error);
    if (!stalled_since_) { stalled_since_ = now(); }
    holder.link.reset();
    holder.in_flight = 0;
    for (auto it = requests_.begin(); it != requests_.end();) {
        if (it->second.holder != &holder) {
            ++it;
            continue;
        }
        give_back(it->second, nullptr);
        it = requests_.erase(it);
    }
}

void Dispatcher::Call::shun(Holder& holder, const Error& error) {
    ++holder.n_failures;
    // To be restarted is no fault; to hang up again and again is one.
    const int n = error.kind == ErrorKind::disconnected ? holder.n_failures - kForgivenHangUps : holder.n_failures;
    if (n > 0) { holder.shunned_until = now() + kShunned * (1 << std::min(n, kMaxShunDoublings)); }
}

void Dispatcher::Call::give_back(Request& request, const Holder* refused_by) {
    for (Task& task : request.tasks) {
        if (task.is_check) {
            local_checks_.push_back(std::move(task));
            continue;
        }
        for (const std::uint32_t position : task.positions) { checks_.erase(position); }  // drawn anew
        d_.stats_.retries += task.positions.size();
        if (refused_by != nullptr) { task.failed.push_back(refused_by); }
        todo_.push_back(std::move(task));
    }
}

Status Dispatcher::Call::compute_local() {
    std::vector<Task> tasks = std::move(local_);
    local_.clear();
    for (const Task& task : tasks) {
        const std::size_t n_pairs = task.positions.size();
        const std::vector<float> rows = gather(task.positions);
        std::vector<float> results(n_pairs * work_.n_out);
        LINKCPP_CHECK(d_.local_->compute(work_.layer, work_.product, task.expert, rows, results));
        for (std::size_t i = 0; i < n_pairs; ++i) {
            deliver(task.positions[i], reinterpret_cast<const std::byte*>(results.data() + i * work_.n_out), nullptr);
        }
        d_.stats_.pairs += n_pairs;
        d_.stats_.local_pairs += n_pairs;
        LINKCPP_CHECK(progress(0ns));
    }
    return {};
}

void Dispatcher::Call::deliver(std::uint32_t position, const std::byte* row, Holder* by) {
    if (mode_ == wire::Mode::exact) {
        answered_by_[position] = by;
        std::memcpy(out_.data() + std::size_t{position} * work_.n_out, row, std::size_t{work_.n_out} * sizeof(float));
        return;
    }
    const std::uint32_t token = position / work_.n_used;
    const float weight = work_.weights[token * work_.weights_stride + position % work_.n_used];
    add_weighted(out_.subspan(std::size_t{token} * work_.n_out, work_.n_out), reinterpret_cast<const float*>(row),
                 weight);
}

Status Dispatcher::Call::await() {
    TimePoint deadline = now() + 1h;
    for (const auto& [id, request] : requests_) { deadline = std::min(deadline, request.deadline); }
    if (!todo_.empty()) { deadline = std::min(deadline, now() + 20ms); }
    return progress(deadline - now());
}

Status Dispatcher::Call::progress(Duration timeout) {
    std::vector<pollfd> entries;
    std::vector<Holder*> holders;
    for (const auto& holder : d_.holders_) {
        if (holder->link == nullptr || (holder->in_flight == 0 && holder->link->idle())) { continue; }
        entries.push_back({holder->link->fd(), holder->link->events(), 0});
        holders.push_back(holder.get());
    }
    if (entries.empty() && timeout <= 0ns) { return {}; }
    ::poll(entries.data(), entries.size(), to_poll_ms(timeout));
    for (std::size_t i = 0; i < holders.size(); ++i) {
        if (entries[i].revents == 0) { continue; }
        if (const Status status = serve(*holders[i]); !status) { lose(*holders[i], status.error()); }
    }
    declare_hung();
    return {};
}

Status Dispatcher::Call::serve(Holder& holder) {
    LINKCPP_CHECK(holder.link->flush());
    while (holder.in_flight > 0) {
        LINKCPP_TRY(const std::optional<net::Frame> frame, holder.link->receive());
        if (!frame) { return {}; }
        if (frame->type == wire::FrameType::control) { continue; }
        if (frame->type != wire::FrameType::compute_answer) {
            return fail(ErrorKind::corrupt, "sent a request where answers are expected");
        }
        LINKCPP_TRY(const wire::DecodedAnswer answer, wire::decode_compute_answer(frame->payload));
        LINKCPP_CHECK(take(holder, answer));
    }
    return {};
}

Status Dispatcher::Call::take(Holder& holder, const wire::DecodedAnswer& answer) {
    const wire::ComputeAnswer& header = answer.header;
    const auto found = requests_.find(header.id);
    if (found == requests_.end() || found->second.holder != &holder) {
        ++d_.stats_.late;
        return {};
    }
    Request& request = found->second;
    if (header.outcome != wire::Outcome::done) {
        log_warn("worker {}: {} (layer {}); its work goes to others", holder.name, to_string(header.outcome),
                 work_.layer);
        shun(holder, {ErrorKind::failed, {}});
        give_back(request, &holder);
        finish(holder, found);
        return {};
    }
    const std::size_t expected = n_rows_of(request) - request.received;
    if (header.n_rows == 0 || header.n_rows > expected || header.first != request.received ||
        header.n_out != work_.n_out || header.row_type != row_type()) {
        return fail(ErrorKind::corrupt, "expected at most {} rows of {} from {} on, got {} of {} from {} on", expected,
                    work_.n_out, request.received, header.n_rows, header.n_out, header.first);
    }
    take_rows(request, answer);
    request.compute_us += header.compute_us;
    d_.stats_.compute_us += header.compute_us;
    if (header.n_rows < expected) {
        request.deadline = std::max(request.deadline, now() + d_.options_.hang);  // it is at work
        return {};
    }
    holder.n_failures = 0;
    holder.shunned_until = {};
    stalled_since_.reset();
    if (!request.is_check) { d_.stats_.pairs += request.positions.size(); }
    const double us_per_unit = std::max(1.0, static_cast<double>(request.compute_us)) / request.units;
    holder.us_per_unit =
        holder.us_per_unit == 0 ? us_per_unit : (1 - kSmoothing) * holder.us_per_unit + kSmoothing * us_per_unit;
    if (mode_ == wire::Mode::partial) {
        partial_.push_back({request.holder, request.tasks.front().expert, std::move(request.positions),
                            std::move(request.rows), std::move(request.sums)});
    }
    finish(holder, found);
    return {};
}

std::size_t Dispatcher::Call::n_rows_of(const Request& request) const {
    return mode_ == wire::Mode::exact ? request.positions.size() : request.rows.size();
}

void Dispatcher::Call::finish(Holder& holder, std::map<std::uint64_t, Request>::iterator request) {
    requests_.erase(request);
    --holder.in_flight;
}

void Dispatcher::Call::take_rows(Request& request, const wire::DecodedAnswer& answer) {
    const std::size_t row_bytes = answer.rows.size() / answer.header.n_rows;
    if (mode_ == wire::Mode::exact) {
        for (std::size_t i = 0; i < answer.header.n_rows; ++i) {
            const std::uint32_t position = request.positions[request.received + i];
            const std::byte* row = answer.rows.data() + i * row_bytes;
            if (!request.is_check) {
                deliver(position, row, request.holder);
            } else if (const auto check = checks_.find(position); check != checks_.end()) {
                check->second.by = request.holder;
                check->second.row.resize(work_.n_out);
                std::memcpy(check->second.row.data(), row, row_bytes);
            }
        }
    } else {
        request.sums.resize(request.rows.size() * work_.n_out);
        const std::span<float> place =
            std::span(request.sums)
                .subspan(request.received * work_.n_out, std::size_t{answer.header.n_rows} * work_.n_out);
        if (answer.header.row_type == wire::RowType::f32) {
            std::memcpy(place.data(), answer.rows.data(), answer.rows.size());
        } else {
            expert::halves_to_floats(answer.rows, place);
        }
    }
    request.received += answer.header.n_rows;
}

void Dispatcher::Call::add_partial_sums() {
    std::ranges::sort(partial_, {}, &PartialSums::first_expert);
    for (const PartialSums& sums : partial_) {
        for (std::size_t i = 0; i < sums.tokens.size(); ++i) {
            add_weighted(out_.subspan(std::size_t{sums.tokens[i]} * work_.n_out, work_.n_out),
                         sums.rows.data() + i * work_.n_out, 1.0f);
        }
    }
}

void Dispatcher::Call::declare_hung() {
    const TimePoint time = now();
    for (const auto& holder : d_.holders_) {
        if (holder->link == nullptr || holder->in_flight == 0) { continue; }
        for (const auto& [id, request] : requests_) {
            if (request.holder != holder.get() || time < request.deadline) { continue; }
            lose(*holder, {ErrorKind::timeout, fmt::format("no answer within {:.2f} s, taken to be hung",
                                                           to_seconds(time - request.sent))});
            break;
        }
    }
}

}  // namespace linkcpp::coordinator
