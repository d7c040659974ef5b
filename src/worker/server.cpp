#include "worker/server.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <poll.h>
#include <sys/ioctl.h>

#include "base/clock.h"
#include "base/log.h"
#include "expert/half.h"
#include "wire/control.h"
#include "wire/frame.h"

namespace linkcpp::worker {
namespace {

// After so long without a request nobody has to be told anything.
constexpr Duration kPulseIdle = std::chrono::seconds(1);

std::uint64_t clock_us() {
    return static_cast<std::uint64_t>(steady_now().time_since_epoch() / std::chrono::microseconds(1));
}

bool has_unread(const net::Link& link) {
    int n = 0;
    return ::ioctl(link.fd(), FIONREAD, &n) == 0 && n > 0;
}

wire::Outcome outcome_of(const Error& error) {
    switch (error.kind) {
        case ErrorKind::not_found: return wire::Outcome::not_held;
        case ErrorKind::invalid:
        case ErrorKind::corrupt: return wire::Outcome::malformed;
        case ErrorKind::overloaded: return wire::Outcome::overloaded;
        case ErrorKind::timeout: return wire::Outcome::expired;
        case ErrorKind::unsupported: return wire::Outcome::unknown_model;
        default: return wire::Outcome::failed;
    }
}

// The rows as they lie in the frame where that is possible, else a copy in `place`.
std::span<const float> as_floats(const wire::DecodedRequest& request, RawFloats& place) {
    const ByteView rows = request.rows;
    const bool f32 = request.header.row_type == wire::RowType::f32;
    if (f32 && reinterpret_cast<std::uintptr_t>(rows.data()) % alignof(float) == 0) {
        return {reinterpret_cast<const float*>(rows.data()), rows.size() / sizeof(float)};
    }
    place.resize(std::size_t{request.header.n_rows} * request.header.n_in);
    if (f32) {
        std::memcpy(place.data(), rows.data(), rows.size());
    } else {
        expert::halves_to_floats(rows, place);
    }
    return place;
}

// An answer's rows go out in frames of about this size: small enough to be read while they are in the caches.
constexpr std::size_t kPartBytes = 1u << 20;

}  // namespace

class Server::AtWork {
  public:
    AtWork(Server& server, Lock& lock, const net::Link* asking) : server_(server), lock_(lock) {
        server_.asking_ = asking;
        server_.at_work_ = true;
        if (server_.pulse_sleeps_) { server_.pulse_wanted_.notify_one(); }
        lock_.unlock();
    }
    ~AtWork() {
        lock_.lock();
        server_.asking_ = nullptr;
        server_.at_work_ = false;
        server_.worked_at_ = steady_now();
    }
    AtWork(const AtWork&) = delete;
    AtWork& operator=(const AtWork&) = delete;

  private:
    Server& server_;
    Lock& lock_;
};

Server::Server(expert::Engine& engine) : Server(engine, Limits()) {}

Server::Server(expert::Engine& engine, const Limits& limits)
    : engine_(engine),
      limits_(limits),
      thread_([this](const std::stop_token& stop) { run(stop); }),
      pulse_thread_([this](const std::stop_token& stop) { pulse(stop); }) {}

Server::~Server() {
    pulse_thread_.request_stop();
    thread_.request_stop();
    wake_.signal();
}

void Server::add(std::unique_ptr<net::Link> link, std::shared_ptr<std::atomic<bool>> alive, std::string id) {
    {
        const std::lock_guard lock(inbox_mutex_);
        inbox_.push_back({std::move(link), std::move(alive), std::move(id)});
    }
    wake_.signal();
}

void Server::drop(const std::string& id) {
    {
        const std::lock_guard lock(inbox_mutex_);
        dropped_.push_back(id);
    }
    wake_.signal();
}

void Server::post(std::function<void()> work) {
    {
        const std::lock_guard lock(inbox_mutex_);
        work_.push_back(std::move(work));
    }
    wake_.signal();
}

void Server::set_epochs(std::vector<std::uint32_t> epochs) {
    {
        const std::lock_guard lock(inbox_mutex_);
        inbox_epochs_ = std::move(epochs);
    }
    wake_.signal();
}

void Server::work_one(Lock& lock) {
    std::function<void()> work;
    {
        const std::lock_guard inbox(inbox_mutex_);
        if (work_.empty()) { return; }
        work = std::move(work_.front());
        work_.pop_front();
        if (!work_.empty()) { wake_.signal(); }
    }
    const AtWork at_work(*this, lock, nullptr);
    work();
}

void Server::adopt() {
    const std::lock_guard lock(inbox_mutex_);
    for (Client& client : inbox_) {
        client.link->set_limit(limits_.frame_bytes);
        client.link->set_queue_limit(limits_.queued_bytes);
        clients_.push_back(std::move(client));
    }
    inbox_.clear();
    epochs_ = inbox_epochs_;
    for (const std::string& id : std::exchange(dropped_, {})) {
        for (Client& client : clients_) {  // the data thread removes them
            if (client.link == nullptr || client.id != id) { continue; }
            log_info("data link: {}: it was revoked", client.link->name());
            client.link.reset();
            client.alive->store(false, std::memory_order_release);
        }
    }
}

void Server::run(const std::stop_token& stop) {
    std::vector<pollfd> entries;
    Lock lock(links_mutex_);
    while (!stop.stop_requested()) {
        entries.assign(1, {wake_.fd(), POLLIN, 0});
        for (const Client& client : clients_) { entries.push_back({client.link->fd(), client.link->events(), 0}); }
        lock.unlock();
        const int n_ready = ::poll(entries.data(), entries.size(), -1);
        lock.lock();
        if (n_ready <= 0) { continue; }
        const std::size_t n_known = clients_.size();
        if (entries[0].revents != 0) {
            wake_.clear();
            adopt();
        }
        for (std::size_t i = 0; i < clients_.size(); ++i) {
            // A new link may have its first request in its own buffer already, where poll() does not see it.
            if (i < n_known && entries[i + 1].revents == 0) { continue; }
            Client& client = clients_[i];
            if (client.link == nullptr) { continue; }
            if (serve(*client.link, lock)) { continue; }
            client.link.reset();
            client.alive->store(false, std::memory_order_release);
            closed_.signal();
        }
        std::erase_if(clients_, [](const Client& client) { return client.link == nullptr; });
        if (entries[0].revents != 0) { work_one(lock); }
    }
}

bool Server::serve(net::Link& link, Lock& lock) {
    Status status = link.flush();
    while (status) {
        const net::LinkCounters before = link.counters();
        auto frame = link.receive();
        if (!frame) {
            status = std::unexpected(frame.error());
            break;
        }
        if (!*frame) {
            if (link.in_frame() && pulse_sleeps_) { pulse_wanted_.notify_one(); }
            return true;
        }
        if ((*frame)->type == wire::FrameType::compute_request) {
            status = answer(link, (*frame)->payload, lock);
        } else if ((*frame)->type != wire::FrameType::control) {
            status = fail(ErrorKind::corrupt, "{}: sent an answer where requests are expected", link.name());
        }
        stats_.bytes_in += link.counters().bytes_in - before.bytes_in;
        stats_.bytes_out += link.counters().bytes_out - before.bytes_out;
    }
    if (status.error().kind == ErrorKind::disconnected) {
        log_info("data link: {}", status.error().message);
    } else {
        log_warn("data link: {}", status.error().message);
    }
    return false;
}

bool Server::knows(std::uint32_t epoch) {
    if (std::ranges::find(epochs_, epoch) != epochs_.end()) { return true; }
    // Perhaps it was set a moment ago.
    const std::lock_guard inbox(inbox_mutex_);
    epochs_ = inbox_epochs_;
    return std::ranges::find(epochs_, epoch) != epochs_.end();
}

Status Server::answer(net::Link& link, ByteView payload, Lock& lock) {
    auto request = wire::decode_compute_request(payload);
    // What cannot be decoded has no id to answer to: the link is closed.
    if (!request) { return fail_with(link.name(), request.error()); }
    const wire::ComputeRequest& header = request->header;
    if (!knows(header.epoch)) {
        ++stats_.stale;
        return refuse(link, header, wire::Outcome::stale_epoch, 0);
    }
    const auto is_expired = [&] { return header.deadline_us != 0 && clock_us() > header.deadline_us; };
    if (is_expired()) {
        ++stats_.expired;
        return refuse(link, header, wire::Outcome::expired, 0);
    }
    Status sent;
    TimePoint since = steady_now();
    const auto lap_us = [&] {
        const auto elapsed = std::chrono::duration_cast<std::chrono::microseconds>(steady_now() - since).count();
        stats_.busy_us += static_cast<std::uint64_t>(elapsed);
        return static_cast<std::uint32_t>(elapsed);
    };
    Status computed;
    {
        const AtWork at_work(*this, lock, &link);
        computed = compute(*request, [&](const expert::RowPart& part) -> Status {
            const std::uint32_t us = lap_us();
            if (is_expired()) { return fail(ErrorKind::timeout, "nobody wants this any more"); }
            const std::lock_guard links(links_mutex_);
            sent = send_rows(link, header, part, us);
            since = steady_now();
            return sent;
        });
    }
    if (!sent) { return sent; }
    if (computed) {
        ++stats_.requests;
        stats_.pairs += header.n_pairs;
        stats_.rows += header.n_rows;
        return {};
    }
    log_debug("{}: request refused: {}", link.name(), computed.error().message);
    stats_.expired += computed.error().kind == ErrorKind::timeout ? 1 : 0;
    return refuse(link, header, outcome_of(computed.error()), lap_us());
}

Status Server::refuse(net::Link& link, const wire::ComputeRequest& request, wire::Outcome outcome,
                      std::uint32_t compute_us) {
    ++stats_.refused;
    const wire::ComputeAnswer refusal{.id = request.id,
                                      .outcome = outcome,
                                      .row_type = request.row_type,
                                      .n_rows = 0,
                                      .n_out = request.n_in,
                                      .compute_us = compute_us,
                                      .clock_us = clock_us()};
    std::array<std::byte, wire::ComputeAnswer::kHeaderBytes> head{};
    wire::encode(refusal, head);
    return link.send(wire::FrameType::compute_answer, {head});
}

bool Server::is_awaited() const {
    return at_work_ || std::ranges::any_of(clients_, [](const Client& client) {
               return client.link != nullptr && client.link->in_frame();
           });
}

void Server::pulse(const std::stop_token& stop) {
    Lock lock(links_mutex_);
    while (!stop.stop_requested()) {
        if (!is_awaited() && steady_now() - worked_at_ > kPulseIdle) {
            pulse_sleeps_ = true;
            pulse_wanted_.wait(lock, stop, [this] { return is_awaited(); });
            pulse_sleeps_ = false;
        }
        pulse_wanted_.wait_for(lock, stop, wire::kPulseEvery, [] { return false; });
        send_pulses();
    }
}

void Server::send_pulses() {
    for (const Client& client : clients_) {
        if (client.link == nullptr) { continue; }
        net::Link& link = *client.link;
        // Nobody waits; or what is still to be written says more.
        const bool is_owed = &link == asking_ || link.in_frame() || has_unread(link);
        if (!is_owed || !link.established() || !link.idle()) { continue; }
        // If it cannot be sent the data thread will find out why.
        (void)link.send(wire::FrameType::control, {wire::encode_control(wire::fb::PulseT{})});
    }
}

Status Server::send_rows(net::Link& link, const wire::ComputeRequest& request, const expert::RowPart& part,
                         std::uint32_t compute_us) {
    wire::ComputeAnswer header{.id = request.id,
                               .outcome = wire::Outcome::done,
                               .row_type = request.row_type,
                               .n_out = static_cast<std::uint32_t>(part.n_out),
                               .compute_us = compute_us,
                               .first = static_cast<std::uint32_t>(part.first),
                               .clock_us = clock_us()};
    const std::size_t row_bytes = part.n_out * wire::bytes_per_value(request.row_type);
    const std::size_t most = std::max<std::size_t>(1, kPartBytes / row_bytes) * part.n_out;
    for (std::span<const float> left = part.rows; !left.empty();) {
        const std::span<const float> rows = left.first(std::min(most, left.size()));
        header.n_rows = static_cast<std::uint32_t>(rows.size() / part.n_out);
        if (request.row_type == wire::RowType::f32) {
            std::array<std::byte, wire::ComputeAnswer::kHeaderBytes> head{};
            wire::encode(header, head);
            LINKCPP_CHECK(link.send(wire::FrameType::compute_answer, {head, std::as_bytes(rows)}));
        } else {
            LINKCPP_TRY(const std::span<std::byte> place,
                        link.append(wire::FrameType::compute_answer, header.payload_bytes()));
            expert::floats_to_halves(rows, wire::encode(header, place));
            LINKCPP_CHECK(link.flush());
        }
        header.compute_us = 0;
        header.first += header.n_rows;
        left = left.subspan(rows.size());
    }
    return {};
}

Status Server::compute(const wire::DecodedRequest& request, const expert::RowSink& sink) {
    const wire::ComputeRequest& header = request.header;
    const std::span<const float> rows = as_floats(request, rows_);
    pairs_.resize(header.n_pairs);
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
        const wire::Pair pair = request.pair(i);
        pairs_[i] = {pair.row, pair.expert, pair.weight};
    }
    expert::Batch batch{header.model, header.layer, header.n_in, rows, pairs_, {}};
    if (header.product != 0) { batch.product = static_cast<model::Role>(header.product); }
    if (header.mode == wire::Mode::exact) { return engine_.compute(batch, sink); }
    sums_.resize(rows.size());
    LINKCPP_CHECK(engine_.compute_sums(batch, sums_));
    return sink({0, header.n_in, sums_});
}

}  // namespace linkcpp::worker
