// A link that carries control messages: frames are encoded and decoded here, unknown messages of later releases
// skipped.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/refusals.h"
#include "net/join_line.h"
#include "net/link.h"
#include "wire/control.h"

namespace linkcpp::net {

// For the statistics that a process sends to its hub.
std::vector<std::unique_ptr<wire::fb::TurnedAwayT>> turned_away(const Refusals& refusals);

template <class Message>
Status send_message(Link& link, Message message) {
    const Bytes payload = wire::encode_control(std::move(message));
    return link.send(wire::FrameType::control, {payload});
}

// The next message, null if none is there yet. Errors: those of Link::receive(), corrupt (another kind of frame).
Result<std::unique_ptr<wire::ControlT>> receive_message(Link& link);

// Waits for the next message. Errors: the same, timeout.
Result<std::unique_ptr<wire::ControlT>> receive_message_blocking(Link& link, Duration timeout);

struct Joined {
    std::unique_ptr<Link> link;  // accepts control messages of full size
    wire::fb::WelcomeT welcome;
};
// Dials a hub and says hello; what every peer says (features, release, token, boot id) is filled in here. Blocks for
// some seconds at most. Errors: those of connect_tcp() and Link, what the hub says when it refuses.
Result<Joined> join_hub(const JoinLine& hub, const TlsContext& context, wire::fb::HelloT hello);

// Tells the peer why it is not let in, as far as the socket takes it at once; the caller closes the link.
void refuse(Link& link, ErrorKind kind, std::string_view reason);

// The error that a Refused message carries.
Error to_error(const wire::fb::RefusedT& refused, std::string_view peer);

}  // namespace linkcpp::net
