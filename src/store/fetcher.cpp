#include "store/fetcher.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "store/https_client.h"
#include "store/transfer.h"

namespace linkcpp::store {
namespace {

using namespace std::chrono_literals;

// While the answer to one question is on its way another slice fills the line.
constexpr std::size_t kHubConnections = 2;
constexpr std::size_t kNeighboursAtATime = 4;
constexpr int kMaxAttempts = 8;  // in a row that bring nothing; some 20 s
constexpr Duration kFirstPause = 200ms;
constexpr Duration kMaxPause = 5s;
constexpr Duration kOthersPause = 200ms;  // until one that another process fetches is looked at again
constexpr Duration kRateOver = 5s;
constexpr Duration kSampleEvery = 200ms;
// What a neighbour has is asked for so often, and believed for so long.
constexpr Duration kAskEvery = 500ms;
constexpr Duration kBelieved = 3s;
// A neighbour that has had nothing for so long is left for another.
constexpr Duration kPatience = 2s;
constexpr Duration kLeftAlone = 3s;
constexpr Duration kLeftAloneAfterFailing = 30s;
// When neighbours have brought nothing for so long the hub is asked for what they have, too.
constexpr Duration kUseful = 2s;

class HubOrigin : public SliceOrigin {
  public:
    HubOrigin(const Origin& hub, std::stop_token stop) : client_(hub.address, hub.fingerprint, hub.token) {
        client_.end_with(std::move(stop));
    }
    Status fetch(const Digest& hash, std::uint64_t from, std::uint64_t n_bytes, const Take& take) override {
        return client_.fetch("/slice/" + hash.hex(), from, {.n_bytes = n_bytes, .tag = hash.hex()}, take);
    }

  private:
    HttpsClient client_;
};

}  // namespace

Fetcher::Fetcher(const SliceStore& store, Origin hub, const Neighbourhood& neighbourhood,
                 std::shared_ptr<Inventory> inventory, const std::vector<Slice>& slices)
    : store_(store),
      hub_(std::move(hub)),
      neighbourhood_(neighbourhood),
      inventory_(std::move(inventory)),
      backoff_(kFirstPause, kMaxPause),
      random_(std::random_device{}()) {
    for (const Slice& slice : slices) {
        if (by_hash_.contains(slice.hash)) { continue; }
        by_hash_[slice.hash] = &items_.emplace_back(Item{.slice = slice, .error = {}});
        state_.total_bytes += slice.n_bytes;
    }
    n_open_ = items_.size();
    for (std::size_t i = 0; i < std::min(kHubConnections, n_open_); ++i) {
        threads_.emplace_back([this](const std::stop_token& stop) { run_hub(stop); });
    }
    for (std::size_t i = 0; i < std::min(kNeighboursAtATime, n_open_); ++i) {
        threads_.emplace_back([this](const std::stop_token& stop) { run_neighbours(stop); });
    }
}

Fetcher::~Fetcher() {
    for (std::jthread& thread : threads_) { thread.request_stop(); }
}

Status Fetcher::wait(const Digest& hash, const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    const auto found = by_hash_.find(hash);
    if (found == by_hash_.end()) { return {}; }
    const Item& item = *found->second;
    const auto settled = [&] { return item.stage != Stage::waiting && item.stage != Stage::under_way; };
    if (!changed_.wait(lock, stop, settled)) { return fail(ErrorKind::failed, "not wanted any more"); }
    if (item.stage == Stage::here) { return {}; }
    return std::unexpected(item.error);
}

Fetcher::State Fetcher::state() const {
    const std::lock_guard lock(mutex_);
    State state = state_;
    const TimePoint now = steady_now();
    while (samples_.size() > 1 && now - samples_.front().time > kRateOver) { samples_.pop_front(); }
    if (!samples_.empty() && now > samples_.front().time) {
        state.bytes_per_second = static_cast<std::uint64_t>(
            static_cast<double>(state.n_bytes - samples_.front().n_bytes) / to_seconds(now - samples_.front().time));
    }
    return state;
}

void Fetcher::count(Item& item, std::uint64_t n_bytes, bool is_neighbour) {
    const std::lock_guard lock(mutex_);
    const TimePoint now = steady_now();
    if (samples_.empty() || now - samples_.back().time >= kSampleEvery) { samples_.push_back({now, state_.n_bytes}); }
    n_bytes = std::min(n_bytes, item.slice.n_bytes - item.n_counted);  // what comes a second time counts once
    item.n_counted += n_bytes;
    state_.n_bytes += n_bytes;
    if (is_neighbour) {
        state_.from_neighbours += n_bytes;
        neighbour_was_useful_ = now;
    }
    backoff_.reset();
}

// ---- what comes next; with the lock held

// Neighbours that have a slice or will have it soon, as far as is known.
std::size_t Fetcher::holders(std::size_t index, TimePoint now) const {
    return static_cast<std::size_t>(std::ranges::count_if(known_, [&](const auto& entry) {
        const Known& known = entry.second;
        return now - known.asked_at <= kBelieved && (known.bits.here.get(index) || known.bits.coming.get(index));
    }));
}

// Of those that may be tried now (and are `at` a neighbour), one of those that the fewest have; null where there is
// none.
Fetcher::Item* Fetcher::rarest(TimePoint now, const Known* at, std::size_t& n_holders) {
    Item* best = nullptr;
    std::size_t n_equal = 0;
    for (Item& item : items_) {
        if (item.stage != Stage::waiting || item.not_before > now) { continue; }
        if (at != nullptr && (item.only_hub || !at->bits.here.get(item.slice.index))) { continue; }
        const std::size_t n = holders(item.slice.index, now);
        if (best == nullptr || n < n_holders) {
            best = &item;
            n_holders = n;
            n_equal = 1;
        } else if (n == n_holders && random_() % ++n_equal == 0) {
            best = &item;
        }
    }
    return best;
}

Fetcher::Item* Fetcher::next_of(const Known& known, TimePoint now) {
    std::size_t n_holders = 0;
    return rarest(now, &known, n_holders);
}

Fetcher::Item* Fetcher::next_of_hub(TimePoint now) {
    if (neighbourhood_.all().empty()) {
        const auto first = std::ranges::find_if(
            items_, [&](const Item& item) { return item.stage == Stage::waiting && item.not_before <= now; });
        return first == items_.end() ? nullptr : &*first;
    }
    std::size_t n_holders = 0;
    Item* item = rarest(now, nullptr, n_holders);
    if (item == nullptr || n_holders == 0 || item->only_hub) { return item; }
    const bool hub_is_quicker = hub_rate_ && neighbour_rate_ && *hub_rate_ >= *neighbour_rate_;
    const bool neighbours_help = now - neighbour_was_useful_ <= kUseful;
    return hub_is_quicker || !neighbours_help ? item : nullptr;
}

std::optional<Neighbour> Fetcher::choose_neighbour() {
    std::vector<Neighbour> all = neighbourhood_.all();
    std::ranges::shuffle(all, random_);
    const TimePoint now = steady_now();
    const Neighbour* best = nullptr;
    double least = 0;
    for (const Neighbour& neighbour : all) {
        const Known& known = known_[neighbour.key];
        if (known.taken || known.not_before > now) { continue; }
        if (best == nullptr || known.cost < least) {
            best = &neighbour;
            least = known.cost;
        }
    }
    if (best == nullptr) { return std::nullopt; }
    known_[best->key].taken = true;
    return *best;
}

void Fetcher::note_rate(std::optional<double>& rate, std::uint64_t n_bytes, Duration time) {
    const double now = static_cast<double>(n_bytes) / std::max(to_seconds(time), 1e-6);
    rate = rate ? 0.75 * *rate + 0.25 * now : now;
}

// ---- the threads

void Fetcher::run_hub(const std::stop_token& stop) {
    HubOrigin hub(hub_, stop);
    std::unique_lock lock(mutex_);
    while (!stop.stop_requested() && n_open_ > 0) {
        Item* item = next_of_hub(steady_now());
        if (item == nullptr) {
            changed_.wait_for(lock, stop, kOthersPause, [&] { return n_open_ == 0; });
            continue;
        }
        inventory_->set_coming(item->slice.index, true);
        if (!attempt(lock, hub, *item, false, stop)) { return; }
    }
}

void Fetcher::run_neighbours(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (!stop.stop_requested() && n_open_ > 0) {
        const std::optional<Neighbour> neighbour = choose_neighbour();
        if (!neighbour) {
            changed_.wait_for(lock, stop, kAskEvery, [&] { return n_open_ == 0; });
            continue;
        }
        lock.unlock();
        const bool useful = visit(*neighbour, stop);
        lock.lock();
        Known& known = known_[neighbour->key];
        known.taken = false;
        known.not_before = steady_now() + (useful ? kLeftAlone : kLeftAloneAfterFailing);
    }
}

bool Fetcher::visit(const Neighbour& neighbour, const std::stop_token& stop) {
    const TimePoint dialled = steady_now();
    auto link = NeighbourLink::dial(neighbour, neighbourhood_.tls(), stop);
    if (!link) {
        log_debug("{}", link.error().message);
        return false;
    }
    TimePoint useful = steady_now();
    TimePoint next_question{};
    std::unique_lock lock(mutex_);
    while (!stop.stop_requested() && n_open_ > 0 && steady_now() - useful <= kPatience) {
        Known& known = known_[neighbour.key];
        if (steady_now() >= next_question) {
            lock.unlock();
            const TimePoint asked = steady_now();
            auto has = (*link)->ask(inventory_->model_id());
            lock.lock();
            if (!has) {
                log_debug("{}", has.error().message);
                return false;
            }
            if (next_question == TimePoint{}) {  // with the way there and back, and with how busy it is
                known.cost = to_seconds(asked - dialled) * (1 + has->n_transfers);
            }
            known.bits = std::move(has->bits);
            known.asked_at = steady_now();
            next_question = known.asked_at + kAskEvery;
        }
        Item* item = next_of(known, steady_now());
        if (item == nullptr) {
            changed_.wait_for(lock, stop, kOthersPause, [&] { return n_open_ == 0; });
            continue;
        }
        const auto outcome = attempt(lock, **link, *item, true, stop);
        if (!outcome) { return true; }
        if (!outcome->status && !outcome->on_disk) {
            if (outcome->status.error().kind == ErrorKind::not_found) {
                known.bits.here.set(item->slice.index, false);
                continue;
            }
            log_warn("{}", outcome->status.error().message);
            return false;
        }
        useful = steady_now();
    }
    return true;
}

std::optional<Fetcher::Outcome> Fetcher::attempt(std::unique_lock<std::mutex>& lock, SliceOrigin& from, Item& item,
                                                 bool is_neighbour, const std::stop_token& stop) {
    item.stage = Stage::under_way;
    const std::uint64_t before = item.n_counted;
    const TimePoint begin = steady_now();
    lock.unlock();
    Outcome outcome = fetch(from, item, is_neighbour);
    lock.lock();
    // A neighbour that has nothing to send is not slow.
    if (!is_neighbour || outcome.status || outcome.on_disk) {
        note_rate(is_neighbour ? neighbour_rate_ : hub_rate_, item.n_counted - before, steady_now() - begin);
    }
    if (stop.stop_requested()) { return std::nullopt; }
    settle(item, outcome, is_neighbour);
    changed_.notify_all();
    return outcome;
}

// With the lock held.
void Fetcher::settle(Item& item, const Outcome& outcome, bool is_neighbour) {
    const Status& status = outcome.status;
    if (status) {
        state_.n_bytes += item.slice.n_bytes - std::exchange(item.n_counted, item.slice.n_bytes);
        item.stage = Stage::here;
        inventory_->set_here(item.slice.index);
        --n_open_;
        return;
    }
    inventory_->set_coming(item.slice.index, false);
    item.stage = Stage::waiting;
    if (outcome.on_disk && status.error().kind == ErrorKind::overloaded) {
        item.not_before = steady_now() + kOthersPause;  // another process is at it
        return;
    }
    if (outcome.on_disk) {
        item.stage = Stage::not_kept;
        item.error = {ErrorKind::overloaded, status.error().message};
    } else if (is_neighbour) {
        // Others have it, and the hub has.
        item.only_hub = item.only_hub || status.error().kind == ErrorKind::corrupt;
    } else if (may_pass(status.error().kind) && backoff_.n_failures() + 1 < kMaxAttempts) {
        const Duration pause = backoff_.next();
        item.not_before = steady_now() + pause;
        log_warn("{}; trying again in {:.1f} s", status.error().message, to_seconds(pause));
    } else {
        item.stage = Stage::failed;
        item.error = status.error();
    }
    if (item.stage != Stage::waiting) { --n_open_; }
}

Fetcher::Outcome Fetcher::fetch(SliceOrigin& from, Item& item, bool is_neighbour) {
    const Slice& slice = item.slice;
    if (store_.has(slice.hash)) { return {}; }  // another process was quicker
    auto file = store_.begin(slice.hash, slice.n_bytes);
    if (!file) { return {.status = std::unexpected(file.error()), .on_disk = true}; }
    if (store_.has(slice.hash)) {  // … just now
        store_.give_up(*std::move(file), slice.hash);
        return {};
    }
    const auto fetch_rest = [&](std::uint64_t begin, const Take& take) {
        return from.fetch(slice.hash, begin, slice.n_bytes, take);
    };
    Status fetched = transfer(fetch_rest, slice.n_bytes, slice.hash, *file, [&](std::uint64_t n_bytes) -> Status {
        count(item, n_bytes, is_neighbour);
        return {};
    });
    if (!fetched && !file->disk_failed()) { return {.status = std::move(fetched)}; }
    if (!fetched) {
        store_.give_up(*std::move(file), slice.hash);  // others need the room
        return {.status = std::move(fetched), .on_disk = true};
    }
    return {.status = store_.keep(*std::move(file), slice.hash), .on_disk = true};
}

}  // namespace linkcpp::store
