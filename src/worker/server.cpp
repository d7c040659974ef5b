#include "worker/server.h"

#include <algorithm>
#include <cstring>

#include <poll.h>

#include "base/clock.h"
#include "base/log.h"
#include "expert/half.h"
#include "wire/frame.h"

namespace linkcpp::worker {
namespace {

TimePoint now() {
    return std::chrono::steady_clock::now();
}

wire::Outcome outcome_of(const Error& error) {
    switch (error.kind) {
        case ErrorKind::not_found: return wire::Outcome::not_held;
        case ErrorKind::invalid:
        case ErrorKind::corrupt: return wire::Outcome::malformed;
        case ErrorKind::overloaded: return wire::Outcome::overloaded;
        default: return wire::Outcome::failed;
    }
}

void to_f32(ByteView from, wire::RowType type, std::span<float> to) {
    if (type == wire::RowType::f32) {
        std::memcpy(to.data(), from.data(), to.size_bytes());
        return;
    }
    expert::halves_to_floats(from, to);
}

void from_f32(std::span<const float> from, wire::RowType type, std::span<std::byte> to) {
    if (type == wire::RowType::f32) {
        std::memcpy(to.data(), from.data(), from.size_bytes());
        return;
    }
    expert::floats_to_halves(from, to);
}

}  // namespace

Server::Server(expert::Engine& engine) : engine_(engine), thread_([this](const std::stop_token& stop) { run(stop); }) {}

Server::~Server() {
    thread_.request_stop();
    wake_.signal();
}

void Server::add(std::unique_ptr<net::Link> link, std::shared_ptr<std::atomic<bool>> alive) {
    {
        const std::lock_guard lock(inbox_mutex_);
        inbox_.push_back({std::move(link), std::move(alive)});
    }
    wake_.signal();
}

void Server::adopt() {
    const std::lock_guard lock(inbox_mutex_);
    for (Client& client : inbox_) {
        client.link->set_limit(wire::kMaxComputeBytes);
        clients_.push_back(std::move(client));
    }
    inbox_.clear();
}

void Server::run(const std::stop_token& stop) {
    std::vector<pollfd> entries;
    while (!stop.stop_requested()) {
        entries.assign(1, {wake_.fd(), POLLIN, 0});
        for (const Client& client : clients_) { entries.push_back({client.link->fd(), client.link->events(), 0}); }
        if (::poll(entries.data(), entries.size(), -1) <= 0) { continue; }
        const std::size_t n_known = clients_.size();
        if (entries[0].revents != 0) {
            wake_.clear();
            adopt();
        }
        for (std::size_t i = 0; i < clients_.size(); ++i) {
            // A new link may have its first request in its own buffer already, where poll() does not see it.
            if (i < n_known && entries[i + 1].revents == 0) { continue; }
            Client& client = clients_[i];
            if (serve(*client.link)) { continue; }
            client.link.reset();
            client.alive->store(false, std::memory_order_release);
            closed_.signal();
        }
        std::erase_if(clients_, [](const Client& client) { return client.link == nullptr; });
    }
}

bool Server::serve(net::Link& link) {
    Status status = link.flush();
    while (status) {
        const net::LinkCounters before = link.counters();
        auto frame = link.receive();
        if (!frame) {
            status = std::unexpected(frame.error());
            break;
        }
        if (!*frame) { return true; }
        if ((*frame)->type == wire::FrameType::compute_request) {
            status = answer(link, (*frame)->payload);
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

Status Server::answer(net::Link& link, ByteView payload) {
    auto request = wire::decode_compute_request(payload);
    // What cannot be decoded has no id to answer to: the link is closed.
    if (!request) { return fail_with(link.name(), request.error()); }
    const TimePoint start = now();
    wire::ComputeAnswer header;
    if (auto computed = compute(*request)) {
        header = *computed;
    } else {
        header = {.id = request->header.id,
                  .outcome = outcome_of(computed.error()),
                  .row_type = request->header.row_type,
                  .n_rows = 0,
                  .n_embd = request->header.n_embd};
        if (computed.error().kind == ErrorKind::unsupported) { header.outcome = wire::Outcome::unknown_model; }
        ++stats_.refused;
        log_debug("{}: request refused: {}", link.name(), computed.error().message);
    }
    const auto elapsed = std::chrono::duration_cast<std::chrono::microseconds>(now() - start).count();
    header.compute_us = static_cast<std::uint32_t>(elapsed);
    stats_.busy_us += static_cast<std::uint64_t>(elapsed);
    payload_.resize(header.payload_bytes());
    const std::span<std::byte> place = wire::encode(header, payload_);
    if (header.n_rows > 0) { from_f32(results_, header.row_type, place); }
    return link.send(wire::FrameType::compute_answer, {payload_});
}

Result<wire::ComputeAnswer> Server::compute(const wire::DecodedRequest& request) {
    const wire::ComputeRequest& header = request.header;
    if (header.model != model_.load(std::memory_order_acquire)) {
        return fail(ErrorKind::unsupported, "model {:016x} is not served here", header.model);
    }
    rows_.resize(std::size_t{header.n_rows} * header.n_embd);
    to_f32(request.rows, header.row_type, rows_);
    pairs_.resize(header.n_pairs);
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
        const wire::Pair pair = request.pair(i);
        pairs_[i] = {pair.row, pair.expert, pair.weight};
    }
    const bool exact = header.mode == wire::Mode::exact;
    const std::uint32_t n_rows = exact ? header.n_pairs : header.n_rows;
    const wire::ComputeAnswer answer{.id = header.id,
                                     .outcome = wire::Outcome::done,
                                     .row_type = header.row_type,
                                     .n_rows = n_rows,
                                     .n_embd = header.n_embd};
    if (answer.payload_bytes() > wire::kMaxComputeBytes) {
        return fail(ErrorKind::invalid, "an answer of {} rows would be too large", n_rows);
    }
    results_.resize(std::size_t{n_rows} * header.n_embd);
    LINKCPP_CHECK(exact ? engine_.compute_rows(header.layer, rows_, pairs_, results_)
                        : engine_.compute_sums(header.layer, rows_, pairs_, results_));
    ++stats_.requests;
    stats_.pairs += header.n_pairs;
    stats_.rows += header.n_rows;
    return answer;
}

}  // namespace linkcpp::worker
