#include "store/neighbour.h"

#include <algorithm>

#include "net/control_link.h"
#include "wire/control.h"

namespace linkcpp::store {
namespace {

using namespace std::chrono_literals;
namespace fb = wire::fb;

constexpr Duration kDialTimeout = 2s;
constexpr Duration kStall = 10s;  // without a byte
constexpr Duration kStopEvery = 100ms;

}  // namespace

Result<std::unique_ptr<NeighbourLink>> NeighbourLink::dial(const Neighbour& neighbour, const net::TlsContext& tls,
                                                           std::stop_token stop) {
    LINKCPP_TRY(UniqueFd fd, net::connect_tcp(neighbour.address, kDialTimeout));
    LINKCPP_TRY(auto link,
                net::Link::tls_client(std::move(fd), fmt::format("neighbour {}", neighbour.name), tls, neighbour.key));
    link->set_limit(wire::kMaxSliceBytes);
    return std::unique_ptr<NeighbourLink>(new NeighbourLink(std::move(link), std::move(stop)));
}

Result<net::Frame> NeighbourLink::next_frame() {
    std::uint64_t moved = link_->moved();
    TimePoint moved_at = steady_now();
    while (true) {
        LINKCPP_CHECK(link_->flush());
        LINKCPP_TRY(const auto frame, link_->receive());
        if (frame) { return *frame; }
        if (stop_.stop_requested()) { return fail(ErrorKind::failed, "not wanted any more"); }
        if (std::exchange(moved, link_->moved()) != link_->moved()) { moved_at = steady_now(); }
        if (steady_now() - moved_at > kStall) {
            return fail(ErrorKind::timeout, "{}: nothing came for {:.0f} s", link_->name(), to_seconds(kStall));
        }
        net::wait(*link_, kStopEvery);
    }
}

Result<NeighbourLink::Has> NeighbourLink::ask(const Digest& model_id) {
    fb::HaveAskT ask;
    ask.model_id = wire::encode_digest(model_id);
    LINKCPP_CHECK(net::send_message(*link_, std::move(ask)));
    LINKCPP_TRY(const net::Frame frame, next_frame());
    if (frame.type != wire::FrameType::control) {
        return fail(ErrorKind::corrupt, "{}: expected what it has, got something else", link_->name());
    }
    LINKCPP_TRY(const auto message, wire::decode_control(frame.payload));
    if (const auto* refused = message->body.AsRefused()) {
        return std::unexpected(net::to_error(*refused, link_->name()));
    }
    const auto* have = message->body.AsHave();
    if (have == nullptr) {
        return fail(ErrorKind::corrupt, "{}: expected what it has, got something else", link_->name());
    }
    return Has{.bits = {SliceBits(have->here), SliceBits(have->coming)}, .n_transfers = have->n_transfers};
}

Status NeighbourLink::fetch(const Digest& hash, std::uint64_t from, std::uint64_t n_bytes, const Take& take) {
    fb::WantT want;
    want.hash = wire::encode_digest(hash);
    want.from = from;
    want.n_bytes = n_bytes;
    LINKCPP_CHECK(net::send_message(*link_, std::move(want)));
    while (from < n_bytes) {
        LINKCPP_TRY(const net::Frame frame, next_frame());
        if (frame.type == wire::FrameType::control) {
            LINKCPP_TRY(const auto message, wire::decode_control(frame.payload));
            if (const auto* refused = message->body.AsRefused()) {
                return std::unexpected(net::to_error(*refused, link_->name()));
            }
            return fail(ErrorKind::corrupt, "{}: expected bytes of a slice, got something else", link_->name());
        }
        if (frame.type != wire::FrameType::slice_bytes || frame.payload.empty() ||
            frame.payload.size() > n_bytes - from) {
            return fail(ErrorKind::corrupt, "{}: expected bytes of a slice, got others", link_->name());
        }
        LINKCPP_CHECK(take(frame.payload));
        from += frame.payload.size();
    }
    return {};
}

}  // namespace linkcpp::store
