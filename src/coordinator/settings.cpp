#include "coordinator/settings.h"

#include <cstdlib>

#include <unistd.h>

#include "base/platform.h"
#include "base/units.h"

namespace linkcpp::coordinator {
namespace {

// A few pulses.
constexpr Duration kMinHang = 3 * wire::kPulseEvery;

std::string_view variable(const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr ? value : "";
}

// One of two words; `fallback` when the variable is not set.
Result<bool> choice(const char* name, std::string_view yes, std::string_view no, bool fallback) {
    const std::string_view value = variable(name);
    if (value.empty()) { return fallback; }
    if (value == yes) { return true; }
    if (value == no) { return false; }
    return fail(ErrorKind::invalid, "{}: expected {} or {}, got '{}'", name, yes, no, value);
}

Result<Duration> seconds(const char* name, Duration fallback) {
    const std::string_view value = variable(name);
    if (value.empty()) { return fallback; }
    const auto number = parse_number<double>(value);
    if (!number || !(*number >= 0) || *number > 1e6) {
        return fail(ErrorKind::invalid, "{}: expected seconds, got '{}'", name, value);
    }
    return from_seconds(*number);
}

Result<std::size_t> number(const char* name, std::size_t fallback) {
    const std::string_view value = variable(name);
    if (value.empty()) { return fallback; }
    const auto number = parse_number<std::size_t>(value);
    if (!number || *number == 0) {
        return fail(ErrorKind::invalid, "{}: expected a number from 1, got '{}'", name, value);
    }
    return *number;
}

}  // namespace

Result<Settings> read_settings() {
    Settings settings;
    const std::string_view hub = variable("LINKCPP_HUB");
    if (hub.empty()) { return settings; }
    settings.active = true;
    LINKCPP_TRY(settings.hub.hub, net::parse_join_line(hub));
    LINKCPP_TRY(settings.hub.local_experts, choice("LINKCPP_LOCAL_EXPERTS", "on", "off", true));
    LINKCPP_TRY(settings.other_models_here, choice("LINKCPP_OTHER_MODELS", "here", "refuse", false));
    LINKCPP_TRY(const bool exact, choice("LINKCPP_MODE", "exact", "partial", true));
    LINKCPP_TRY(const bool f16, choice("LINKCPP_ROWS", "f16", "f32", false));
    if (exact && f16) {
        return fail(ErrorKind::invalid, "LINKCPP_ROWS=f16 rounds what is sent: it needs LINKCPP_MODE=partial");
    }
    settings.dispatch.mode = exact ? wire::Mode::exact : wire::Mode::partial;
    settings.dispatch.row_type = f16 ? wire::RowType::f16 : wire::RowType::f32;
    if (const std::string_view audit = variable("LINKCPP_AUDIT"); !audit.empty()) {
        auto share = parse_share(audit);
        if (!share) { return fail_with("LINKCPP_AUDIT", share.error()); }
        settings.dispatch.audit = *share;
    }
    if (const std::string_view listen = variable("LINKCPP_LISTEN"); !listen.empty()) {
        LINKCPP_TRY(settings.hub.listen, net::parse_address(listen));
    }
    if (const std::string_view advertise = variable("LINKCPP_ADVERTISE"); !advertise.empty()) {
        auto address = net::parse_address(advertise, settings.hub.listen.port);
        if (!address) { return fail_with("LINKCPP_ADVERTISE", address.error()); }
        if (address->port == 0) {
            return fail(ErrorKind::invalid, "LINKCPP_ADVERTISE: expected HOST:PORT, got '{}'", advertise);
        }
        settings.hub.advertise = address->text();
    }
    LINKCPP_TRY(settings.hub.unix_socket, choice("LINKCPP_UNIX", "on", "off", true));
    settings.hub.model = variable("LINKCPP_MODEL");
    if (const std::string_view memory = variable("LINKCPP_LOCAL_MEMORY"); !memory.empty()) {
        auto bytes = parse_bytes(memory);
        if (!bytes) { return fail_with("LINKCPP_LOCAL_MEMORY", bytes.error()); }
        settings.hub.local_bytes = *bytes;
    }
    settings.hub.process = fmt::format("{}[{}]", process_name(), ::getpid());
    LINKCPP_TRY(settings.hub.max_callers, number("LINKCPP_MAX_CALLERS", settings.hub.max_callers));
    LINKCPP_TRY(settings.hub.hello_time, seconds("LINKCPP_HELLO_TIME", settings.hub.hello_time));
    if (settings.hub.hello_time <= Duration::zero()) {
        return fail(ErrorKind::invalid, "LINKCPP_HELLO_TIME: expected more than 0, or no worker could ever say hello");
    }
    if (const std::string_view frame = variable("LINKCPP_MAX_FRAME"); !frame.empty()) {
        auto bytes = parse_bytes(frame);
        if (!bytes) { return fail_with("LINKCPP_MAX_FRAME", bytes.error()); }
        if (*bytes < wire::kMinComputeLimit || *bytes > wire::kMaxComputeBytes) {
            return fail(ErrorKind::invalid, "LINKCPP_MAX_FRAME: expected {} to {}, got '{}'",
                        format_bytes(wire::kMinComputeLimit), format_bytes(wire::kMaxComputeBytes), frame);
        }
        settings.dispatch.max_frame = static_cast<std::uint32_t>(*bytes);
    }
    LINKCPP_TRY(settings.wait, seconds("LINKCPP_WAIT", settings.wait));
    LINKCPP_TRY(settings.coverage_wait, seconds("LINKCPP_COVERAGE_WAIT", settings.coverage_wait));
    Patience& patience = settings.dispatch.patience;
    LINKCPP_TRY(patience.hang, seconds("LINKCPP_HANG", patience.hang));
    LINKCPP_TRY(patience.stuck, seconds("LINKCPP_STUCK", patience.stuck));
    LINKCPP_TRY(patience.late, seconds("LINKCPP_LATE", patience.late));
    if (patience.hang < kMinHang) {
        return fail(ErrorKind::invalid,
                    "LINKCPP_HANG: expected at least {} seconds, or every worker would be taken "
                    "to be hung",
                    to_seconds(kMinHang));
    }
    if (const std::string_view twice = variable("LINKCPP_TWICE"); !twice.empty()) {
        auto share = parse_share(twice);
        if (!share) { return fail_with("LINKCPP_TWICE", share.error()); }
        patience.twice = *share;
    }
    return settings;
}

}  // namespace linkcpp::coordinator
