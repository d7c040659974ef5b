#include "coordinator/recovery.h"

#include <algorithm>
#include <cmath>

namespace linkcpp::coordinator {
namespace {

using namespace std::chrono_literals;

// Measures move by so much with each answer.
constexpr double kSmoothing = 0.1;
// What is beyond so many times the mean scatter is no chance.
constexpr double kSureScatters = 2;
// Who is asked second waits while the first one's request is written and answer read: no way of its own.
constexpr double kOwnUs = 200;
// A single answer counts for at most so many times the measure, which is taken to be so much at least.
constexpr double kMostTimes = 4;
constexpr double kLeastUs = 1000;
// Measures that were not renewed for so long count half.
constexpr Duration kHalfLife = 5s;
// Usual is what is within so many times the mean scatter.
constexpr double kScatters = 4;
// Stuck is who takes this many times what its work has taken on average, and Patience::stuck on top.
constexpr double kStuckTimes = 8;
// The first rest after a failure; twice that after the next in a row, and so on.
constexpr Duration kRest = 1s;
constexpr int kMaxDoublings = 6;
// To be restarted, or to be given other slices, is no fault; again and again is one.
constexpr int kForgiven = 2;
// In a shorter pause nothing can have piled up that would spoil a measure.
constexpr Duration kShortPause = 50ms;

// No clock has run for so long: some 10,000 years.
constexpr std::uint64_t kMaxClock = 1ull << 58;

Duration from_us(double us) {
    return std::chrono::duration_cast<Duration>(std::chrono::duration<double, std::micro>(us));
}

double to_us(Duration duration) {
    return std::chrono::duration<double, std::micro>(duration).count();
}

}  // namespace

std::string_view to_string(Fault fault) {
    switch (fault) {
        case Fault::dead: return "dead";
        case Fault::hung: return "hung";
        case Fault::stuck: return "stuck";
        case Fault::corrupt: return "corrupt";
        case Fault::refused: return "refused";
        case Fault::moved: return "moved";
    }
    return "unknown";
}

void HolderWatch::connected(TimePoint now) {
    outstanding_.clear();
    clock_offset_us_.reset();
    heard_ = now;
}

Duration HolderWatch::expected_for(double units) const {
    return from_us(us_per_unit_ * units);
}

double HolderWatch::freshness(TimePoint now) const {
    // The clock of a token's layers is much finer: nothing to compute then.
    if (now - answered_ < kShortPause) { return 1; }
    return std::exp2(-to_seconds(now - answered_) / to_seconds(kHalfLife));
}

double HolderWatch::sure_wait_us(TimePoint now) const {
    return std::max(0.0, wait_us_ - kSureScatters * scatter_us_ - kOwnUs) * freshness(now);
}

void HolderWatch::sent(std::uint64_t id, double units, std::size_t n_rows, TimePoint now) {
    if (outstanding_.empty()) { heard_ = working_since_ = now; }
    // Requests wait in line behind those that were sent before them.
    // A worker that was slow for a moment must not be waited for the longer the next time.
    const Duration way = std::min<Duration>(from_us(wait_us_), patience_.hang / 4);
    const TimePoint begin = outstanding_.empty() ? now + way : std::max(now, outstanding_.back().expected);
    outstanding_.push_back({id, units, n_rows, now, us_per_unit_ > 0 ? begin + expected_for(units) : now});
}

HolderWatch::Rows HolderWatch::rows_came(std::uint64_t id, std::size_t first, std::size_t n, std::uint64_t compute_us,
                                         TimePoint now) {
    const auto request = std::ranges::find(outstanding_, id, &Outstanding::id);
    if (request == outstanding_.end() || first + n <= request->received) { return Rows::unknown; }
    heard_ = now;
    // One that is passed over stays what it was, and is late and then stuck.
    if (request == outstanding_.begin()) { working_since_ = now; }
    request->received = first + n;
    request->compute_us += compute_us;
    if (request->received < request->n_rows) { return Rows::more_to_come; }
    n_failures_ = 0;
    rests_until_ = {};
    if (request->timed) { measure(*request, now); }
    finish(request, now);
    return Rows::last;
}

void HolderWatch::measure(const Outstanding& request, TimePoint now) {
    const auto computed = static_cast<double>(std::max<std::uint64_t>(request.compute_us, 1));
    const double per_unit = computed / std::max(request.units, 1e-9);
    const double wait = std::max(0.0, to_us(now - std::max(request.sent, answered_)) - computed);
    if (us_per_unit_ == 0) {
        us_per_unit_ = per_unit;
        wait_us_ = wait;
        scatter_us_ = (wait + computed) / 2;
        return;
    }
    // The older the measure, the more the new one counts.
    const double weight = 1 - (1 - kSmoothing) * freshness(now);
    const double off = std::abs(to_us(now - request.expected));
    // One answer that took a hundred times as long says less than a hundred that took twice as long.
    const auto renew = [weight](double& measure, double sample, double least) {
        measure += weight * (std::min(sample, kMostTimes * std::max(measure, least)) - measure);
    };
    renew(us_per_unit_, per_unit, 0);
    renew(wait_us_, wait, kLeastUs);
    renew(scatter_us_, off, kLeastUs);
}

void HolderWatch::clock_read(std::uint64_t clock_us, TimePoint now) {
    if (clock_us > kMaxClock) { return; }
    // What was read late makes the difference look smaller than it is.
    const std::int64_t offset = static_cast<std::int64_t>(clock_us) - now.time_since_epoch() / 1us;
    clock_offset_us_ = clock_offset_us_ ? std::max(*clock_offset_us_, offset) : offset;
}

bool HolderWatch::refused(std::uint64_t id, Fault fault, TimePoint now) {
    const auto request = std::ranges::find(outstanding_, id, &Outstanding::id);
    if (request == outstanding_.end()) { return false; }
    finish(request, now);
    fail(fault, now);
    return true;
}

void HolderWatch::finish(std::vector<Outstanding>::iterator request, TimePoint now) {
    heard_ = answered_ = now;
    if (request == outstanding_.begin()) { working_since_ = now; }
    outstanding_.erase(request);
}

void HolderWatch::lost(Fault fault, TimePoint now) {
    outstanding_.clear();
    fail(fault, now);
}

void HolderWatch::fail(Fault fault, TimePoint now) {
    ++counts_.at(static_cast<std::size_t>(fault));
    ++n_failures_;
    const bool forgiven = fault == Fault::dead || fault == Fault::moved;
    const int n = forgiven ? n_failures_ - kForgiven : n_failures_;
    if (n > 0) { rests_until_ = now + kRest * (1 << std::min(n - 1, kMaxDoublings)); }
}

void HolderWatch::away(Duration pause) {
    if (pause < kShortPause) { return; }
    heard_ += pause;
    working_since_ += pause;
    for (Outstanding& request : outstanding_) {
        request.expected += pause;
        request.timed = false;
    }
}

std::optional<Fault> HolderWatch::to_give_up(TimePoint now) const {
    if (outstanding_.empty()) { return std::nullopt; }
    if (now - heard_ >= patience_.hang) { return Fault::hung; }
    if (now >= stuck_at(outstanding_.front())) { return Fault::stuck; }
    return std::nullopt;
}

TimePoint HolderWatch::late_at(const Outstanding& request) const {
    // Of a holder that nobody has measured nothing is known but that it should not take as long as a dead one.
    if (us_per_unit_ == 0) { return request.sent + patience_.hang; }
    const Duration scatter = std::min<Duration>(from_us(kScatters * scatter_us_), patience_.hang / 8);
    const Duration margin = std::max({patience_.late, scatter, request.expected - request.sent});
    return request.expected + margin;
}

TimePoint HolderWatch::stuck_at(const Outstanding& request) const {
    return std::max(request.expected, working_since_) + patience_.stuck +
           std::chrono::duration_cast<Duration>(expected_for(request.units) * kStuckTimes);
}

bool HolderWatch::is_late(std::uint64_t id, TimePoint now) const {
    const auto request = std::ranges::find(outstanding_, id, &Outstanding::id);
    return request != outstanding_.end() && now >= late_at(*request);
}

bool HolderWatch::is_late(TimePoint now) const {
    return !outstanding_.empty() && now >= late_at(outstanding_.front());
}

std::optional<TimePoint> HolderWatch::next(TimePoint now) const {
    if (outstanding_.empty()) { return std::nullopt; }
    TimePoint next = std::min(heard_ + patience_.hang, stuck_at(outstanding_.front()));
    for (const Outstanding& request : outstanding_) {
        const TimePoint late = late_at(request);
        if (late > now) { next = std::min(next, late); }
    }
    return next;
}

std::uint64_t HolderWatch::deadline_us(double units, TimePoint now) const {
    if (!clock_offset_us_) { return 0; }
    const TimePoint begin = outstanding_.empty() ? now : std::max(now, outstanding_.back().expected);
    const TimePoint end =
        begin + patience_.stuck + std::chrono::duration_cast<Duration>(expected_for(units) * (1 + kStuckTimes));
    return static_cast<std::uint64_t>(std::max<std::int64_t>(1, end.time_since_epoch() / 1us + *clock_offset_us_));
}

}  // namespace linkcpp::coordinator
