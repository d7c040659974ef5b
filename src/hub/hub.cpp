#include "hub/hub.h"

#include <algorithm>
#include <array>
#include <ctime>
#include <random>

#include <poll.h>

#include "base/file.h"
#include "base/log.h"
#include "base/platform.h"
#include "base/text.h"
#include "base/units.h"
#include "hub/find_worker.h"
#include "hub/placement_file.h"
#include "hub/text.h"
#include "hub/trust_file.h"

namespace linkcpp::hub {
namespace {

using namespace std::chrono_literals;
namespace fb = wire::fb;

constexpr std::size_t kTokenBytes = 16;
constexpr Duration kAcceptPause = 1s;
constexpr const char* kAccessFile = "access.json";
constexpr const char* kTrustFile = "trust.json";
constexpr std::size_t kMaxEvents = 200;
constexpr std::size_t kMaxEventText = 240;
constexpr std::size_t kMaxRecords = 10'000;
// Without these a worker cannot be watched.
constexpr std::array kNeededFeatures{"probe", "pulse"};

std::uint64_t random_seed() {
    std::random_device device;
    return std::uint64_t{device()} << 32 | device();
}

// Where somebody is reached who says that it listens at `address` and calls from `from`: who listens on every address
// is reached at the one it calls from.
Result<std::string> reachable_at(const std::string& address, const std::string& from) {
    LINKCPP_TRY(net::Address parsed, net::parse_address(address));
    if (parsed.host == "0.0.0.0" || parsed.host == "::") {
        LINKCPP_TRY(const net::Address caller, net::parse_address(from));
        parsed.host = caller.host;
    }
    return parsed.text();
}

}  // namespace

Hub::Hub(HubOptions options, model::GgufFile file, model::Manifest manifest, net::Identity identity,
         net::TlsContext tls, net::Listener listener, Access access, const std::filesystem::path& state_dir)
    : options_(std::move(options)),
      file_(std::move(file)),
      manifest_(std::move(manifest)),
      manifest_json_(manifest_.to_json()),
      model_id_(sha256(as_bytes(manifest_json_))),
      identity_(std::move(identity)),
      tls_(std::move(tls)),
      listener_(std::move(listener)),
      access_(std::move(access)),
      access_path_(state_dir / kAccessFile),
      own_secret_(random_hex(kTokenBytes)),
      operator_token_(random_hex(kTokenBytes)),
      trust_path_(state_dir / kTrustFile),
      placement_path_(placement_path(state_dir, model_id_, listener_.address().port)),
      swarm_(manifest_, model_id_, options_.swarm),
      admission_(manifest_.model, options_.admission, random_seed()),
      started_(steady_now()) {
    access_.set_own_secret(own_secret_);
    tokens_.add(own_secret_);
    for (const JoinToken& token : access_.tokens()) { tokens_.add(token.secret); }
    operator_tokens_.add(operator_token_);
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
    // Two would overwrite what the other has written: a key that was revoked would come in again.
    LINKCPP_TRY(UniqueFd lock, try_lock(dir / "hub.lock"));
    if (!lock) {
        return fail(
            ErrorKind::invalid,
            "another hub is running with the keys and tokens in {}; for a second hub set LINKCPP_HOME to a folder "
            "of its own",
            dir.string());
    }
    LINKCPP_TRY(net::Identity identity, net::Identity::load_or_make(dir, "hub"));
    LINKCPP_TRY(net::TlsContext tls, net::TlsContext::make(identity));
    LINKCPP_TRY(Access access, Access::load(dir / kAccessFile, std::time(nullptr)));
    LINKCPP_TRY(auto known, read_trust(dir / kTrustFile));
    LINKCPP_TRY(model::Manifest manifest, model::load_or_make_manifest(file));
    const net::Address https{options.listen.host, options.https_port};
    std::unique_ptr<Hub> hub(new Hub(std::move(options), std::move(file), std::move(manifest), std::move(identity),
                                     std::move(tls), std::move(listener), std::move(access), dir));
    hub->state_lock_ = std::move(lock);
    hub->admission_.restore(std::move(known));
    if (auto placed = read_placement(hub->placement_path_, hub->manifest_.model, hub->model_id_)) {
        // A worker that an earlier start of this command has started, and this one does not, will not come back.
        std::erase_if(*placed, [raw = hub.get()](const RememberedWorker& worker) {
            const auto member = raw->access_.members().find(worker.id);
            return member != raw->access_.members().end() && member->second.token == Access::kOwn &&
                   !raw->options_.own_workers.contains(worker.name);
        });
        hub->swarm_.remember(*std::move(placed), steady_now());
    } else {
        log_warn("{}; slices are placed anew", placed.error().message);
    }
    HttpServer::Source source{
        .file = hub->file_,
        .manifest = hub->manifest_,
        .tokens = hub->tokens_,
        .operator_tokens = hub->operator_tokens_,
        .status = [raw = hub.get()] { return raw->status_json(); },
        .refused = [raw = hub.get()](const std::string& name,
                                     const std::string& text) { raw->refusals_.note(name, text); },
        .operate = [raw = hub.get()](Command command,
                                     const Arguments& arguments) { return raw->operate(command, arguments); }};
    const HubLimits& limits = hub->options_.limits;
    LINKCPP_TRY(hub->http_, HttpServer::make(https, hub->identity_,
                                             {limits.https_requests, limits.https_per_address, limits.hello_time},
                                             std::move(source)));
    return hub;
}

net::JoinLine Hub::join_line() const {
    const JoinToken* token = access_.find(Access::kDefault);
    return line_of(token != nullptr ? *token : JoinToken{});
}

net::JoinLine Hub::line_of(const JoinToken& token) const {
    net::JoinLine line = own_line();
    line.token = token.secret;
    return line;
}

net::JoinLine Hub::own_line() const {
    const std::string& host = options_.advertised_host.empty() ? listener_.address().host : options_.advertised_host;
    return {{host, listener_.address().port}, identity_.fingerprint(), own_secret_, http_->port()};
}

Status Hub::run(const std::stop_token& stop) {
    const std::stop_callback wake(stop, [this] { wake_.signal(); });
    http_->start();
    judge_ = std::make_unique<Judge>(file_, manifest_);
    std::vector<pollfd> entries;
    while (!stop.stop_requested()) {
        make_calls();
        take_judgements();
        replan();
        probe_workers();
        heartbeat();
        answer_status();
        const bool accepting = steady_now() >= accept_again_;
        entries.assign({{wake_.fd(), POLLIN, 0},
                        {accepting ? listener_.fd() : -1, POLLIN, 0},
                        {judge_->on_done().fd(), POLLIN, 0}});
        const std::size_t first = entries.size();
        for (const auto& peer : peers_) { entries.push_back({peer->link->fd(), peer->link->events(), 0}); }
        TimePoint next = std::min({next_heartbeat_, swarm_.next_replan(steady_now()), admission_.next(steady_now())});
        if (status_asked_ != 0) { next = std::min(next, status_deadline_); }
        if (!accepting) { next = std::min(next, accept_again_); }
        ::poll(entries.data(), entries.size(), to_poll_ms(next - steady_now()));
        if (entries[0].revents != 0) { wake_.clear(); }
        for (std::size_t i = first; i < entries.size(); ++i) {
            if (entries[i].revents != 0) { serve(*peers_[i - first]); }
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
            accept_again_ = steady_now() + kAcceptPause;
            refusals_.say("accept", accepted.error().message);
            return;
        }
        if (!*accepted) { return; }
        if (!may_come((*accepted)->from)) { continue; }
        auto link = net::Link::tls_server(std::move((*accepted)->fd), (*accepted)->from, tls_);
        if (!link) {
            refusals_.say("TLS", fmt::format("{}: {}", (*accepted)->from, link.error().message));
            continue;
        }
        auto peer = std::make_unique<Peer>();
        peer->link = *std::move(link);
        peer->link->set_queue_limit(options_.limits.queued_bytes);
        peer->from = std::move((*accepted)->from);
        peer->since = peer->heard = steady_now();
        peers_.push_back(std::move(peer));
    }
}

bool Hub::may_come(const std::string& from) {
    const HubLimits& limits = options_.limits;
    if (peers_.size() >= limits.peers) {
        refusals_.note(
            "too many peers",
            fmt::format("{}: turned away, {} peers are connected already (serve --max-peers)", from, peers_.size()));
        return false;
    }
    std::size_t n_here = 0;
    std::vector<Peer*> strangers;
    for (const auto& peer : peers_) {
        if (peer->gone || net::host_of(peer->from) != net::host_of(from)) { continue; }
        ++n_here;
        if (peer->role == fb::Role::none) { strangers.push_back(peer.get()); }
    }
    if (n_here >= limits.per_address) {
        refusals_.note(
            "too many from one address",
            fmt::format("{}: turned away, {} peers are connected from there already (serve --max-per-address)", from,
                        n_here));
        return false;
    }
    // Who means it says hello at once: a crowd that does not keeps nobody out.
    if (strangers.size() >= limits.strangers) {
        refusals_.count("too many strangers from one address");
        Peer* oldest = *std::ranges::min_element(strangers, {}, &Peer::since);
        drop(*oldest, {ErrorKind::disconnected, fmt::format("{}: gave way to others from there", oldest->from)});
    }
    return true;
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
            peer.heard = steady_now();
            status = handle(peer, **message);
        }
    }
    if (!status && status.error().kind == ErrorKind::corrupt) { refusals_.count("broken message"); }
    if (!status) { drop(peer, status.error()); }
}

void Hub::drop(Peer& peer, const Error& error) {
    if (std::exchange(peer.gone, true)) { return; }
    if (peer.role == fb::Role::none) {
        // A crowd that knocks and goes hides nobody whose token has ended.
        refusals_.say(fmt::format("stranger: {}", to_string(error.kind)), error.message);
    } else {
        log_line(error.kind == ErrorKind::disconnected ? LogLevel::info : LogLevel::warn, error.message);
    }
    tokens_.remove(peer.https_token);
    if (peer.role == fb::Role::worker) {
        const std::string_view message = error.message;
        const std::string name = fmt::format("{}: ", peer.link->name());  // an event has it anyway
        note_event(peer.id, fmt::format("gone: {}", message.substr(message.starts_with(name) ? name.size() : 0)));
        swarm_.left(peer.id, steady_now());
        admission_.left(peer.id);
        routes_changed_ = neighbours_changed_ = true;
    } else if (peer.role == fb::Role::coordinator) {
        add_audits(past_audits_, peer.stats);
        send_coordinators();
    }
}

void Hub::add_audits(std::map<std::string, AuditSum>& sums, const fb::StatsT& stats) const {
    for (const auto& audits : stats.audits) {
        if (audits == nullptr || !admission_.records().contains(audits->worker)) { continue; }
        sums[audits->worker].pairs += audits->pairs;
        sums[audits->worker].wrong += audits->wrong;
    }
}

Status Hub::handle(Peer& peer, wire::ControlT& message) {
    if (peer.role == fb::Role::none) {
        auto* hello = message.body.AsHello();
        if (hello == nullptr) { return fail(ErrorKind::corrupt, "{}: expected a hello", peer.from); }
        return welcome(peer, *hello);
    }
    if (const auto* shard = message.body.AsShard(); shard != nullptr && peer.role == fb::Role::worker) {
        routes_changed_ = swarm_.reported(peer.id, *shard, steady_now()) || routes_changed_;
    } else if (const auto* stats = message.body.AsStats()) {
        peer.stats = cut(*stats);
        peer.answered = std::max(peer.answered, stats->sequence);
        swarm_.reported(peer.id, peer.stats, steady_now());
        if (peer.role == fb::Role::coordinator) {
            note_unknown(peer.stats);
            if (stats->layers > 0 && computed_for_.size() < kMaxRecords) { computed_for_.insert(peer.hello.process); }
        }
    } else if (const auto* notice = message.body.AsNotice(); notice != nullptr && peer.role == fb::Role::coordinator) {
        if (admission_.records().contains(notice->worker)) { note_event(notice->worker, notice->text, &peer); }
    } else if (auto* rows = message.body.AsProbeRows(); rows != nullptr && peer.role == fb::Role::worker) {
        Admission::Change change;
        auto answer = admission_.received(peer.id, *rows, std::time(nullptr), change);
        if (answer) { judge_->judge(*std::move(answer)); }
        take_change(change);
    } else if (const auto* dispute = message.body.AsDispute();
               dispute != nullptr && peer.role == fb::Role::coordinator) {
        if (!judge_->judge(peer.id, *dispute)) {
            fb::VerdictT verdict;
            verdict.sequence = dispute->sequence;
            verdict.error = "too many disputes wait";
            send(peer, std::move(verdict));
        }
    } else if (message.body.AsGoodbye() != nullptr) {
        if (peer.role == fb::Role::worker) { swarm_.said_goodbye(peer.id, steady_now()); }
        return fail(ErrorKind::disconnected, "{}: left", peer.link->name());
    }
    return {};
}

void Hub::note_unknown(const fb::StatsT& stats) {
    for (const auto& unknown : stats.unknown) {
        if (unknown == nullptr || manifest_.model.find(unknown->layer) == nullptr) { continue; }
        unknown_layers_.try_emplace(unknown->layer, one_line(unknown->nodes));
    }
}

Status Hub::welcome(Peer& peer, fb::HelloT& hello) {
    // For people's eyes and terminals only.
    for (std::string* text : {&hello.name, &hello.process, &hello.device, &hello.backend, &hello.release}) {
        *text = one_line(text->substr(0, kMaxForeignText));
    }
    if (hello.role != fb::Role::worker && hello.role != fb::Role::coordinator) {
        return fail(ErrorKind::corrupt, "{}: unknown role", peer.from);
    }
    const Status let_in =
        access_.admit(peer.link->peer()->hex(), hello.token, hello.role,
                      hello.role == fb::Role::worker ? hello.name : hello.process, std::time(nullptr));
    if (!let_in) {
        refusals_.count("credentials");
        net::refuse(*peer.link, let_in.error().kind, let_in.error().message);
        return fail(let_in.error().kind, "{}: refused: {}", peer.from, let_in.error().message);
    }
    (void)save_access();  // the log says if it could not
    peer.id = peer.link->peer()->hex();
    const bool twice = std::ranges::any_of(
        peers_, [&](const auto& other) { return other.get() != &peer && !other->gone && other->id == peer.id; });
    if (twice) {
        refusals_.count("the same key twice");
        // Perhaps its old connection is dead and nobody has noticed yet: it will be let in when that one is given up.
        net::refuse(*peer.link, ErrorKind::overloaded, "another process with the same key is connected");
        peer.id.clear();
        return fail(ErrorKind::overloaded, "{}: refused, another process with the same key is connected", peer.from);
    }
    const bool lacks = std::ranges::any_of(kNeededFeatures, [&](std::string_view feature) {
        return std::ranges::find(hello.features, feature) == hello.features.end();
    });
    if (hello.role == fb::Role::worker && lacks) {
        refusals_.count("too old a release");
        net::refuse(*peer.link, ErrorKind::unsupported, "this worker is too old; give it the hub's release");
        return fail(ErrorKind::unsupported, "{}: refused, its release {} is too old", peer.from,
                    one_line(hello.release.substr(0, 64)));
    }
    peer.role = hello.role;
    peer.link->set_limit(
        static_cast<std::uint32_t>(std::min<std::size_t>(options_.limits.message_bytes, wire::kMaxControlBytes)));
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
    if (peer.gone) { return {}; }  // it could not be told all of that
    peer.name = hello.name;
    if (!hello.slices_address.empty()) {
        // One that makes no sense is nobody's loss.
        peer.slices_address = reachable_at(hello.slices_address.substr(0, kMaxForeignText), peer.from).value_or("");
    }
    neighbours_changed_ = true;
    swarm_.joined(peer.id, hello, steady_now());
    admission_.joined(peer.id, hello.name);
    note_event(peer.id, "joined");
    if (admission_.is_quarantined(peer.id)) {
        tell_quarantined(peer.id);
        swarm_.set_quarantined(peer.id, true, steady_now());
        log_warn("worker {} is in quarantine ({}); `linkcpp clear {}` lets it be probed and serve again", hello.name,
                 admission_.records().at(peer.id).why, peer.id.substr(0, kShortId));
    }
    routes_changed_ = true;
    send(peer, coordinators());
    return {};
}

Status Hub::welcome_coordinator(Peer& peer) {
    LINKCPP_TRY(peer.hello.listen_address, reachable_at(peer.hello.listen_address, peer.from));
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
    for (const auto& [key, member] : access_.members()) {
        if (member.revoked && member.role == fb::Role::coordinator) { list.revoked.push_back(key); }
    }
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

void Hub::send_coordinators() {
    for (const auto& peer : peers_) {
        if (peer->role == fb::Role::worker) { send(*peer, coordinators()); }
    }
}

void Hub::send_neighbours() {
    neighbours_changed_ = false;
    fb::NeighboursT all;
    for (const auto& peer : peers_) {
        if (peer->gone || peer->role != fb::Role::worker) { continue; }
        auto entry = std::make_unique<fb::NeighbourT>();
        entry->id = peer->id;
        entry->name = peer->name;
        entry->address = peer->slices_address;
        all.neighbours.push_back(std::move(entry));
    }
    for (const auto& peer : peers_) {
        if (peer->role == fb::Role::worker) { send(*peer, all); }
    }
}

void Hub::send_routes() {
    routes_changed_ = false;
    for (const auto& peer : peers_) {
        if (peer->role == fb::Role::coordinator) { send(*peer, swarm_.routes()); }
    }
}

void Hub::replan() {
    if (neighbours_changed_) { send_neighbours(); }  // before anybody is told to fetch something
    for (const std::string& id : swarm_.replan(steady_now())) {
        routes_changed_ = true;
        for (const auto& peer : peers_) {
            if (peer->id == id && !peer->gone) { send(*peer, swarm_.assignment(id)); }
        }
    }
    if (routes_changed_) { send_routes(); }
    save_placement();
}

void Hub::save_placement() {
    if (n_placements_saved_ == swarm_.n_placements()) { return; }
    n_placements_saved_ = swarm_.n_placements();
    const Status saved = write_placement(swarm_.workers(), placement_path_, manifest_.model, model_id_);
    if (!saved) { log_warn("{}; a hub that is started again will place slices anew", saved.error().message); }
}

void Hub::note_event(const std::string& worker, const std::string& text, const Peer* by) {
    if (events_.size() >= kMaxEvents) { events_.pop_front(); }
    const auto record = admission_.records().find(worker);
    events_.push_back({std::time(nullptr), record != admission_.records().end() ? record->second.name : "",
                       one_line(text.substr(0, kMaxEventText)), by != nullptr ? by->hello.process : ""});
}

void Hub::probe_workers() {
    for (const Admission::Change& change : admission_.overdue(steady_now())) { take_change(change); }
    for (const auto& [id, probe] : admission_.due(swarm_, steady_now())) {
        for (const auto& peer : peers_) {
            if (peer->id == id && !peer->gone) { send(*peer, probe); }
        }
    }
    if (routes_changed_) { send_routes(); }
}

void Hub::take_judgements() {
    for (const Judgement& judgement : judge_->take()) {
        if (const auto* probe = std::get_if<JudgedProbe>(&judgement)) {
            take_change(
                admission_.judged(probe->worker, probe->sequence, probe->findings, steady_now(), std::time(nullptr)));
        } else {
            take_ruling(std::get<JudgedDispute>(judgement));
        }
    }
}

void Hub::take_change(const Admission::Change& change) {
    const auto known = admission_.records().find(change.worker);
    if (known == admission_.records().end()) { return; }
    switch (change.outcome) {
        case Admission::Outcome::pending: return;
        case Admission::Outcome::admitted:
            routes_changed_ = swarm_.admitted(change.worker, change.epoch) || routes_changed_;
            save_trust();
            log_info("worker {} is admitted: it rounds like {}, its worst row is off by {:.1e} (tolerance {:.0e})",
                     known->second.name, known->second.rounding, known->second.worst_l2, known->second.tolerance_l2);
            return;
        case Admission::Outcome::failed:
            note_event(change.worker, change.why);
            swarm_.failed(change.worker, change.why, steady_now());
            routes_changed_ = true;
            return;
        case Admission::Outcome::wrong: quarantine(change.worker, change.why); return;
    }
}

// Admission has it in its book already.
void Hub::quarantine(const std::string& worker, const std::string& why) {
    const TrustRecord& record = admission_.records().at(worker);
    log_error(
        "worker {} computes wrong and is in quarantine: {}. Its work {}; `linkcpp clear {}` lets it be probed and "
        "serve again",
        record.name, why,
        record.in_doubt_since == 0 ? "was never used"
                                   : fmt::format("since {} is in doubt", time_text(record.in_doubt_since)),
        worker.substr(0, kShortId));
    note_event(worker, fmt::format("computes wrong, in quarantine: {}", why));
    tell_quarantined(worker);
    swarm_.set_quarantined(worker, true, steady_now());
    routes_changed_ = true;
    save_trust();
}

// So that whoever runs it knows.
void Hub::tell_quarantined(const std::string& worker) {
    for (const auto& peer : peers_) {
        if (peer->id != worker || peer->gone || peer->role != fb::Role::worker) { continue; }
        fb::NoticeT notice;
        notice.worker = worker;
        notice.text = fmt::format("this worker is in quarantine and is given nothing to do: {}",
                                  admission_.records().at(worker).why);
        send(*peer, std::move(notice));
    }
}

void Hub::save_trust() const {
    if (const Status saved = write_trust(admission_.records(), trust_path_); !saved) {
        log_error("{}; a hub that is started again will not know whom to distrust", saved.error().message);
    }
}

void Hub::take_ruling(const JudgedDispute& judged) {
    fb::VerdictT verdict;
    verdict.sequence = judged.dispute.sequence;
    if (!judged.fits) {
        verdict.error = judged.fits.error().message;
        // The first says it all; there may be hundreds a second.
        log_line(
            std::exchange(dispute_failed_, true) ? LogLevel::debug : LogLevel::warn,
            fmt::format("a dispute about expert {} of layer {} could not be judged: {}; restart this hub if its model "
                        "file has changed",
                        judged.dispute.expert, judged.dispute.layer, verdict.error));
    } else {
        for (std::size_t i = 0; i < judged.fits->size(); ++i) {
            const trust::RowFit& fit = (*judged.fits)[i];
            const std::string& worker = judged.dispute.claims[i]->worker;
            verdict.right.push_back(fit.holds);
            verdict.input_rounding.push_back(static_cast<std::uint8_t>(fit.rounding.input));
            verdict.inner_rounding.push_back(static_cast<std::uint8_t>(fit.rounding.inner));
            verdict.why.push_back(fit.holds ? "" : trust::to_string(fit));
            // Nobody waits for the verdict on a row that stands alone: it is an audit of the hub's own.
            if (judged.dispute.sequence == 0 && judged.fits->size() == 1 && admission_.records().contains(worker)) {
                ++past_audits_[worker].pairs;
                past_audits_[worker].wrong += fit.holds ? 0 : 1;
            }
            if (fit.holds || worker.empty()) { continue; }
            const std::string why =
                fmt::format("an audit of layer {}, expert {}: {}", model::layer_name(judged.dispute.layer),
                            judged.dispute.expert, verdict.why.back());
            // An id is the fingerprint of a key.
            const bool is_id = Digest::from_hex(worker).has_value() && admission_.records().size() < kMaxRecords;
            if (is_id && admission_.quarantine(worker, why, std::time(nullptr))) { quarantine(worker, why); }
        }
    }
    for (const auto& peer : peers_) {
        if (peer->id == judged.coordinator && !peer->gone) { send(*peer, verdict); }
    }
}

void Hub::make_calls() {
    std::vector<std::function<void()>> calls;
    {
        const std::lock_guard lock(calls_mutex_);
        calls = std::exchange(calls_, {});
    }
    for (const auto& call : calls) { call(); }
}

Status Hub::save_access() {
    if (!access_.take_changed()) { return {}; }
    const Status saved = access_.save(access_path_);
    if (saved) { return {}; }
    log_error("{}; a hub that is started again will not know this", saved.error().message);
    return fail(saved.error().kind, "it is so now, but a hub that is started again will not know: {}",
                saved.error().message);
}

void Hub::end_tokens() {
    const std::int64_t wall = std::time(nullptr);
    for (const JoinToken& token : access_.tokens()) {
        if (token.has_ended(wall)) { tokens_.remove(token.secret); }
    }
}

void Hub::heartbeat() {
    if (steady_now() < next_heartbeat_) { return; }
    next_heartbeat_ = steady_now() + options_.heartbeat;
    end_tokens();
    http_->sweep(steady_now());
    for (const auto& peer : peers_) {
        const bool strange = peer->role == fb::Role::none;
        const Duration silent = steady_now() - (strange ? peer->since : peer->heard);
        if (silent > (strange ? options_.limits.hello_time : options_.silence)) {
            if (strange) { refusals_.count("no hello in time"); }
            drop(*peer, {ErrorKind::timeout,
                         fmt::format("{}: silent for {:.0f} s, given up", peer->link->name(), to_seconds(silent))});
        } else if (!strange) {
            send(*peer, fb::AskT{});  // so that the peer knows we live
        }
    }
    std::erase_if(peers_, [](const auto& peer) { return peer->gone; });
}

}  // namespace linkcpp::hub
