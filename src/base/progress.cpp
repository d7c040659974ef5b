#include "base/progress.h"

#include <cstdio>

#include <fmt/format.h>
#include <unistd.h>

#include "base/units.h"

namespace linkcpp {
namespace {

constexpr Duration kQuiet = std::chrono::milliseconds(500);
constexpr Duration kRedraw = std::chrono::milliseconds(100);
constexpr Duration kNextLine = std::chrono::seconds(5);

}  // namespace

Progress::Progress(std::string_view what, std::uint64_t total, Unit unit, bool quiet)
    : what_(what),
      total_(total),
      unit_(unit),
      quiet_(quiet),
      terminal_(isatty(STDERR_FILENO) == 1),
      start_(steady_now()),
      next_draw_(start_ + kQuiet) {}

Progress::~Progress() {
    if (!drawn_) { return; }
    draw(steady_now());
    if (terminal_) { std::fputc('\n', stderr); }
}

void Progress::set(std::uint64_t done) {
    done_ = done;
    const TimePoint now = steady_now();
    if (quiet_ || now < next_draw_) { return; }
    draw(now);
    next_draw_ = now + (terminal_ ? kRedraw : kNextLine);
}

void Progress::draw(TimePoint now) {
    const auto amount = [this](std::uint64_t n) { return unit_ == Unit::bytes ? format_bytes(n) : std::to_string(n); };
    const double seconds = to_seconds(now - start_);
    const double rate = seconds > 0 ? static_cast<double>(done_) / seconds : 0;
    std::string line = fmt::format("{} {}", what_, amount(done_));
    if (total_ > 0) { line += fmt::format(" of {}  {}%", amount(total_), done_ * 100 / total_); }
    line += fmt::format("  {}/s", amount(static_cast<std::uint64_t>(rate)));
    if (total_ > done_ && rate > 0) {
        line += fmt::format("  {:.0f} s left", static_cast<double>(total_ - done_) / rate);
    }
    fmt::print(stderr, "{}{}{}", terminal_ ? "\r\033[K" : "", line, terminal_ ? "" : "\n");
    std::fflush(stderr);
    drawn_ = true;
}

}  // namespace linkcpp
