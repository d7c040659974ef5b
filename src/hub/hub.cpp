#include "hub/hub.h"

#include <algorithm>
#include <ctime>
#include <fstream>

#include <poll.h>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/log.h"
#include "base/platform.h"
#include "base/text.h"
#include "base/units.h"

namespace linkcpp::hub {
namespace {

using namespace std::chrono_literals;
namespace fb = wire::fb;
using nlohmann::json;

constexpr std::size_t kTokenBytes = 16;
constexpr std::size_t kMaxPeers = 1024;
constexpr Duration kHelloTimeout = 5s;
constexpr Duration kStatusWait = 300ms;
constexpr Duration kAcceptPause = 1s;

TimePoint now() {
    return std::chrono::steady_clock::now();
}

Result<std::string> load_or_make_token(const std::filesystem::path& dir) {
    const std::filesystem::path path = dir / "join-token";
    auto token = read_file(path, 1024);
    if (token) {
        while (!token->empty() && token->back() == '\n') { token->pop_back(); }
        if (!token->empty()) { return token; }
    } else if (token.error().kind != ErrorKind::not_found) {
        return token;
    }
    std::string fresh = random_hex(kTokenBytes);
    LINKCPP_CHECK(write_file_atomically(path, fresh + "\n", 0600));
    return fresh;
}

json stats_json(const fb::StatsT& stats) {
    return {{"requests", stats.requests}, {"pairs", stats.pairs},
            {"rows", stats.rows},         {"busy_us", stats.busy_us},
            {"bytes_in", stats.bytes_in}, {"bytes_out", stats.bytes_out},
            {"refused", stats.refused},   {"resident_bytes", stats.resident_bytes}};
}

std::string_view state_name(const WorkerRecord& worker) {
    if (!worker.connected) { return "gone"; }
    switch (worker.shard.state) {
        case fb::ShardState::empty: return "waiting";
        case fb::ShardState::loading: return "loading";
        case fb::ShardState::ready: return "ready";
        case fb::ShardState::failed: return "failed";
    }
    return "unknown";
}

}  // namespace

Hub::Hub(HubOptions options, model::GgufFile file, model::Manifest manifest, net::Identity identity,
         net::TlsContext tls, net::Listener listener, std::string token)
    : options_(std::move(options)),
      file_(std::move(file)),
      manifest_(std::move(manifest)),
      manifest_json_(manifest_.to_json()),
      model_id_(sha256(as_bytes(manifest_json_))),
      identity_(std::move(identity)),
      tls_(std::move(tls)),
      listener_(std::move(listener)),
      token_(std::move(token)),
      swarm_(manifest_, model_id_, options_.swarm),
      started_(now()) {
    tokens_.add(token_);
}

Hub::~Hub() = default;

Result<std::unique_ptr<Hub>> Hub::make(HubOptions options) {
    options.swarm.first_epoch = static_cast<std::uint32_t>(std::time(nullptr));
    LINKCPP_TRY(model::GgufFile file, model::GgufFile::open(options.model));
    if (auto moe = model::read_moe(file); !moe) { return std::unexpected(moe.error()); }
    // Ports first: to hash 70 GB and then find the port taken would be a poor joke.
    auto listening = net::Listener::tcp(options.listen);
    if (!listening) { return fail(listening.error().kind, "{} (with --port or --listen)", listening.error().message); }
    net::Listener listener = *std::move(listening);
    LINKCPP_TRY(const std::filesystem::path dir, state_dir());
    LINKCPP_TRY(net::Identity identity, net::Identity::load_or_make(dir, "hub"));
    LINKCPP_TRY(net::TlsContext tls, net::TlsContext::make(identity));
    LINKCPP_TRY(std::string token, load_or_make_token(dir));
    LINKCPP_TRY(model::Manifest manifest, model::load_or_make_manifest(file));
    const net::Address https{options.listen.host, options.https_port};
    std::unique_ptr<Hub> hub(new Hub(std::move(options), std::move(file), std::move(manifest), std::move(identity),
                                     std::move(tls), std::move(listener), std::move(token)));
    LINKCPP_TRY(hub->http_, HttpServer::make(https, hub->identity_, hub->file_, hub->manifest_, hub->tokens_,
                                             [raw = hub.get()] { return raw->status_json(); }));
    return hub;
}

net::JoinLine Hub::join_line() const {
    const std::string& host = options_.advertised_host.empty() ? listener_.address().host : options_.advertised_host;
    return {{host, listener_.address().port}, identity_.fingerprint(), token_, http_->port()};
}

Status Hub::run(const std::stop_token& stop) {
    const std::stop_callback wake(stop, [this] { wake_.signal(); });
    http_->start();
    std::vector<pollfd> entries;
    while (!stop.stop_requested()) {
        replan();
        note_loading();
        heartbeat();
        answer_status();
        const bool accepting = now() >= accept_again_;
        entries.assign({{wake_.fd(), POLLIN, 0}, {accepting ? listener_.fd() : -1, POLLIN, 0}});
        for (const auto& peer : peers_) { entries.push_back({peer->link->fd(), peer->link->events(), 0}); }
        TimePoint next = std::min(next_heartbeat_, swarm_.next_replan(now()));
        if (status_asked_ != 0) { next = std::min(next, status_deadline_); }
        if (!accepting) { next = std::min(next, accept_again_); }
        ::poll(entries.data(), entries.size(), to_poll_ms(next - now()));
        if (entries[0].revents != 0) { wake_.clear(); }
        for (std::size_t i = 2; i < entries.size(); ++i) {
            if (entries[i].revents != 0) { serve(*peers_[i - 2]); }
        }
        if (entries[1].revents != 0) { accept(); }
        std::erase_if(peers_, [](const auto& peer) { return peer->gone; });
        if (routes_changed_) { send_routes(); }
    }
    return {};
}

void Hub::accept() {
    while (true) {
        auto accepted = listener_.accept();
        if (!accepted) {
            // Out of descriptors, say: whoever knocks goes on knocking, so look away for a moment.
            accept_again_ = now() + kAcceptPause;
            log_warn("{}", accepted.error().message);
            return;
        }
        if (!*accepted) { return; }
        if (peers_.size() >= kMaxPeers) {
            log_warn("{}: turned away, {} peers are connected already", (*accepted)->from, peers_.size());
            continue;
        }
        auto link = net::Link::tls_server(std::move((*accepted)->fd), (*accepted)->from, tls_);
        if (!link) {
            log_warn("{}: {}", (*accepted)->from, link.error().message);
            continue;
        }
        auto peer = std::make_unique<Peer>();
        peer->link = *std::move(link);
        peer->from = std::move((*accepted)->from);
        peer->since = peer->heard = now();
        peers_.push_back(std::move(peer));
    }
}

void Hub::serve(Peer& peer) {
    Status status = peer.link->flush();
    while (status && !peer.gone) {
        auto message = net::receive_message(*peer.link);
        if (!message) {
            status = std::unexpected(message.error());
        } else if (*message == nullptr) {
            return;
        } else {
            peer.heard = now();
            status = handle(peer, **message);
        }
    }
    if (!status) { drop(peer, status.error()); }
}

void Hub::drop(Peer& peer, const Error& error) {
    if (std::exchange(peer.gone, true)) { return; }
    if (error.kind == ErrorKind::disconnected) {
        log_info("{}", error.message);
    } else {
        log_warn("{}", error.message);
    }
    tokens_.remove(peer.https_token);
    if (peer.role == fb::Role::worker) {
        swarm_.left(peer.id, now());
        routes_changed_ = true;
    } else if (peer.role == fb::Role::coordinator) {
        send_coordinators();
    }
}

bool Hub::admitted(const Peer& peer, const fb::HelloT& hello) {
    if (tokens_.accept(hello.token)) { return true; }
    return hello.token.empty() && known_keys_.contains(peer.link->peer()->hex());
}

Status Hub::handle(Peer& peer, const wire::ControlT& message) {
    if (peer.role == fb::Role::none) {
        const auto* hello = message.body.AsHello();
        if (hello == nullptr) { return fail(ErrorKind::corrupt, "{}: expected a hello", peer.from); }
        return welcome(peer, *hello);
    }
    if (const auto* shard = message.body.AsShard(); shard != nullptr && peer.role == fb::Role::worker) {
        routes_changed_ = swarm_.reported(peer.id, *shard, now()) || routes_changed_;
    } else if (const auto* stats = message.body.AsStats()) {
        peer.stats = *stats;
        peer.answered = std::max(peer.answered, stats->sequence);
        swarm_.reported(peer.id, *stats, now());
        if (peer.role == fb::Role::coordinator) { note_unknown(*stats); }
    } else if (message.body.AsGoodbye() != nullptr) {
        if (peer.role == fb::Role::worker) { swarm_.said_goodbye(peer.id, now()); }
        return fail(ErrorKind::disconnected, "{}: left", peer.link->name());
    }
    return {};
}

void Hub::note_unknown(const fb::StatsT& stats) {
    constexpr std::size_t kMaxText = 512;
    for (const auto& unknown : stats.unknown) {
        if (unknown == nullptr || manifest_.model.find(unknown->layer) == nullptr) { continue; }
        unknown_layers_.try_emplace(unknown->layer, one_line(unknown->nodes.substr(0, kMaxText)));
    }
}

Status Hub::welcome(Peer& peer, const fb::HelloT& hello) {
    if (!admitted(peer, hello)) {
        net::refuse(*peer.link, ErrorKind::invalid, "the token is not valid; ask for a new join line");
        return fail(ErrorKind::invalid, "{}: refused, its token is not valid", peer.from);
    }
    if (hello.role != fb::Role::worker && hello.role != fb::Role::coordinator) {
        return fail(ErrorKind::corrupt, "{}: unknown role", peer.from);
    }
    peer.id = peer.link->peer()->hex();
    const bool twice = std::ranges::any_of(
        peers_, [&](const auto& other) { return other.get() != &peer && !other->gone && other->id == peer.id; });
    if (twice) {
        // Perhaps its old connection is dead and nobody has noticed yet: it will be let in when that one is given up.
        net::refuse(*peer.link, ErrorKind::overloaded, "another process with the same key is connected");
        peer.id.clear();
        return fail(ErrorKind::overloaded, "{}: refused, another process with the same key is connected", peer.from);
    }
    known_keys_.insert(peer.id);
    peer.role = hello.role;
    peer.link->set_limit(wire::kMaxControlBytes);
    peer.link->rename(hello.role == fb::Role::worker
                          ? fmt::format("worker {} at {}", hello.name.substr(0, 64), peer.from)
                          : fmt::format("coordinator {} at {}", hello.process.substr(0, 64), peer.from));
    peer.https_token = random_hex(kTokenBytes);
    tokens_.add(peer.https_token);
    fb::WelcomeT welcome;
    welcome.id = peer.id;
    welcome.features = wire::features();
    welcome.release = LINKCPP_VERSION;
    welcome.https_port = http_->port();
    welcome.https_token = peer.https_token;
    welcome.heartbeat_ms = static_cast<std::uint32_t>(options_.heartbeat / 1ms);
    welcome.boot_id = boot_id();
    if (hello.role == fb::Role::coordinator && hello.boot_id == boot_id()) {
        welcome.model_path = std::filesystem::absolute(file_.path()).string();
    }
    send(peer, std::move(welcome));
    fb::ManifestT manifest;
    manifest.json = manifest_json_;
    send(peer, std::move(manifest));
    log_info("{} joined", peer.link->name());
    if (hello.role == fb::Role::coordinator) {
        peer.hello = hello;
        peer.hello.token.clear();
        return welcome_coordinator(peer);
    }
    swarm_.joined(peer.id, hello, now());
    routes_changed_ = true;
    send(peer, coordinators());
    return {};
}

Status Hub::welcome_coordinator(Peer& peer) {
    // A coordinator that listens on every address is reached at the one it calls from.
    LINKCPP_TRY(net::Address address, net::parse_address(peer.hello.listen_address));
    if (address.host == "0.0.0.0" || address.host == "::") {
        LINKCPP_TRY(const net::Address from, net::parse_address(peer.from));
        address.host = from.host;
        peer.hello.listen_address = address.text();
    }
    send(peer, swarm_.routes());
    send_coordinators();
    return {};
}

template <class Message>
void Hub::send(Peer& peer, Message message) {
    if (peer.gone) { return; }
    if (const Status status = net::send_message(*peer.link, std::move(message)); !status) {
        drop(peer, status.error());
    }
}

fb::CoordinatorsT Hub::coordinators() const {
    fb::CoordinatorsT list;
    for (const auto& peer : peers_) {
        if (peer->gone || peer->role != fb::Role::coordinator) { continue; }
        auto entry = std::make_unique<fb::CoordinatorT>();
        entry->id = peer->id;
        entry->address = peer->hello.listen_address;
        entry->unix_path = peer->hello.unix_path;
        entry->boot_id = peer->hello.boot_id;
        list.coordinators.push_back(std::move(entry));
    }
    return list;
}

void Hub::note_loading() {
    Loading loading;
    for (const auto& [id, worker] : swarm_.workers()) {
        if (!worker.connected || worker.shard.state != fb::ShardState::loading) { continue; }
        loading.done_bytes += worker.shard.done_bytes;
        loading.total_bytes += worker.shard.total_bytes;
    }
    loading_done_ = loading.done_bytes;
    loading_total_ = loading.total_bytes;
    settled_ = swarm_.settled();
}

void Hub::send_coordinators() {
    for (const auto& peer : peers_) {
        if (peer->role == fb::Role::worker) { send(*peer, coordinators()); }
    }
}

void Hub::send_routes() {
    routes_changed_ = false;
    complete_ = swarm_.missing_slices() == 0;
    for (const auto& peer : peers_) {
        if (peer->role == fb::Role::coordinator) { send(*peer, swarm_.routes()); }
    }
}

void Hub::replan() {
    for (const std::string& id : swarm_.replan(now())) {
        routes_changed_ = true;
        for (const auto& peer : peers_) {
            if (peer->id == id && !peer->gone) { send(*peer, swarm_.assignment(id)); }
        }
    }
    if (routes_changed_) { send_routes(); }
}

void Hub::heartbeat() {
    if (now() < next_heartbeat_) { return; }
    next_heartbeat_ = now() + options_.heartbeat;
    for (const auto& peer : peers_) {
        const bool strange = peer->role == fb::Role::none;
        const Duration silent = now() - (strange ? peer->since : peer->heard);
        if (silent > (strange ? kHelloTimeout : options_.silence)) {
            drop(*peer, {ErrorKind::timeout,
                         fmt::format("{}: silent for {:.0f} s, given up", peer->link->name(), to_seconds(silent))});
        } else if (!strange) {
            send(*peer, fb::AskT{});  // so that the peer knows we live
        }
    }
    std::erase_if(peers_, [](const auto& peer) { return peer->gone; });
}

std::string Hub::status_json() {
    std::unique_lock lock(status_mutex_);
    const std::uint64_t mine = ++status_wanted_;
    wake_.signal();
    status_ready_.wait_for(lock, 2 * kStatusWait, [&] { return status_done_ >= mine; });
    return status_;
}

void Hub::answer_status() {
    std::uint64_t wanted = 0;
    {
        const std::lock_guard lock(status_mutex_);
        wanted = status_wanted_;
        if (wanted == status_done_ && !status_.empty()) { return; }
    }
    if (status_asked_ < wanted && status_asked_ == 0) {
        status_asked_ = wanted;
        status_deadline_ = now() + kStatusWait;
        for (const auto& peer : peers_) {
            if (peer->role == fb::Role::none) { continue; }
            fb::AskT ask;
            ask.sequence = wanted;
            send(*peer, ask);
        }
    }
    const bool all = std::ranges::all_of(
        peers_, [&](const auto& peer) { return peer->role == fb::Role::none || peer->answered >= status_asked_; });
    if (!all && now() < status_deadline_) { return; }
    std::string status = make_status();
    {
        const std::lock_guard lock(status_mutex_);
        status_ = std::move(status);
        status_done_ = status_asked_;
    }
    status_asked_ = 0;
    status_ready_.notify_all();
    wake_.signal();  // perhaps another question waits
}

std::string Hub::make_status() const {
    json workers = json::array();
    for (const auto& [id, worker] : swarm_.workers()) {
        json entry = stats_json(worker.stats);
        entry["id"] = id;
        entry["name"] = worker.hello.name;
        entry["device"] = worker.hello.device;
        entry["backend"] = worker.hello.backend;
        entry["boot_id"] = worker.hello.boot_id;
        entry["threads"] = worker.hello.n_threads;
        entry["memory_bytes"] = worker.hello.memory_bytes;
        entry["state"] = state_name(worker);
        entry["slices"] = plan::count(worker.ready);
        entry["bytes"] = plan::bytes_of(manifest_.model, worker.ready);
        entry["assigned_slices"] = plan::count(worker.assigned);
        entry["loading"] = {{"done_bytes", worker.shard.done_bytes}, {"total_bytes", worker.shard.total_bytes}};
        entry["error"] = worker.shard.error;
        entry["epoch"] = worker.epoch;
        workers.push_back(std::move(entry));
    }
    json coordinators = json::array();
    for (const auto& peer : peers_) {
        if (peer->role != fb::Role::coordinator) { continue; }
        json entry = stats_json(peer->stats);
        entry["id"] = peer->id;
        entry["process"] = peer->hello.process;
        entry["layers"] = peer->stats.layers;
        entry["local_pairs"] = peer->stats.local_pairs;
        entry["retries"] = peer->stats.retries;
        entry["failures"] = peer->stats.failures;
        entry["products"] = peer->stats.products;
        coordinators.push_back(std::move(entry));
    }
    json unknown = json::array();
    for (const auto& [layer, nodes] : unknown_layers_) { unknown.push_back({{"layer", layer}, {"nodes", nodes}}); }
    const std::uint64_t total = swarm_.total_slices();
    const std::uint64_t missing = swarm_.missing_slices();
    const model::MoeModel& model = manifest_.model;
    const json status = {
        {"release", LINKCPP_VERSION},
        {"hub",
         {{"address", listener_.address().text()},
          {"https_port", http_->port()},
          {"fingerprint", identity_.fingerprint().hex()},
          {"uptime_s", to_seconds(now() - started_)}}},
        {"model",
         {{"name", model.name},
          {"architecture", model.architecture},
          {"path", file_.path().string()},
          {"id", model_id_.hex()},
          {"layers", model.n_layer},
          {"moe_layers", model.layers.size()},
          {"slices", total},
          {"expert_bytes", model.expert_bytes()}}},
        {"coverage",
         {{"share", total == 0 ? 0.0 : static_cast<double>(total - missing) / static_cast<double>(total)},
          {"missing_slices", missing},
          {"replicas", swarm_.options().n_replicas}}},
        {"workers", workers},
        {"coordinators", coordinators},
        {"unknown_layers", unknown}};
    return status.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace linkcpp::hub
