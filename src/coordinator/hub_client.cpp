#include "coordinator/hub_client.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>

#include <poll.h>
#include <unistd.h>

#include "base/backoff.h"
#include "base/log.h"
#include "base/platform.h"

namespace linkcpp::coordinator {
namespace {

using namespace std::chrono_literals;
namespace fb = wire::fb;

constexpr Duration kFirstDelay = 200ms;
constexpr Duration kMaxDelay = 5s;
constexpr int kMissedHeartbeats = 10;
// A hub that was started again has so long to find its workers and to probe them.
constexpr Duration kHold = 30s;
// That wait while the hub is away.
constexpr Duration kAcceptPause = 1s;
constexpr std::size_t kMaxDisputes = 64;
// For experts that audits need.
constexpr std::uint64_t kCheckerBytes = 64u << 20;

// Sockets of programs that were ended before they could remove them.
void remove_stale_sockets(const std::filesystem::path& dir) {
    static constexpr std::string_view kStart = "coordinator-";
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
        const std::string name = entry.path().filename().string();
        if (!name.starts_with(kStart) || !name.ends_with(".sock")) { continue; }
        const long pid = std::strtol(name.c_str() + kStart.size(), nullptr, 10);
        if (pid > 0 && ::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) { ::unlink(entry.path().c_str()); }
    }
}

}  // namespace

HubClient::HubClient(HubClientOptions options, Dispatcher& dispatcher, net::Identity identity, net::TlsContext tls,
                     net::Listener tcp, net::Listener unix_listener, std::filesystem::path unix_path)
    : options_(std::move(options)),
      dispatcher_(dispatcher),
      identity_(std::move(identity)),
      tls_(std::move(tls)),
      tcp_(std::move(tcp)),
      unix_(std::move(unix_listener)),
      unix_path_(std::move(unix_path)) {}

Result<std::unique_ptr<HubClient>> HubClient::start(HubClientOptions options, Dispatcher& dispatcher) {
    LINKCPP_TRY(net::Identity identity, net::Identity::make());
    LINKCPP_TRY(net::TlsContext tls, net::TlsContext::make(identity));
    LINKCPP_TRY(net::Listener tcp, net::Listener::tcp(options.listen));
    LINKCPP_TRY(const std::filesystem::path dir, runtime_dir());
    remove_stale_sockets(dir);
    const std::filesystem::path path = dir / fmt::format("coordinator-{}-{}.sock", ::getpid(), random_hex(3));
    LINKCPP_TRY(net::Listener unix_listener, net::Listener::unix_socket(path));
    std::unique_ptr<HubClient> client(new HubClient(std::move(options), dispatcher, std::move(identity), std::move(tls),
                                                    std::move(tcp), std::move(unix_listener), path));
    dispatcher.set_ask_hub(
        [raw = client.get()](fb::DisputeT dispute, Duration wait) { return raw->ask(std::move(dispute), wait); });
    client->thread_ = std::jthread([raw = client.get()](const std::stop_token& stop) {
        // No exception may leave a thread of somebody else's process.
        try {
            raw->run(stop);
        } catch (const std::exception& error) { raw->fail_start({ErrorKind::failed, error.what()}); }
        raw->ended_ = true;
    });
    return client;
}

HubClient::~HubClient() {
    thread_.request_stop();
    stop_wakeup_.signal();
}

bool HubClient::stop(Duration timeout) {
    thread_.request_stop();
    stop_wakeup_.signal();
    const TimePoint deadline = steady_now() + timeout;
    while (!ended_ && steady_now() < deadline) { ::usleep(1000); }
    return ended_;
}

void HubClient::fail_start(const Error& error) {
    log_error("{}", error.message);
    const std::lock_guard lock(mutex_);
    last_error_ = error;
    hopeless_ = true;
    changed_.notify_all();
}

Result<std::shared_ptr<const model::Manifest>> HubClient::wait_for_model(Duration timeout) {
    const TimePoint start = steady_now();
    const TimePoint deadline = start + timeout;
    TimePoint next_line = start + 2s;
    std::unique_lock lock(mutex_);
    while (true) {
        if (manifest_ && have_routes_) { return manifest_; }
        if (hopeless_) { return std::unexpected(last_error_); }
        if (steady_now() >= deadline) {
            return fail(ErrorKind::timeout,
                        "hub at {}: no answer within {:.0f} s; start `linkcpp serve` there, or give another join line "
                        "(last: {})",
                        options_.hub.hub.text(), to_seconds(timeout),
                        last_error_.message.empty() ? "nothing was heard" : last_error_.message);
        }
        if (steady_now() >= next_line) {
            log_info("waiting for the hub at {}: {:.0f} s of {:.0f} s", options_.hub.hub.text(),
                     to_seconds(steady_now() - start), to_seconds(timeout));
            next_line = steady_now() + 2s;
        }
        changed_.wait_for(lock, std::min<Duration>(deadline - steady_now(), 500ms));
    }
}

void HubClient::run(const std::stop_token& stop) {
    Backoff backoff(kFirstDelay, kMaxDelay);
    while (!stop.stop_requested()) {
        Status status;
        if (auto hub = connect()) {
            log_info("registered with the hub at {}", options_.hub.hub.text());
            const auto before = routes_;
            status = session(**hub, stop);
            if (routes_ != before) { backoff.reset(); }  // a hub that serves another model is no good hub
        } else {
            status = std::unexpected(hub.error());
        }
        if (stop.stop_requested()) { return; }
        {
            const std::lock_guard lock(mutex_);
            last_error_ = status.error();
            hopeless_ = status.error().kind == ErrorKind::invalid;
            changed_.notify_all();
        }
        log_warn("{}", status.error().message);
        const TimePoint until = steady_now() + backoff.next();
        while (steady_now() < until && !stop.stop_requested()) { turn(nullptr, until - steady_now()); }
    }
}

Result<std::unique_ptr<net::Link>> HubClient::connect() {
    fb::HelloT hello;
    hello.role = fb::Role::coordinator;
    hello.listen_address = options_.advertise.empty() ? tcp_.address().text() : options_.advertise;
    if (options_.unix_socket) { hello.unix_path = unix_path_.string(); }
    hello.process = options_.process;
    LINKCPP_TRY(net::Joined joined, net::join_hub(options_.hub, tls_, std::move(hello)));
    welcome_ = std::move(joined.welcome);
    return std::move(joined.link);
}

Status HubClient::session(net::Link& hub, const std::stop_token& stop) {
    const Duration heartbeat = std::chrono::milliseconds(std::clamp(welcome_.heartbeat_ms, 50u, 60'000u));
    TimePoint next_report{};
    TimePoint last_heard = steady_now();
    if (used_) { hold_until_ = steady_now() + kHold; }
    while (!stop.stop_requested()) {
        LINKCPP_CHECK(hub.flush());
        while (true) {
            LINKCPP_TRY(const auto message, net::receive_message(hub));
            if (!message) { break; }
            last_heard = steady_now();
            LINKCPP_CHECK(handle(hub, *message));
        }
        if (steady_now() - last_heard > heartbeat * kMissedHeartbeats) {
            return fail(ErrorKind::timeout, "{}: silent for {:.0f} s", hub.name(),
                        to_seconds(steady_now() - last_heard));
        }
        if (hold_until_ != TimePoint{} && steady_now() >= hold_until_) { choose_routes(); }
        LINKCPP_CHECK(send_disputes(hub));
        LINKCPP_CHECK(send_notices(hub));
        if (steady_now() >= next_report) {
            LINKCPP_CHECK(report(hub, 0));
            next_report = steady_now() + heartbeat;
        }
        turn(&hub, next_report - steady_now());
    }
    return report(hub, 0);  // the last figures
}

Status HubClient::handle(net::Link& hub, const wire::ControlT& message) {
    if (const auto* refused = message.body.AsRefused()) { return std::unexpected(net::to_error(*refused, "the hub")); }
    if (const auto* manifest = message.body.AsManifest()) { return take_manifest(*manifest); }
    if (const auto* routes = message.body.AsRoutes()) { return take_routes(*routes); }
    if (const auto* verdict = message.body.AsVerdict()) { take_verdict(*verdict); }
    if (const auto* ask = message.body.AsAsk(); ask != nullptr && ask->sequence != 0) {
        return report(hub, ask->sequence);
    }
    return {};
}

Status HubClient::take_manifest(const fb::ManifestT& message) {
    const Digest id = sha256(as_bytes(message.json));
    {
        const std::lock_guard lock(mutex_);
        if (manifest_ && model_id_ == id) { return {}; }
        if (manifest_) {
            return fail(ErrorKind::invalid, "the hub serves another model now ({}); restart this program",
                        id.hex().substr(0, 12));
        }
    }
    LINKCPP_TRY(model::Manifest parsed, model::Manifest::from_json(message.json));
    auto manifest = std::make_shared<const model::Manifest>(std::move(parsed));
    dispatcher_.set_manifest(manifest, id);
    {
        const std::lock_guard lock(mutex_);
        manifest_ = manifest;
        model_id_ = id;
    }
    open_local_experts();
    return {};
}

void HubClient::open_local_experts() {
    if (!options_.local_experts) { return; }
    const std::filesystem::path path =
        options_.model.empty() ? std::filesystem::path(welcome_.model_path) : options_.model;
    if (path.empty()) {
        log_info("the model file is not on this machine: experts that no worker holds cannot be computed here");
        return;
    }
    const std::uint64_t memory = options_.local_bytes != 0 ? options_.local_bytes : available_memory_bytes() / 2;
    auto local = LocalExperts::open(path, *manifest_, {.n_threads = options_.n_threads, .memory_bytes = memory});
    // One thread: the workers have the others, where they are on this machine.
    auto checker = LocalExperts::open(
        path, *manifest_, {.n_threads = 1, .memory_bytes = std::min(memory, kCheckerBytes), .only_compares = true});
    if (local && checker) {
        dispatcher_.set_local(*std::move(local), *std::move(checker));
    } else {
        log_warn("experts that no worker holds cannot be computed here: {}", (local ? checker : local).error().message);
    }
}

Status HubClient::take_routes(const fb::RoutesT& message) {
    std::shared_ptr<const model::Manifest> manifest;
    Digest id;
    {
        const std::lock_guard lock(mutex_);
        manifest = manifest_;
        id = model_id_;
    }
    LINKCPP_TRY(const Digest routed, wire::decode_digest(message.model_id));
    if (!manifest || routed != id) {
        return fail(ErrorKind::corrupt, "hub: routes for a model whose manifest it has not sent");
    }
    LINKCPP_TRY(Routes routes, make_routes(message, manifest->model));
    routes_ = std::make_shared<const Routes>(std::move(routes));
    choose_routes();
    const std::lock_guard lock(mutex_);
    have_routes_ = true;
    changed_.notify_all();
    return {};
}

void HubClient::choose_routes() {
    if (steady_now() < hold_until_ && used_->n_covered() > routes_->n_covered()) {
        used_ = std::make_shared<const Routes>(without_quarantined(*used_, *routes_));
    } else {
        hold_until_ = {};
        used_ = routes_;
    }
    dispatcher_.set_routes(used_);
}

Status HubClient::send_notices(net::Link& hub) {
    for (Notice& notice : dispatcher_.take_notices()) {
        fb::NoticeT message;
        message.worker = std::move(notice.worker);
        message.text = std::move(notice.text);
        LINKCPP_CHECK(net::send_message(hub, std::move(message)));
    }
    return {};
}

Status HubClient::report(net::Link& hub, std::uint64_t sequence) {
    const DispatchStats& s = dispatcher_.stats();
    fb::StatsT stats;
    stats.sequence = sequence;
    stats.requests = s.requests;
    stats.pairs = s.pairs;
    stats.rows = s.rows;
    stats.bytes_in = s.bytes_in;
    stats.bytes_out = s.bytes_out;
    stats.resident_bytes = resident_bytes();
    stats.layers = s.layers;
    stats.local_pairs = s.local_pairs;
    stats.retries = s.retries;
    stats.failures = s.failures;
    stats.products = s.products;
    stats.unchecked = s.unchecked;
    stats.late = s.late;
    stats.twice = s.twice;
    stats.twice_first = s.twice_first;
    stats.turned_away = net::turned_away(refusals_);
    const Patience& patience = dispatcher_.options().patience;
    stats.patience = std::make_unique<fb::PatienceT>();
    stats.patience->hang_ms = static_cast<std::uint32_t>(patience.hang / 1ms);
    stats.patience->stuck_ms = static_cast<std::uint32_t>(patience.stuck / 1ms);
    stats.patience->late_ms = static_cast<std::uint32_t>(patience.late / 1ms);
    stats.patience->twice = static_cast<float>(patience.twice);
    for (const auto& [worker, report] : dispatcher_.links()) {
        auto link = std::make_unique<fb::LinkStateT>();
        const auto count = [&](Fault fault) {
            return static_cast<std::uint32_t>(report.faults.at(static_cast<std::size_t>(fault)));
        };
        link->worker = worker;
        link->condition = report.condition;
        link->wait_us = static_cast<std::uint32_t>(report.wait_us);
        link->dead = count(Fault::dead);
        link->hung = count(Fault::hung);
        link->stuck = count(Fault::stuck);
        link->corrupt = count(Fault::corrupt);
        link->refused = count(Fault::refused);
        link->moved = count(Fault::moved);
        stats.links.push_back(std::move(link));
    }
    for (const auto& [worker, count] : dispatcher_.audits()) {
        auto audits = std::make_unique<fb::AuditsT>();
        audits->worker = worker;
        audits->pairs = count.pairs;
        audits->wrong = count.wrong;
        stats.audits.push_back(std::move(audits));
    }
    for (auto& [layer, nodes] : dispatcher_.unknown()) {
        auto unknown = std::make_unique<fb::UnknownLayerT>();
        unknown->layer = layer;
        unknown->nodes = nodes;
        stats.unknown.push_back(std::move(unknown));
    }
    return net::send_message(hub, stats);
}

Result<fb::VerdictT> HubClient::ask(fb::DisputeT dispute, Duration wait) {
    std::unique_lock lock(disputes_mutex_);
    if (disputes_.size() >= kMaxDisputes) { return fail(ErrorKind::disconnected, "the hub is away"); }
    dispute.sequence = wait > 0ns ? next_dispute_++ : 0;
    const std::uint64_t sequence = dispute.sequence;
    disputes_.push_back(std::move(dispute));
    dispute_wakeup_.signal();
    if (sequence == 0) { return fb::VerdictT{}; }
    std::optional<fb::VerdictT>& verdict = awaited_[sequence];
    const bool came = verdict_.wait_for(lock, wait, [&] { return verdict.has_value(); });
    Result<fb::VerdictT> result =
        came ? Result<fb::VerdictT>(*std::move(verdict))
             : fail(ErrorKind::timeout, "the hub has not ruled within {:.0f} s", to_seconds(wait));
    awaited_.erase(sequence);
    return result;
}

Status HubClient::send_disputes(net::Link& hub) {
    dispute_wakeup_.clear();
    while (true) {
        fb::DisputeT dispute;
        {
            const std::lock_guard lock(disputes_mutex_);
            if (disputes_.empty()) { return {}; }
            dispute = std::move(disputes_.front());
            disputes_.pop_front();
        }
        LINKCPP_CHECK(net::send_message(hub, std::move(dispute)));
    }
}

void HubClient::take_verdict(const fb::VerdictT& verdict) {
    const std::lock_guard lock(disputes_mutex_);
    const auto found = awaited_.find(verdict.sequence);
    if (found == awaited_.end()) { return; }
    found->second = verdict;
    verdict_.notify_all();
}

void HubClient::turn(net::Link* hub, Duration timeout) {
    std::vector<pollfd> entries{{stop_wakeup_.fd(), POLLIN, 0},
                                {tcp_.fd(), POLLIN, 0},
                                {unix_.fd(), POLLIN, 0},
                                {hub != nullptr ? dispute_wakeup_.fd() : -1, POLLIN, 0}};
    if (hub != nullptr) { entries.push_back({hub->fd(), hub->events(), 0}); }
    const std::size_t first = entries.size();
    for (const Caller& caller : callers_) {
        entries.push_back({caller.link->fd(), caller.link->events(), 0});
        timeout = std::min<Duration>(timeout, caller.since + options_.hello_time - steady_now());
    }
    ::poll(entries.data(), entries.size(), to_poll_ms(timeout));
    for (std::size_t i = first; i < entries.size(); ++i) {
        Caller& caller = callers_[i - first];
        if (entries[i].revents != 0) { greet(caller); }
        if (caller.done || steady_now() - caller.since <= options_.hello_time) { continue; }
        caller.done = true;
        refusals_.note("no hello in time",
                       fmt::format("data link: {}: has not said in time who it is", caller.link->name()));
    }
    std::erase_if(callers_, [](const Caller& caller) { return caller.done; });
    if (steady_now() < accept_again_) { return; }
    if (entries[1].revents != 0) { accept(tcp_, true); }
    if (entries[2].revents != 0) { accept(unix_, false); }
}

void HubClient::accept(net::Listener& listener, bool encrypted) {
    while (true) {
        auto accepted = listener.accept();
        if (!accepted) {
            // Out of descriptors, say: whoever knocks goes on knocking, so look away for a moment.
            refusals_.say("accept", fmt::format("data links: {}", accepted.error().message));
            accept_again_ = steady_now() + kAcceptPause;
            return;
        }
        if (!*accepted) { return; }
        // Who means it says hello at once: a crowd that does not keeps nobody out.
        if (callers_.size() >= options_.max_callers) {
            refusals_.note("too many strangers", fmt::format("data link: {}: gave way to others (LINKCPP_MAX_CALLERS)",
                                                             callers_.front().link->name()));
            callers_.erase(callers_.begin());
        }
        Caller caller{.uid = (*accepted)->uid, .since = steady_now()};
        if (encrypted) {
            auto link = net::Link::tls_server(std::move((*accepted)->fd), (*accepted)->from, tls_);
            if (!link) { continue; }
            caller.link = *std::move(link);
        } else {
            // The socket file lets nobody else in; root may always.
            if (caller.uid != ::getuid() && caller.uid != 0u) {
                refusals_.note("another user", fmt::format("data link: {}: refused", (*accepted)->from));
                continue;
            }
            caller.link = net::Link::plain(std::move((*accepted)->fd), (*accepted)->from);
        }
        callers_.push_back(std::move(caller));
    }
}

void HubClient::greet(Caller& caller) {
    const auto message = net::receive_message(*caller.link);
    if (!message) {
        refusals_.note(message.error().kind == ErrorKind::corrupt ? "broken message" : "left without a hello",
                       fmt::format("data link: {}", message.error().message));
        caller.done = true;
        return;
    }
    if (*message == nullptr) { return; }
    caller.done = true;
    const auto* hello = (*message)->body.AsDataHello();
    const std::string from = caller.link->name();
    if (hello == nullptr || (caller.link->encrypted() && caller.link->peer()->hex() != hello->worker)) {
        net::refuse(*caller.link, ErrorKind::invalid, "the worker's id is not its key's");
        refusals_.note("not its own id", fmt::format("data link: {} refused, its id is not its key's", from));
        return;
    }
    const Routes::Worker* worker = routes_ ? routes_->find(hello->worker) : nullptr;
    if (worker == nullptr) {
        net::refuse(*caller.link, ErrorKind::overloaded, "the hub has not named this worker yet");
        refusals_.note("not named by the hub",
                       fmt::format("data link: {} refused for now, the hub has not named this worker", from));
        return;
    }
    caller.link->rename(worker->name);
    fb::DataWelcomeT welcome;
    welcome.features = wire::features();
    if (const Status status = net::send_message(*caller.link, std::move(welcome)); !status) { return; }
    log_info("data link from worker {} ({})", worker->name, from);
    if (hello->max_frame != 0) { caller.link->set_peer_limit(hello->max_frame); }
    dispatcher_.add_link(hello->worker, std::move(caller.link));
}

}  // namespace linkcpp::coordinator
