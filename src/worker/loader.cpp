#include "worker/loader.h"

#include <algorithm>
#include <set>

#include "base/log.h"
#include "base/platform.h"
#include "base/units.h"

namespace linkcpp::worker {

Loader::~Loader() {
    thread_.request_stop();
}

void Loader::load(Assignment assignment) {
    thread_.request_stop();
    if (thread_.joinable()) { thread_.join(); }
    {
        const std::lock_guard lock(mutex_);
        state_.state = wire::fb::ShardState::loading;
        state_.epoch = assignment.epoch;
        state_.done_bytes = state_.total_bytes = 0;
        state_.error.clear();
    }
    thread_ = std::jthread([this, assignment = std::move(assignment)](const std::stop_token& stop) {
        const Status status = run(stop, assignment);
        client_.reset();  // an idle connection would hold a thread of the hub's, also when it wants to end
        progress_.reset();
        set_fetcher(nullptr);
        if (stop.stop_requested()) { return; }
        {
            const std::lock_guard lock(mutex_);
            state_.bytes = engine_.shard_bytes();
            state_.n_slices = 0;
            for (const auto& [layer, experts] : held_) { state_.n_slices += experts.size(); }
            state_.state = status ? wire::fb::ShardState::ready : wire::fb::ShardState::failed;
            if (!status) { state_.error = status.error().message; }
        }
        if (status) {
            log_info("holding {} slices, {}", state().n_slices, format_bytes(engine_.shard_bytes()));
        } else {
            log_error("loading failed: {}", status.error().message);
        }
        done_.signal();
    });
}

LoadState Loader::state() const {
    const std::lock_guard lock(mutex_);
    LoadState state = state_;
    if (fetcher_) { state.fetching = fetcher_->state(); }
    return state;
}

void Loader::set_fetcher(std::unique_ptr<store::Fetcher> fetcher) {
    {
        const std::lock_guard lock(mutex_);
        fetcher_.swap(fetcher);
    }
    // The old one ends here, without the lock: its threads may take a moment.
}

std::shared_ptr<const store::Inventory> Loader::inventory(const Digest& model_id) const {
    const std::lock_guard lock(mutex_);
    return inventory_ && inventory_->model_id() == model_id ? inventory_ : nullptr;
}

// Everything that no later step has at hand. Neighbours are told of all of the model that is here.
void Loader::start_fetching(const Assignment& assignment, const Wanted& wanted) {
    const model::Manifest& manifest = *assignment.manifest;
    auto inventory = std::make_shared<store::Inventory>(assignment.model_id, manifest.model.n_slices());
    std::vector<store::Fetcher::Slice> slices;
    std::set<Digest> all;
    std::size_t index = 0;
    for (std::size_t i = 0; i < manifest.slices.size(); ++i) {
        const model::MoeLayer& layer = manifest.model.layers[i];
        const auto found = wanted.find(layer.layer);
        for (std::uint32_t expert = 0; expert < layer.n_expert; ++expert, ++index) {
            const Digest& hash = manifest.slices[i][expert];
            const bool here = store_.has(hash);
            if (here) { inventory->set_here(index); }
            if (found == wanted.end() || !std::ranges::binary_search(found->second, expert)) { continue; }
            all.insert(hash);
            if (!here && !engine_.holds(layer.layer, expert)) { slices.push_back({hash, layer.slice_bytes(), index}); }
        }
    }
    store_.protect(std::move(all));
    store_.remember(manifest);
    {
        const std::lock_guard lock(mutex_);
        inventory_ = inventory;
    }
    set_fetcher(
        std::make_unique<store::Fetcher>(store_, assignment.origin, neighbourhood_, std::move(inventory), slices));
}

Status Loader::run(const std::stop_token& stop, const Assignment& assignment) {
    if (assignment.model_id != model_id_) {
        for (const auto& [layer, experts] : held_) { engine_.drop(layer); }
        held_.clear();
        model_id_ = assignment.model_id;
        publish_held();
    }
    client_ = std::make_unique<store::HttpsClient>(assignment.origin.address, assignment.origin.fingerprint,
                                                   assignment.origin.token);
    client_->end_with(stop);
    // What is not wanted any more goes first: its memory may be needed.
    Wanted wanted;
    for (const wire::LayerExperts& layer : assignment.slices) { wanted[layer.layer] = layer.experts; }
    for (auto it = held_.begin(); it != held_.end();) {
        if (wanted.contains(it->first)) {
            ++it;
            continue;
        }
        engine_.drop(it->first);
        it = held_.erase(it);
        publish_held();
    }
    std::uint64_t total = 0;
    for (const auto& [number, experts] : wanted) {
        const model::MoeLayer* layer = assignment.manifest->model.find(number);
        if (layer == nullptr || (!experts.empty() && experts.back() >= layer->n_expert)) {
            return fail(ErrorKind::corrupt, "assignment: layer {} or one of its experts is not in the manifest",
                        number);
        }
        if (held_[number] != experts) { total += experts.size() * layer->slice_bytes(); }
    }
    {
        const std::lock_guard lock(mutex_);
        state_.total_bytes = total;
    }
    serves_ = std::ranges::any_of(held_, [](const auto& layer) { return !layer.second.empty(); });
    start_fetching(assignment, wanted);
    progress_.emplace("loading", total);
    for (const auto& [number, experts] : wanted) {
        if (held_[number] == experts) { continue; }
        if (stop.stop_requested()) { return fail(ErrorKind::failed, "replaced by a newer assignment"); }
        LINKCPP_CHECK(load_layer(stop, assignment, *assignment.manifest->model.find(number), experts));
        held_[number] = experts;
        publish_held();
    }
    return {};
}

void Loader::publish_held() {
    wire::SliceSet held;
    for (const auto& [layer, experts] : held_) {
        if (!experts.empty()) { held.push_back({layer, experts}); }
    }
    const std::lock_guard lock(mutex_);
    state_.model_id = model_id_;
    state_.held = std::move(held);
}

Status Loader::load_layer(const std::stop_token& stop, const Assignment& assignment, const model::MoeLayer& layer,
                          std::span<const std::uint16_t> experts) {
    const auto source = [&](std::uint32_t number, std::uint32_t expert, std::span<std::byte> to) -> Status {
        LINKCPP_CHECK(read_slice(stop, assignment, number, expert, to));
        const std::lock_guard lock(mutex_);
        state_.done_bytes += to.size();
        progress_->set(state_.done_bytes);
        return {};
    };
    // Whoever computes already needs the other processors for that.
    const unsigned n_threads = serves_ ? 1 : 0;
    const std::uint64_t model = assignment.model_id.prefix();
    return maps_ ? engine_.hold_mapped(model, layer, experts, source, n_threads)
                 : engine_.hold(model, layer, experts, source, n_threads);
}

Status Loader::read_slice(const std::stop_token& stop, const Assignment& assignment, std::uint32_t layer,
                          std::uint32_t expert, std::span<std::byte> to) {
    const Digest* hash = assignment.manifest->slice(layer, expert);
    if (hash == nullptr) { return fail(ErrorKind::corrupt, "slice {}/{} is not in the manifest", layer, expert); }
    const std::uint64_t model = assignment.model_id.prefix();
    if (maps_) {
        if (from_store(*hash, to)) { return {}; }
    } else if (engine_.read(model, layer, expert, to)) {
        return {};
    }
    const Status here = fetcher_->wait(*hash, stop);
    if (!here && here.error().kind != ErrorKind::overloaded) { return here; }
    if (here) {
        const Status status = from_store(*hash, to);
        if (status) { return {}; }
        note("a slice on disk was damaged, and is fetched again");
    } else {
        // It is as good without: only the next start has to fetch it again.
        note(fmt::format("slices are not kept on disk: {}", here.error().message));
    }
    if (maps_) {
        LINKCPP_CHECK(map_memory(to));
        if (engine_.read(model, layer, expert, to)) { return {}; }
    }
    LINKCPP_CHECK(fetch(*hash, to));
    if (const Status kept = here ? store_.put(*hash, to) : Status(); !kept) { note(kept.error().message); }
    return {};
}

Status Loader::from_store(const Digest& hash, std::span<std::byte> to) const {
    return maps_ ? store_.map(hash, to) : store_.read(hash, to);
}

// What its user should know: the first of each assignment.
void Loader::note(std::string text) {
    const std::lock_guard lock(mutex_);
    if (!state_.error.empty()) { return; }
    log_warn("{}", text);
    state_.error = std::move(text);
}

Status Loader::fetch(const Digest& hash, std::span<std::byte> to) {
    const std::lock_guard lock(client_mutex_);
    std::size_t n_bytes = 0;
    LINKCPP_CHECK(client_->fetch("/slice/" + hash.hex(), 0, {.n_bytes = to.size(), .tag = hash.hex()},
                                 [&](ByteView piece) -> Status {
                                     std::ranges::copy(piece, to.subspan(n_bytes).begin());
                                     n_bytes += piece.size();
                                     return {};
                                 }));
    if (sha256(to) == hash) { return {}; }
    return fail(ErrorKind::corrupt, "slice {}: the bytes received have another hash", hash.hex().substr(0, 12));
}

}  // namespace linkcpp::worker
