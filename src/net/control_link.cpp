#include "net/control_link.h"

namespace linkcpp::net {

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
    const TimePoint deadline = std::chrono::steady_clock::now() + timeout;
    while (true) {
        LINKCPP_CHECK(link.flush());
        LINKCPP_TRY(std::unique_ptr<wire::ControlT> message, receive_message(link));
        if (message) { return message; }
        const Duration left = deadline - std::chrono::steady_clock::now();
        if (left <= Duration::zero()) { return fail(ErrorKind::timeout, "{}: no answer in time", link.name()); }
        wait(link, left);
    }
}

void refuse(Link& link, ErrorKind kind, std::string_view reason) {
    wire::fb::RefusedT refused;
    refused.reason = reason;
    refused.kind = static_cast<std::uint8_t>(kind);
    (void)send_message(link, std::move(refused));  // the link is given up either way
}

Error to_error(const wire::fb::RefusedT& refused, std::string_view peer) {
    const bool known = refused.kind >= static_cast<std::uint8_t>(ErrorKind::invalid) &&
                       refused.kind <= static_cast<std::uint8_t>(ErrorKind::failed);
    return {known ? static_cast<ErrorKind>(refused.kind) : ErrorKind::failed,
            fmt::format("{} refused: {}", peer, refused.reason)};
}

}  // namespace linkcpp::net
