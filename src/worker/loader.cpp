#include "worker/loader.h"

#include <algorithm>

#include "base/log.h"
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
    return state_;
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
    // What is not wanted any more goes first: its memory may be needed.
    std::map<std::uint32_t, std::vector<std::uint16_t>> wanted;
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
        return {};
    };
    return engine_.hold(assignment.model_id.prefix(), layer, experts, source);
}

Status Loader::read_slice(const std::stop_token& stop, const Assignment& assignment, std::uint32_t layer,
                          std::uint32_t expert, std::span<std::byte> to) {
    const Digest* hash = assignment.manifest->slice(layer, expert);
    if (hash == nullptr) { return fail(ErrorKind::corrupt, "slice {}/{} is not in the manifest", layer, expert); }
    if (store_.has(*hash)) {
        const Status status = store_.read(*hash, to);
        if (status) { return {}; }
        log_warn("{}; fetched again", status.error().message);
    }
    std::size_t n_taken = 0;
    LINKCPP_CHECK(client_->fetch(fmt::format("/slice/{}", hash->hex()), 0, {.n_bytes = to.size(), .tag = hash->hex()},
                                 [&](ByteView piece) -> Status {
                                     if (stop.stop_requested()) {
                                         return fail(ErrorKind::failed, "not wanted any more");
                                     }
                                     std::ranges::copy(piece, to.subspan(n_taken).begin());
                                     n_taken += piece.size();
                                     return {};
                                 }));
    if (const Status kept = store_.put(*hash, to); !kept) {
        if (kept.error().kind == ErrorKind::corrupt) { return kept; }
        // It is as good without: only the next start has to fetch it again.
        const std::lock_guard lock(mutex_);
        if (state_.error.empty()) {  // once for each assignment
            state_.error = fmt::format("slices are not kept on disk: {}", kept.error().message);
            log_warn("{}", state_.error);
        }
    }
    return {};
}

}  // namespace linkcpp::worker
