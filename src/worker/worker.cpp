#include "worker/worker.h"

#include <algorithm>
#include <array>

#include <poll.h>

#include "base/log.h"
#include "base/platform.h"
#include "base/text.h"
#include "base/units.h"
#include "net/socket.h"

namespace linkcpp::worker {
namespace {

using namespace std::chrono_literals;
namespace fb = wire::fb;

// Dialling a coordinator keeps the control thread; the hub must not miss its heartbeats meanwhile.
constexpr Duration kDialTimeout = 1500ms;
constexpr Duration kFirstDelay = 200ms;
constexpr Duration kMaxDelay = 10s;
constexpr Duration kProgressEvery = 500ms;
// A hub that has said nothing for this many heartbeats is gone, even if its socket is not.
constexpr int kMissedHeartbeats = 10;
constexpr std::size_t kMaxNotice = 1000;
// Assignments that coordinators may still go by.
constexpr std::size_t kMaxEpochs = 16;
// Of the memory that is free, what is left for activations and for everybody else.
constexpr double kMemoryShare = 0.8;

// Errors that trying again does not cure.
bool is_final(const Error& error) {
    return error.kind == ErrorKind::invalid || error.kind == ErrorKind::unsupported;
}

bool sleep_until(const net::Wakeup& stop_wakeup, const std::stop_token& stop, Duration time) {
    pollfd entry{stop_wakeup.fd(), POLLIN, 0};
    ::poll(&entry, 1, to_poll_ms(time));
    return !stop.stop_requested();
}

Result<expert::Device> find_device(const WorkerOptions& options) {
    if (!options.backend.empty()) { return expert::load_device(options.backend); }
    expert::load_backends();
    return expert::choose_device(expert::devices(), options.device);
}

}  // namespace

Worker::Worker(WorkerOptions options, net::Identity identity, net::TlsContext tls, store::SliceStore store,
               std::unique_ptr<expert::Engine> engine)
    : options_(std::move(options)),
      identity_(std::move(identity)),
      tls_(std::move(tls)),
      store_(std::move(store)),
      neighbourhood_(tls_),
      engine_(std::move(engine)),
      loader_(*engine_, store_, neighbourhood_, options_.mmap),
      prober_(*engine_, server_),
      server_(*engine_, options_.limits) {}

Result<std::unique_ptr<Worker>> Worker::make(WorkerOptions options, net::Identity identity) {
    LINKCPP_TRY(const expert::Device device, find_device(options));
    if (options.memory_bytes == 0) {
        options.memory_bytes = static_cast<std::uint64_t>(static_cast<double>(device.free_bytes) * kMemoryShare);
    }
    LINKCPP_TRY(auto engine, expert::Engine::open(device, options.n_threads));
    LINKCPP_TRY(net::TlsContext tls, net::TlsContext::make(identity));
    LINKCPP_TRY(store::SliceStore store, store::SliceStore::open(options.store_dir, options.store_limit));
    log_info("computing on {} ({}), {} for slices", device.name, device.description,
             format_bytes(options.memory_bytes));
    std::unique_ptr<Worker> worker(
        new Worker(std::move(options), std::move(identity), std::move(tls), std::move(store), std::move(engine)));
    if (const auto& address = worker->options_.offer_slices_at) {
        LINKCPP_TRY(worker->neighbour_server_,
                    store::NeighbourServer::start(
                        *address, worker->tls_, worker->store_, worker->options_.neighbours, worker->refusals_,
                        [raw = worker.get()](const Digest& model_id) { return raw->loader_.inventory(model_id); }));
        log_info("offering slices to other workers at {}", worker->neighbour_server_->address().text());
    }
    return worker;
}

Status Worker::run(const std::stop_token& stop) {
    const std::stop_callback wake(stop, [this] { stop_wakeup_.signal(); });
    Backoff backoff(kFirstDelay, kMaxDelay);
    while (!stop.stop_requested()) {
        Status status;
        if (auto hub = join()) {
            log_info("joined {} as {}", (*hub)->name(), options_.name);
            backoff.reset();
            status = session(**hub, stop);
            if (stop.stop_requested()) {
                (void)net::send_message(**hub, fb::GoodbyeT{});
                (void)net::flush_blocking(**hub, 1s);
                return {};
            }
        } else {
            status = std::unexpected(hub.error());
        }
        if (is_final(status.error())) { return status; }
        const Duration pause = backoff.next();
        log_warn("{}; trying again in {:.1f} s", status.error().message, to_seconds(pause));
        if (!sleep_until(stop_wakeup_, stop, pause)) { break; }
    }
    return {};
}

Result<std::unique_ptr<net::Link>> Worker::join() {
    fb::HelloT hello;
    hello.role = fb::Role::worker;
    hello.name = options_.name;
    hello.device = fmt::format("{} ({})", engine_->device().name, engine_->device().description);
    hello.backend = engine_->device().backend;
    hello.memory_bytes = options_.memory_bytes;
    hello.n_threads = engine_->n_threads();
    if (neighbour_server_) { hello.slices_address = neighbour_server_->address().text(); }
    LINKCPP_TRY(net::Joined joined, net::join_hub(options_.hub, tls_, std::move(hello)));
    welcome_ = std::move(joined.welcome);
    return std::move(joined.link);
}

Status Worker::session(net::Link& hub, const std::stop_token& stop) {
    const Duration heartbeat = std::chrono::milliseconds(std::clamp(welcome_.heartbeat_ms, 50u, 60'000u));
    TimePoint next_report{};
    TimePoint last_heard = steady_now();
    bool loading = false;
    bool first = true;
    while (!stop.stop_requested()) {
        LINKCPP_CHECK(hub.flush());
        while (true) {
            LINKCPP_TRY(const auto message, net::receive_message(hub));
            if (!message) { break; }
            last_heard = steady_now();
            LINKCPP_CHECK(handle(*message));
        }
        if (steady_now() - last_heard > heartbeat * kMissedHeartbeats) {
            return fail(ErrorKind::timeout, "{}: silent for {:.0f} s", hub.name(),
                        to_seconds(steady_now() - last_heard));
        }
        const bool was_loading = std::exchange(loading, loader_.state().state == fb::ShardState::loading);
        if (steady_now() >= next_report || asked_ != 0 || was_loading != loading) {
            LINKCPP_CHECK(report(hub, std::exchange(asked_, 0), std::exchange(first, false)));
            next_report = steady_now() + (loading ? std::min<Duration>(kProgressEvery, heartbeat) : heartbeat);
        }
        for (fb::ProbeRowsT& rows : prober_.take()) { LINKCPP_CHECK(net::send_message(hub, std::move(rows))); }
        dial();

        Duration timeout = next_report - steady_now();
        for (const auto& [id, peer] : peers_) {
            if (!peer.alive->load()) { timeout = std::min<Duration>(timeout, peer.next_try - steady_now()); }
        }
        std::array<pollfd, 5> entries{{{hub.fd(), hub.events(), 0},
                                       {stop_wakeup_.fd(), POLLIN, 0},
                                       {loader_.on_done().fd(), POLLIN, 0},
                                       {prober_.on_done().fd(), POLLIN, 0},
                                       {server_.on_closed().fd(), POLLIN, 0}}};
        ::poll(entries.data(), entries.size(), to_poll_ms(timeout));
        loader_.on_done().clear();
        server_.on_closed().clear();
    }
    return {};
}

Status Worker::handle(const wire::ControlT& message) {
    if (const auto* refused = message.body.AsRefused()) { return std::unexpected(net::to_error(*refused, "the hub")); }
    if (const auto* ask = message.body.AsAsk()) {
        asked_ = ask->sequence;
    } else if (const auto* manifest = message.body.AsManifest()) {
        LINKCPP_TRY(model::Manifest parsed, model::Manifest::from_json(manifest->json));
        const Digest id = sha256(as_bytes(manifest->json));
        if (id != model_id_) { epochs_.clear(); }
        model_id_ = id;
        manifest_ = std::make_shared<const model::Manifest>(std::move(parsed));
        const auto smallest = std::ranges::min_element(manifest_->model.layers, {}, &model::MoeLayer::slice_bytes);
        if (smallest != manifest_->model.layers.end() && options_.memory_bytes < smallest->slice_bytes()) {
            log_warn(
                "{} for slices, and the smallest of {} takes {}: this worker can hold none; give it more (--memory)",
                format_bytes(options_.memory_bytes), manifest_->model.name, format_bytes(smallest->slice_bytes()));
        }
    } else if (const auto* assignment = message.body.AsAssign()) {
        return assign(*assignment);
    } else if (const auto* probe = message.body.AsProbe()) {
        prober_.start(*probe, manifest_, model_id_);
    } else if (const auto* notice = message.body.AsNotice()) {
        log_warn("the hub says: {}", one_line(notice->text.substr(0, kMaxNotice)));
    } else if (const auto* coordinators = message.body.AsCoordinators()) {
        set_coordinators(*coordinators);
    } else if (const auto* neighbours = message.body.AsNeighbours()) {
        set_neighbours(*neighbours);
    }
    return {};
}

void Worker::set_neighbours(const fb::NeighboursT& neighbours) {
    std::vector<store::Neighbour> offering;
    std::set<Digest> keys;
    for (const auto& neighbour : neighbours.neighbours) {
        const auto key = Digest::from_hex(neighbour->id);
        if (!key || *key == identity_.fingerprint()) { continue; }
        keys.insert(*key);
        auto address = net::parse_address(neighbour->address);
        if (address && address->port != 0) {
            offering.push_back({*key, one_line(neighbour->name), *std::move(address)});
        }
    }
    neighbourhood_.set(std::move(offering));
    if (neighbour_server_) { neighbour_server_->admit(std::move(keys)); }
}

Status Worker::assign(const fb::AssignT& assign) {
    LINKCPP_TRY(const Digest model_id, wire::decode_digest(assign.model_id));
    if (!manifest_ || model_id != model_id_) {
        return fail(ErrorKind::corrupt, "hub: an assignment for a model whose manifest it has not sent");
    }
    LINKCPP_TRY(wire::SliceSet slices, wire::decode_slices(assign.slices));
    // A coordinator learns of this a moment sooner or later than this worker, or, while the hub is away, much later.
    epochs_.push_back(assign.epoch);
    if (epochs_.size() > kMaxEpochs) { epochs_.erase(epochs_.begin()); }
    server_.set_epochs(epochs_);
    log_info("assigned {} slices of {}", wire::n_slices(slices), manifest_->model.name);
    loader_.load(
        {.epoch = assign.epoch,
         .manifest = manifest_,
         .model_id = model_id,
         .slices = std::move(slices),
         .origin = {{options_.hub.hub.host, welcome_.https_port}, options_.hub.fingerprint, welcome_.https_token}});
    return {};
}

void Worker::set_coordinators(const fb::CoordinatorsT& coordinators) {
    std::map<std::string, Peer> peers;
    std::set<std::string> left_out;
    // Who is served already comes first.
    std::vector<const fb::CoordinatorT*> wanted;
    for (const auto& coordinator : coordinators.coordinators) { wanted.push_back(coordinator.get()); }
    std::ranges::stable_partition(wanted, [this](const auto* each) { return peers_.contains(each->id); });
    for (const fb::CoordinatorT* coordinator : wanted) {
        if (peers.size() >= options_.max_programs) {
            if (!left_out_.contains(coordinator->id)) {
                refusals_.note("too many programs",
                               fmt::format("coordinator {}: not served, {} are already (join --max-programs)",
                                           one_line(coordinator->id.substr(0, 12)), peers.size()));
            }
            left_out.insert(coordinator->id);
            continue;
        }
        const auto known = peers_.find(coordinator->id);
        const bool is_same = known != peers_.end() && known->second.coordinator == *coordinator;
        peers.insert_or_assign(coordinator->id, is_same ? known->second
                                                        : Peer{*coordinator, std::make_shared<std::atomic<bool>>(false),
                                                               steady_now(), Backoff(kFirstDelay, kMaxDelay)});
    }
    for (const std::string& id : coordinators.revoked) { server_.drop(id); }
    left_out_ = std::move(left_out);
    peers_ = std::move(peers);  // links to coordinators that are gone end by themselves
}

void Worker::dial() {
    for (auto& [id, peer] : peers_) {
        if (peer.alive->load() || steady_now() < peer.next_try) { continue; }
        const Status status = dial_one(peer.coordinator, peer.alive);
        const bool first = peer.backoff.n_failures() == 0;
        if (status) { peer.backoff.reset(); }
        peer.next_try = steady_now() + (status ? kFirstDelay : peer.backoff.next());
        // The first time it may only have ended, and the hub has not said so yet.
        if (!status) {
            log_line(first ? LogLevel::debug : LogLevel::warn,
                     fmt::format("coordinator {}: {}", id.substr(0, 12), status.error().message));
        }
        return;
    }
}

Result<std::unique_ptr<net::Link>> Worker::connect(const fb::CoordinatorT& coordinator) {
    const std::string name = fmt::format("coordinator {}", coordinator.id.substr(0, 12));
    if (!coordinator.unix_path.empty() && coordinator.boot_id == boot_id()) {
        // The same kernel, but perhaps another file system (a container): then TCP.
        if (auto fd = net::connect_unix(coordinator.unix_path)) { return net::Link::plain(*std::move(fd), name); }
    }
    const auto fingerprint = Digest::from_hex(coordinator.id);
    if (!fingerprint) { return fail(ErrorKind::corrupt, "{}: its id is not a fingerprint", name); }
    LINKCPP_TRY(net::Address address, net::parse_address(coordinator.address));
    LINKCPP_TRY(UniqueFd fd, net::connect_tcp(address, kDialTimeout));
    return net::Link::tls_client(std::move(fd), name, tls_, *fingerprint);
}

Status Worker::dial_one(const fb::CoordinatorT& coordinator, const std::shared_ptr<std::atomic<bool>>& alive) {
    LINKCPP_TRY(auto link, connect(coordinator));
    fb::DataHelloT hello;
    hello.worker = identity_.fingerprint().hex();
    hello.model_id = wire::encode_digest(model_id_);
    hello.epoch = loader_.state().epoch;
    hello.features = wire::features();
    hello.max_frame = options_.limits.frame_bytes;
    LINKCPP_CHECK(net::send_message(*link, std::move(hello)));
    LINKCPP_TRY(const auto answer, net::receive_message_blocking(*link, kDialTimeout));
    if (const auto* refused = answer->body.AsRefused()) {
        return std::unexpected(net::to_error(*refused, link->name()));
    }
    if (answer->body.AsDataWelcome() == nullptr) {
        return fail(ErrorKind::corrupt, "{}: expected a welcome", link->name());
    }
    alive->store(true);
    log_info("data link to {} over {}", link->name(), link->encrypted() ? "TCP with TLS" : "a Unix socket");
    server_.add(std::move(link), alive, coordinator.id);
    return {};
}

Status Worker::report(net::Link& hub, std::uint64_t sequence, bool first) {
    const LoadState state = loader_.state();
    fb::ShardT shard;
    shard.epoch = state.epoch;
    shard.model_id = wire::encode_digest(first ? state.model_id : model_id_);
    if (first) { shard.held = wire::encode_slices(state.held); }
    shard.state = state.state;
    shard.n_slices = static_cast<std::uint32_t>(state.n_slices);
    shard.bytes = state.bytes;
    shard.done_bytes = state.done_bytes;
    shard.total_bytes = state.total_bytes;
    shard.fetched_bytes = state.fetching.n_bytes;
    shard.fetch_bytes = state.fetching.total_bytes;
    shard.fetch_rate = state.fetching.bytes_per_second;
    shard.from_neighbours = state.fetching.from_neighbours;
    shard.error = state.error;
    LINKCPP_CHECK(net::send_message(hub, std::move(shard)));
    const ServerStats& s = server_.stats();
    fb::StatsT stats;
    stats.sequence = sequence;
    stats.requests = s.requests;
    stats.pairs = s.pairs;
    stats.rows = s.rows;
    stats.busy_us = s.busy_us;
    stats.bytes_in = s.bytes_in;
    stats.bytes_out = s.bytes_out;
    stats.refused = s.refused;
    stats.expired = s.expired;
    stats.stale = s.stale;
    stats.turned_away = net::turned_away(refusals_);
    stats.slices_out = neighbour_server_ ? neighbour_server_->bytes_sent() : 0;
    stats.resident_bytes = resident_bytes();
    return net::send_message(hub, stats);
}

}  // namespace linkcpp::worker
