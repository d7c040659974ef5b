#include "net/control_link.h"

#include "base/platform.h"
#include "net/socket.h"

namespace linkcpp::net {
namespace {

constexpr Duration kConnectTimeout = std::chrono::seconds(3);
constexpr Duration kHelloTimeout = std::chrono::seconds(5);

}  // namespace

Result<std::unique_ptr<wire::ControlT>> receive_message(Link& link) {
    while (true) {
        LINKCPP_TRY(const std::optional<Frame> frame, link.receive());
        if (!frame) { return nullptr; }
        if (frame->type != wire::FrameType::control) {
            return fail(ErrorKind::corrupt, "{}: expected a control message, got a frame of type {}", link.name(),
                        static_cast<int>(frame->type));
        }
        auto message = wire::decode_control(frame->payload);
        if (message) { return message; }
        if (message.error().kind != ErrorKind::unsupported) { return fail_with(link.name(), message.error()); }
    }
}

Result<std::unique_ptr<wire::ControlT>> receive_message_blocking(Link& link, Duration timeout) {
    const TimePoint deadline = steady_now() + timeout;
    while (true) {
        LINKCPP_CHECK(link.flush());
        LINKCPP_TRY(std::unique_ptr<wire::ControlT> message, receive_message(link));
        if (message) { return message; }
        const Duration left = deadline - steady_now();
        if (left <= Duration::zero()) { return fail(ErrorKind::timeout, "{}: no answer in time", link.name()); }
        wait(link, left);
    }
}

Result<Joined> join_hub(const JoinLine& hub, const TlsContext& context, wire::fb::HelloT hello) {
    const std::string name = fmt::format("hub at {}", hub.hub.text());
    LINKCPP_TRY(UniqueFd fd, connect_tcp(hub.hub, kConnectTimeout));
    LINKCPP_TRY(auto link, Link::tls_client(std::move(fd), name, context, hub.fingerprint));
    hello.features = wire::features();
    hello.release = LINKCPP_VERSION;
    hello.token = hub.token;
    hello.boot_id = boot_id();
    LINKCPP_CHECK(send_message(*link, std::move(hello)));
    LINKCPP_TRY(const auto answer, receive_message_blocking(*link, kHelloTimeout));
    if (const auto* refused = answer->body.AsRefused()) { return std::unexpected(to_error(*refused, name)); }
    const auto* welcome = answer->body.AsWelcome();
    if (welcome == nullptr) { return fail(ErrorKind::corrupt, "{}: expected a welcome", name); }
    link->set_limit(wire::kMaxControlBytes);
    return Joined{std::move(link), *welcome};
}

void refuse(Link& link, ErrorKind kind, std::string_view reason) {
    wire::fb::RefusedT refused;
    refused.reason = reason;
    refused.kind = static_cast<std::uint8_t>(kind);
    (void)send_message(link, std::move(refused));  // the link is given up either way
}

std::vector<std::unique_ptr<wire::fb::TurnedAwayT>> turned_away(const Refusals& refusals) {
    std::vector<std::unique_ptr<wire::fb::TurnedAwayT>> entries;
    for (const auto& [name, n] : refusals.counts()) {
        auto entry = std::make_unique<wire::fb::TurnedAwayT>();
        entry->name = name;
        entry->n = n;
        entries.push_back(std::move(entry));
    }
    return entries;
}

Error to_error(const wire::fb::RefusedT& refused, std::string_view peer) {
    const bool known = refused.kind >= static_cast<std::uint8_t>(ErrorKind::invalid) &&
                       refused.kind <= static_cast<std::uint8_t>(ErrorKind::failed);
    return {known ? static_cast<ErrorKind>(refused.kind) : ErrorKind::failed,
            fmt::format("{} refused: {}", peer, refused.reason)};
}

}  // namespace linkcpp::net
