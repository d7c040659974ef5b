#include "coordinator/call.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

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
static_assert(2 * kRequestBytes <= wire::kMinComputeLimit);  // every worker takes it
// Requests with more pairs are in the experts' order, so that the answer can be computed and sent in parts; smaller
// ones in the tokens' order, in which several tokens with all their experts make one rectangle.
constexpr std::size_t kTokenOrderPairs = 32;
// So often it is said of a holder that it is late; the figures count each time.
constexpr Duration kNoteLateEvery = 10s;

Fault fault_of(wire::Outcome outcome) {
    const bool moved = outcome == wire::Outcome::stale_epoch || outcome == wire::Outcome::not_held;
    return moved ? Fault::moved : Fault::refused;
}

Fault fault_of(const Error& error) {
    return error.kind == ErrorKind::corrupt ? Fault::corrupt : Fault::dead;
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
    if (mode_ == wire::Mode::exact) {
        answered_by_.resize(std::size_t{work_.n_tokens} * work_.n_used);
        delivered_.resize(answered_by_.size());
    }
    while (true) {
        d_.refresh();
        take_next_links();
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
    bool best_is_preferred = false;
    const double units = units_of(task);
    const TimePoint time_now = steady_now();
    for (const std::uint16_t index : d_.routes_->holders[layer_][task.expert]) {
        Holder* holder = d_.by_route_[index];
        if (holder == nullptr || !holder->usable() || !takes(*holder, task)) { continue; }
        const std::pair<const Holder*, std::uint32_t> refusal(holder, d_.routes_->workers[index].epoch);
        if (std::ranges::find(task.failed, refusal) != task.failed.end()) { continue; }
        const double time = mode_ == wire::Mode::partial ? holder->load + units
                                                         : holder->watch.sure_wait_us(time_now) +
                                                               (holder->load + units) * speed_of(*holder, time_now);
        const bool is_preferred = holder->watch.preferred(time_now);
        if (best == nullptr || (is_preferred && !best_is_preferred) ||
            (is_preferred == best_is_preferred && time < best_time)) {
            best = holder;
            best_time = time;
            best_is_preferred = is_preferred;
        }
    }
    return best != nullptr && !best_is_preferred && d_.local_ != nullptr ? nullptr : best;
}

bool Dispatcher::Call::takes(const Holder& holder, const Task& task) const {
    return bytes_for(task.positions.size()) + wire::ComputeRequest::kHeaderBytes <= holder.link->peer_limit();
}

double Dispatcher::Call::speed_of(const Holder& holder, TimePoint time) const {
    if (const double speed = holder.watch.us_per_unit(time); speed > 0) { return speed; }
    double fastest = 0;
    for (const auto& other : d_.holders_) {
        const double speed = other->watch.us_per_unit(time);
        if (speed > 0 && (fastest == 0 || speed < fastest)) { fastest = speed; }
    }
    return fastest > 0 ? fastest : 1;
}

Dispatcher::Task Dispatcher::Call::whole_task(std::uint16_t expert) const {
    Task task{.expert = expert, .positions = {}, .failed = {}};
    const std::uint32_t n_slots = mode_ == wire::Mode::partial ? work_.n_summed : work_.n_used;
    for (std::uint32_t t = 0; t < work_.n_tokens; ++t) {
        for (std::uint32_t slot = 0; slot < n_slots; ++slot) {
            const std::uint32_t position = t * work_.n_used + slot;
            if (expert_at(position) == expert) { task.positions.push_back(position); }
        }
    }
    return task;
}

bool Dispatcher::Call::is_done(const Task& task) const {
    if (mode_ == wire::Mode::partial) { return summed_.contains(task.expert); }
    return std::ranges::all_of(task.positions, [this](std::uint32_t position) { return delivered_[position]; });
}

bool Dispatcher::Call::is_in_work(const Task& task) const {
    const auto is_it = [&](const Task& other) { return other.expert == task.expert && !other.is_check; };
    return std::ranges::any_of(todo_, is_it) || std::ranges::any_of(local_, is_it) ||
           std::ranges::any_of(requests_,
                               [&](const auto& entry) { return std::ranges::any_of(entry.second.tasks, is_it); });
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
    if (!todo_.empty()) { stall_.begin(steady_now()); }
    for (auto& [holder, tasks] : chosen) { send_all(*holder, std::move(tasks)); }
    for (auto& [holder, tasks] : checking) { send_all(*holder, std::move(tasks)); }
    if (!todo_.empty() && stall_.is_over(steady_now())) {
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

std::uint32_t Dispatcher::Call::epoch_of(const Holder& holder) const {
    const Routes::Worker* route = d_.routes_->find(holder.id);
    return route != nullptr ? route->epoch : 0;
}

void Dispatcher::Call::send_all(Holder& holder, std::vector<Task> tasks, bool is_second) {
    std::vector<Task> batch;
    std::size_t n_pairs = 0;
    const auto flush = [&] {
        if (!batch.empty()) { send(holder, std::move(batch), is_second); }
        batch.clear();
        n_pairs = 0;
    };
    for (Task& task : tasks) {
        if (holder.link == nullptr) {  // lost while sending
            put_back(std::move(task));
            continue;
        }
        const std::size_t more = n_pairs + task.positions.size();
        const bool too_many = more > wire::kMaxPairs || (has_own_rows() && more > wire::kMaxRows);
        if (bytes_for(more) > kRequestBytes || too_many) { flush(); }
        n_pairs += task.positions.size();
        batch.push_back(std::move(task));
    }
    if (holder.link == nullptr) {
        for (Task& task : batch) { put_back(std::move(task)); }
        return;
    }
    flush();
}

void Dispatcher::Call::send(Holder& holder, std::vector<Task> tasks, bool is_second) {
    Request request{.holder = &holder, .tasks = std::move(tasks), .is_second = is_second, .sent = steady_now()};
    request.is_check = request.tasks.front().is_check;
    const std::vector<wire::Pair> pairs = list_pairs(request);
    const wire::ComputeRequest header{.id = d_.next_request_++,
                                      .model = d_.model_id_.prefix(),
                                      .epoch = epoch_of(holder),
                                      .layer = work_.layer,
                                      .n_rows = static_cast<std::uint32_t>(request.rows.size()),
                                      .n_pairs = static_cast<std::uint32_t>(pairs.size()),
                                      .n_in = work_.n_in,
                                      .mode = mode_,
                                      .row_type = row_type(),
                                      .product = static_cast<std::uint8_t>(work_.product.value_or(model::Role{})),
                                      .deadline_us = holder.watch.deadline_us(request.units, request.sent)};
    holder.watch.sent(header.id, request.units, n_rows_of(request), request.sent);
    d_.twice_.earn();
    ++d_.stats_.requests;
    const Request& queued = requests_.emplace(header.id, std::move(request)).first->second;
    if (const Status status = write(*holder.link, header, pairs, queued.rows); !status) {
        lose(holder, fault_of(status.error()), status.error());
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

void Dispatcher::Call::lose(Holder& holder, Fault fault, const Error& error) {
    d_.note(holder, LogLevel::warn, fmt::format("{}; its work goes to others", error.message));
    holder.was_at_fault = true;
    holder.watch.lost(fault, steady_now());
    holder.drop_link();
    stall_.begin(steady_now());
    for (auto it = requests_.begin(); it != requests_.end();) {
        if (it->second.holder != &holder) {
            ++it;
            continue;
        }
        Request request = std::move(it->second);
        it = requests_.erase(it);
        give_back(request, nullptr);
    }
}

void Dispatcher::Call::give_back(Request& request, const Holder* refused_by) {
    for (Task& task : request.tasks) {
        if (refused_by != nullptr && !task.is_check) { task.failed.emplace_back(refused_by, epoch_of(*refused_by)); }
        put_back(std::move(task));
    }
}

void Dispatcher::Call::put_back(Task task) {
    if (task.is_check) {
        local_checks_.push_back(std::move(task));
    } else if (!is_done(task) && !is_in_work(task)) {
        for (const std::uint32_t position : task.positions) { checks_.erase(position); }  // drawn anew
        d_.stats_.retries += task.positions.size();
        todo_.push_back(std::move(task));
    }
}

void Dispatcher::Call::take_next_links() {
    for (const auto& holder : d_.holders_) {
        if (holder->next_link == nullptr) { continue; }
        const bool is_asked =
            std::ranges::any_of(requests_, [&](const auto& entry) { return entry.second.holder == holder.get(); });
        if (is_asked) { lose(*holder, Fault::dead, {ErrorKind::disconnected, "it has dialled again"}); }
        holder->take_next_link(steady_now());
    }
}

void Dispatcher::Call::give_up() {
    const TimePoint time = steady_now();
    for (const auto& holder : d_.holders_) {
        const std::optional<Fault> fault = holder->link != nullptr ? holder->watch.to_give_up(time) : std::nullopt;
        if (!fault) { continue; }
        const Patience& patience = d_.options_.patience;
        lose(*holder, *fault,
             {ErrorKind::timeout,
              *fault == Fault::hung
                  ? fmt::format("no sign of life for {:.2f} s, taken to be hung", to_seconds(patience.hang))
                  : fmt::format("alive, but without an answer for {:.0f} s more than it should take, "
                                "taken to be stuck",
                                to_seconds(patience.stuck))});
    }
}

void Dispatcher::Call::ask_others() {
    const TimePoint time = steady_now();
    std::vector<std::uint64_t> late;
    for (const auto& [id, request] : requests_) {
        if (!request.asked_twice && request.holder->watch.is_late(id, time)) { late.push_back(id); }
    }
    for (const std::uint64_t id : late) { ask_others(id); }
}

void Dispatcher::Call::ask_others(std::uint64_t id) {
    Request& request = requests_.at(id);
    if (request.is_check) {  // nobody waits for a second opinion: it is had elsewhere
        give_back(request, nullptr);
        requests_.erase(id);
        return;
    }
    Chosen chosen;
    std::vector<Task> here;
    for (const Task& task : request.tasks) {
        if (is_done(task)) { continue; }
        Task again{.expert = task.expert, .positions = task.positions, .failed = task.failed};
        again.failed.emplace_back(request.holder, epoch_of(*request.holder));
        Holder* other = choose(again);
        if (other != nullptr &&
            !other->watch.is_late(steady_now())) {  // one that rests is better than one that is late
            tasks_for(chosen, other).push_back(std::move(again));
        } else if (d_.local_ != nullptr) {
            here.push_back(std::move(again));
        }
    }
    const std::size_t n_groups = chosen.size() + (here.empty() ? 0 : 1);
    request.asked_twice = n_groups == 0;
    // What is summed together stays together: which holder is late must not change the sum.
    if (n_groups == 0 || (mode_ == wire::Mode::partial && n_groups > 1) || !d_.twice_.spend()) { return; }
    request.asked_twice = true;
    ++d_.stats_.twice;
    if (steady_now() - request.holder->late_noted > kNoteLateEvery) {
        request.holder->late_noted = steady_now();
        d_.note(*request.holder, LogLevel::info, "late; what it has not answered in time is given to others, too");
    }
    for (auto& [holder, tasks] : chosen) {
        for (const Task& task : tasks) { holder->load += units_of(task); }
        send_all(*holder, std::move(tasks), true);
    }
    std::ranges::move(here, std::back_inserter(local_));
}

void Dispatcher::Call::forget_done() {
    std::erase_if(requests_, [this](const auto& entry) {
        const Request& request = entry.second;
        const bool done =
            !request.is_check && std::ranges::all_of(request.tasks, [this](const Task& task) { return is_done(task); });
        if (done && !request.is_second) { ++d_.stats_.twice_first; }
        return done;
    });
}

Status Dispatcher::Call::compute_local() {
    std::vector<Task> tasks = std::move(local_);
    local_.clear();
    for (const Task& task : tasks) {
        if (is_done(task)) { continue; }
        const std::size_t n_pairs = task.positions.size();
        const std::vector<float> rows = gather(task.positions);
        std::vector<float> results(n_pairs * work_.n_out);
        LINKCPP_CHECK(d_.local_->compute(work_.layer, work_.product, task.expert, rows, results));
        for (std::size_t i = 0; i < n_pairs; ++i) {
            deliver(task.positions[i], reinterpret_cast<const std::byte*>(results.data() + i * work_.n_out), nullptr);
        }
        summed_.insert(task.expert);
        d_.stats_.local_pairs += n_pairs;
        forget_done();
        LINKCPP_CHECK(progress(0ns));
    }
    return {};
}

void Dispatcher::Call::deliver(std::uint32_t position, const std::byte* row, Holder* by) {
    if (mode_ == wire::Mode::exact) {
        if (delivered_[position]) { return; }
        delivered_[position] = true;
        answered_by_[position] = by;
        std::memcpy(out_.data() + std::size_t{position} * work_.n_out, row, std::size_t{work_.n_out} * sizeof(float));
    } else {
        const std::uint32_t token = position / work_.n_used;
        const float weight = work_.weights[token * work_.weights_stride + position % work_.n_used];
        add_weighted(out_.subspan(std::size_t{token} * work_.n_out, work_.n_out), reinterpret_cast<const float*>(row),
                     weight);
    }
    ++d_.stats_.pairs;
}

Status Dispatcher::Call::await() {
    const TimePoint time = steady_now();
    TimePoint next = time + 1h;
    for (const auto& holder : d_.holders_) {
        if (const auto changes = holder->watch.next(time)) { next = std::min(next, *changes); }
    }
    if (!todo_.empty()) { next = std::min(next, time + 20ms); }
    return progress(next - time);
}

Status Dispatcher::Call::progress(Duration timeout) {
    std::vector<pollfd> entries;
    std::vector<Holder*> holders;
    for (const auto& holder : d_.holders_) {
        if (holder->link == nullptr || (!holder->watch.busy() && holder->link->idle())) { continue; }
        entries.push_back({holder->link->fd(), holder->link->events(), 0});
        holders.push_back(holder.get());
    }
    if (entries.empty() && timeout <= 0ns) { return {}; }
    ::poll(entries.data(), entries.size(), to_poll_ms(timeout));
    for (std::size_t i = 0; i < holders.size(); ++i) {
        if (entries[i].revents == 0) { continue; }
        if (const Status status = serve(*holders[i]); !status) {
            lose(*holders[i], fault_of(status.error()), status.error());
        }
    }
    give_up();
    ask_others();
    return {};
}

Status Dispatcher::Call::serve(Holder& holder) {
    const std::uint64_t before = holder.link->moved();
    const Status status = read_answers(holder);
    if (status && holder.link->moved() != before) { holder.watch.heard(steady_now()); }
    return status;
}

Status Dispatcher::Call::read_answers(Holder& holder) {
    LINKCPP_CHECK(holder.link->flush());
    while (holder.watch.busy()) {
        LINKCPP_TRY(const std::optional<net::Frame> frame, holder.link->receive());
        if (!frame) { return {}; }
        if (frame->type == wire::FrameType::control) { continue; }  // a pulse
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
    const TimePoint time = steady_now();
    holder.watch.clock_read(header.clock_us, time);
    const auto found = requests_.find(header.id);
    const bool is_waited_for = found != requests_.end() && found->second.holder == &holder;
    if (header.outcome != wire::Outcome::done) {
        const bool is_known = holder.watch.refused(header.id, fault_of(header.outcome), time);
        if (!is_known || !is_waited_for) {
            ++d_.stats_.late;
            return {};
        }
        // Where slices move, a request may well be too late.
        const bool moved = fault_of(header.outcome) == Fault::moved;
        d_.note(holder, moved ? LogLevel::info : LogLevel::warn,
                fmt::format("{} (layer {}); its work goes to others", to_string(header.outcome), work_.layer));
        holder.was_at_fault = !moved;
        Request request = std::move(found->second);
        requests_.erase(found);
        give_back(request, &holder);
        return {};
    }
    if (is_waited_for) {
        const Request& request = found->second;
        const std::size_t expected = n_rows_of(request) - request.received;
        const bool is_new = std::size_t{header.first} + header.n_rows > request.received;
        if (header.n_rows == 0 || (is_new && (header.n_rows > expected || header.first != request.received)) ||
            header.n_out != work_.n_out || header.row_type != row_type()) {
            return fail(ErrorKind::corrupt, "expected at most {} rows of {} from {} on, got {} of {} from {} on",
                        expected, work_.n_out, request.received, header.n_rows, header.n_out, header.first);
        }
    }
    const HolderWatch::Rows rows =
        holder.watch.rows_came(header.id, header.first, header.n_rows, header.compute_us, time);
    if (rows == HolderWatch::Rows::unknown || !is_waited_for) {
        ++d_.stats_.late;
        return {};
    }
    Request& request = found->second;
    take_rows(request, answer);
    d_.stats_.compute_us += header.compute_us;
    if (rows == HolderWatch::Rows::more_to_come) { return {}; }
    if (std::exchange(holder.was_at_fault, false)) { d_.note(holder, LogLevel::info, "answers again"); }
    stall_.end();
    if (mode_ == wire::Mode::partial) {
        d_.stats_.pairs += request.positions.size();
        for (const Task& task : request.tasks) { summed_.insert(task.expert); }
        partial_.push_back({request.holder, request.tasks.front().expert, std::move(request.positions),
                            std::move(request.rows), std::move(request.sums)});
    }
    requests_.erase(found);
    forget_done();
    return {};
}

std::size_t Dispatcher::Call::n_rows_of(const Request& request) const {
    return mode_ == wire::Mode::exact ? request.positions.size() : request.rows.size();
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

}  // namespace linkcpp::coordinator
