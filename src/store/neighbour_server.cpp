#include "store/neighbour_server.h"

#include <algorithm>
#include <vector>

#include <poll.h>

#include "base/log.h"
#include "net/control_link.h"
#include "wire/frame.h"

namespace linkcpp::store {
namespace {

using namespace std::chrono_literals;
namespace fb = wire::fb;

constexpr Duration kLookEvery = 500ms;
// A neighbour that takes nothing of what it asked for, and one that asks for nothing.
constexpr Duration kIdle = 60s;

}  // namespace

NeighbourServer::NeighbourServer(net::Listener listener, const net::TlsContext& tls, const SliceStore& store,
                                 const Limits& limits, Refusals& refusals, FindInventory find)
    : listener_(std::move(listener)),
      tls_(tls),
      store_(store),
      limits_(limits),
      refusals_(refusals),
      find_(std::move(find)) {}

Result<std::unique_ptr<NeighbourServer>> NeighbourServer::start(const net::Address& address, const net::TlsContext& tls,
                                                                const SliceStore& store, const Limits& limits,
                                                                Refusals& refusals, FindInventory find) {
    LINKCPP_TRY(net::Listener listener, net::Listener::tcp(address));
    std::unique_ptr<NeighbourServer> server(
        new NeighbourServer(std::move(listener), tls, store, limits, refusals, std::move(find)));
    server->thread_ = std::jthread([raw = server.get()](const std::stop_token& stop) { raw->run(stop); });
    return server;
}

NeighbourServer::~NeighbourServer() {
    thread_.request_stop();
    wake_.signal();
}

void NeighbourServer::admit(std::set<Digest> keys) {
    const std::lock_guard lock(mutex_);
    admitted_ = std::move(keys);
}

bool NeighbourServer::is_admitted(const Digest& key) const {
    const std::lock_guard lock(mutex_);
    return admitted_.contains(key);
}

void NeighbourServer::run(const std::stop_token& stop) {
    std::vector<pollfd> entries;
    while (!stop.stop_requested()) {
        entries.clear();
        entries.push_back({wake_.fd(), POLLIN, 0});
        entries.push_back({listener_.fd(), POLLIN, 0});
        bool more = false;  // to send at once
        for (const Guest& guest : guests_) {
            entries.push_back({guest.link->fd(), guest.link->events(), 0});
            more = more || (guest.is_sending() && guest.link->idle());
        }
        ::poll(entries.data(), entries.size(), more ? 0 : to_poll_ms(kLookEvery));
        wake_.clear();
        if ((entries[1].revents & POLLIN) != 0) { accept(); }
        for (auto guest = guests_.begin(); guest != guests_.end();) {
            const Status status = serve(*guest);
            if (!status) { log_debug("neighbour {}: {}", guest->from, status.error().message); }
            guest = status ? std::next(guest) : guests_.erase(guest);
        }
    }
}

void NeighbourServer::accept() {
    auto accepted = listener_.accept();
    if (!accepted || !*accepted) { return; }
    std::string from = (*accepted)->from;
    const auto is_stranger = [](const Guest& guest) { return !guest.known; };
    const auto oldest = std::ranges::find_if(guests_, is_stranger);
    const bool crowded = static_cast<std::size_t>(std::ranges::count_if(guests_, is_stranger)) >= limits_.strangers;
    if (crowded || (guests_.size() >= limits_.links && oldest != guests_.end())) {
        refusals_.note("neighbours: too many strangers",
                       fmt::format("neighbour {}: gives way to others", oldest->from));
        guests_.erase(oldest);
    }
    if (guests_.size() >= limits_.links) {
        refusals_.note("neighbours: too many", fmt::format("neighbour {}: {} are here already", from, guests_.size()));
        return;
    }
    auto link = net::Link::tls_server(std::move((*accepted)->fd), fmt::format("neighbour {}", from), tls_);
    if (!link) { return; }
    guests_.push_back({.link = *std::move(link), .from = std::move(from), .since = steady_now(), .file = {}});
}

Status NeighbourServer::serve(Guest& guest) {
    LINKCPP_CHECK(guest.link->flush());
    while (!guest.is_sending()) {  // one question after the other
        LINKCPP_TRY(const auto frame, guest.link->receive());
        if (guest.link->peer() && !is_admitted(*guest.link->peer())) {
            refusals_.note("neighbours: no worker of this swarm",
                           fmt::format("neighbour {}: is no worker of this swarm", guest.from));
            return fail(ErrorKind::invalid, "no worker of this swarm");
        }
        guest.known = guest.link->peer().has_value();
        if (!frame) { break; }
        guest.since = steady_now();
        LINKCPP_CHECK(handle(guest, *frame));
    }
    if (guest.is_sending() && guest.link->idle()) { LINKCPP_CHECK(send_piece(guest)); }
    if (!guest.known && steady_now() - guest.since > limits_.hello_time) {
        refusals_.note("neighbours: no hello in time", fmt::format("neighbour {}: said nothing", guest.from));
        return fail(ErrorKind::timeout, "no hello in time");
    }
    if (steady_now() - guest.since > kIdle) { return fail(ErrorKind::timeout, "nothing has happened for long"); }
    return {};
}

Status NeighbourServer::handle(Guest& guest, const net::Frame& frame) {
    if (frame.type != wire::FrameType::control) { return fail(ErrorKind::corrupt, "expected a question"); }
    LINKCPP_TRY(const auto message, wire::decode_control(frame.payload));
    if (const auto* want = message->body.AsWant()) { return begin(guest, *want); }
    const auto* ask = message->body.AsHaveAsk();
    if (ask == nullptr) { return fail(ErrorKind::corrupt, "expected a question"); }
    LINKCPP_TRY(const Digest model_id, wire::decode_digest(ask->model_id));
    fb::HaveT have;
    if (const auto inventory = find_(model_id)) {
        const Inventory::Bits bits = inventory->bits();
        have.here = bits.here.bytes();
        have.coming = bits.coming.bytes();
    }
    have.n_transfers =
        static_cast<std::uint32_t>(std::ranges::count_if(guests_, [](const Guest& each) { return each.is_sending(); }));
    return net::send_message(*guest.link, std::move(have));
}

Status NeighbourServer::begin(Guest& guest, const fb::WantT& want) {
    LINKCPP_TRY(const Digest hash, wire::decode_digest(want.hash));
    if (want.from >= want.n_bytes) { return fail(ErrorKind::corrupt, "expected a range of bytes"); }
    auto file = store_.open_slice(hash, want.n_bytes);
    if (!file) {
        net::refuse(*guest.link, ErrorKind::not_found, "this slice is not here");  // the link stands
        return {};
    }
    guest.file = *std::move(file);
    guest.next = want.from;
    guest.end = want.n_bytes;
    return {};
}

Status NeighbourServer::send_piece(Guest& guest) {
    const std::uint64_t n = std::min<std::uint64_t>(wire::kMaxSliceBytes, guest.end - guest.next);
    LINKCPP_TRY(const std::span<std::byte> payload, guest.link->append(wire::FrameType::slice_bytes, n));
    // Bytes that are wrong are noticed by whoever gets them.
    LINKCPP_CHECK(read_at(guest.file.get(), payload, guest.next, guest.from));
    guest.next += n;
    guest.since = steady_now();
    bytes_sent_ += n;
    if (!guest.is_sending()) { guest.file.reset(); }
    return guest.link->flush();
}

}  // namespace linkcpp::store
