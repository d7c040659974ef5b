#include "base/units.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

namespace linkcpp {
namespace {

struct Unit {
    std::string_view name;
    double factor;
};

constexpr double kKi = 1024;
constexpr double kK = 1000;
constexpr std::array kUnits = {
    Unit{"", 1},
    Unit{"B", 1},
    Unit{"K", kKi},
    Unit{"KiB", kKi},
    Unit{"KB", kK},
    Unit{"M", kKi* kKi},
    Unit{"MiB", kKi* kKi},
    Unit{"MB", kK* kK},
    Unit{"G", kKi* kKi* kKi},
    Unit{"GiB", kKi* kKi* kKi},
    Unit{"GB", kK* kK* kK},
    Unit{"T", kKi* kKi* kKi* kKi},
    Unit{"TiB", kKi* kKi* kKi* kKi},
    Unit{"TB", kK* kK* kK* kK},
};

bool equal_ignoring_case(std::string_view a, std::string_view b) {
    return std::ranges::equal(a, b, [](char x, char y) { return std::tolower(x) == std::tolower(y); });
}

Result<std::uint32_t> parse_index(std::string_view text, std::string_view whole) {
    const auto value = parse_number<std::uint32_t>(text);
    if (!value) { return fail(ErrorKind::invalid, "range: expected numbers such as 0-63 or 1,4,7, got '{}'", whole); }
    return *value;
}

}  // namespace

Result<std::uint64_t> parse_bytes(std::string_view text) {
    double number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
    while (unit.starts_with(' ')) { unit.remove_prefix(1); }
    const auto known = std::ranges::find_if(kUnits, [&](const Unit& u) { return equal_ignoring_case(u.name, unit); });
    if (error != std::errc{} || known == kUnits.end() || !(number >= 0) || !std::isfinite(number)) {
        return fail(ErrorKind::invalid, "size: expected a number with a unit such as 4G, 512MiB or 8GB, got '{}'",
                    text);
    }
    const double bytes = number * known->factor;
    if (bytes > 9e18) { return fail(ErrorKind::invalid, "size: '{}' is too large", text); }
    return static_cast<std::uint64_t>(bytes);
}

Result<double> parse_share(std::string_view text) {
    double share = 0;
    const char* const end = text.data() + text.size();
    auto [next, error] = std::from_chars(text.data(), end, share);
    if (error == std::errc{} && next != end && *next == '/') {
        double parts = 0;
        const auto rest = std::from_chars(next + 1, end, parts);
        next = rest.ptr;
        error = rest.ec;
        share /= parts;
    } else if (error == std::errc{} && next + 1 == end && *next == '%') {
        share /= 100;
        ++next;
    }
    if (error != std::errc{} || next != end || !(share >= 0) || share > 1) {
        return fail(ErrorKind::invalid, "share: expected a number from 0 to 1 such as 0.001, 1/1000 or 0.1%, got '{}'",
                    text);
    }
    return share;
}

Result<std::uint64_t> parse_seconds(std::string_view text) {
    static constexpr std::array<std::pair<std::string_view, std::uint64_t>, 4> kTimes{
        {{"s", 1}, {"m", 60}, {"h", 3600}, {"d", 86400}}};
    static constexpr std::uint64_t kMost = 100ull * 365 * 86400;
    std::uint64_t number = 0;
    const char* const end = text.data() + text.size();
    const auto [next, error] = std::from_chars(text.data(), end, number);
    const auto unit = std::ranges::find(kTimes, std::string_view(next, static_cast<std::size_t>(end - next)),
                                        &std::pair<std::string_view, std::uint64_t>::first);
    if (error != std::errc{} || unit == kTimes.end() || number == 0 || number > kMost / unit->second) {
        return fail(ErrorKind::invalid, "time: expected a number with a unit such as 90s, 30m, 24h or 7d, got '{}'",
                    text);
    }
    return number * unit->second;
}

std::string format_bytes(std::uint64_t bytes) {
    static constexpr std::array kNames = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    auto value = static_cast<double>(bytes);
    std::size_t unit = 0;
    while (value >= 1024 && unit + 1 < kNames.size()) {
        value /= 1024;
        ++unit;
    }
    if (unit == 0) { return fmt::format("{} B", bytes); }
    return fmt::format("{:.{}f} {}", value, value < 10 ? 2 : value < 100 ? 1 : 0, kNames[unit]);
}

Result<std::vector<std::uint32_t>> parse_ranges(std::string_view text) {
    static constexpr std::uint32_t kMaxCount = 65'536;
    std::vector<std::uint32_t> values;
    std::string_view rest = text;
    while (true) {
        const std::size_t comma = rest.find(',');
        const std::string_view part = rest.substr(0, comma);
        const std::size_t dash = part.find('-');
        LINKCPP_TRY(const std::uint32_t first, parse_index(part.substr(0, dash), text));
        std::uint32_t last = first;
        if (dash != std::string_view::npos) { LINKCPP_TRY(last, parse_index(part.substr(dash + 1), text)); }
        if (last < first || last - first >= kMaxCount || values.size() + (last - first) >= kMaxCount) {
            return fail(ErrorKind::invalid, "range: '{}' runs backwards or is too long", part);
        }
        for (std::uint32_t v = first; v <= last; ++v) { values.push_back(v); }
        if (comma == std::string_view::npos) { break; }
        rest.remove_prefix(comma + 1);
    }
    std::ranges::sort(values);
    const auto duplicates = std::ranges::unique(values);
    values.erase(duplicates.begin(), duplicates.end());
    return values;
}

}  // namespace linkcpp
