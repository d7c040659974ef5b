#include "coordinator/local_experts.h"

#include <algorithm>
#include <array>

#include "base/log.h"

namespace linkcpp::coordinator {

Result<std::unique_ptr<LocalExperts>> LocalExperts::open(const std::filesystem::path& path,
                                                         const model::Manifest& manifest, Options options) {
    LINKCPP_TRY(model::GgufFile file, model::GgufFile::open(path));
    LINKCPP_TRY(const model::MoeModel model, model::read_moe(file));
    if (model.layers != manifest.model.layers) {
        return fail(ErrorKind::invalid, "{}: it is another model than the hub serves", path.string());
    }
    LINKCPP_TRY(const expert::Device cpu, expert::cpu_device());  // a GPU is the backbone's
    std::unique_ptr<LocalExperts> local(new LocalExperts(manifest, std::move(file), options));
    LINKCPP_TRY(local->engine_, expert::Engine::open(cpu, options.n_threads));
    return local;
}

Result<Bytes> LocalExperts::slice(std::uint32_t layer, std::uint32_t expert) const {
    auto bytes = model::read_slice(file_, manifest_, layer, expert);
    if (bytes || bytes.error().kind != ErrorKind::corrupt) { return bytes; }
    return fail(ErrorKind::corrupt, "{} (where this program takes experts from; LINKCPP_MODEL names another file)",
                bytes.error().message);
}

Result<std::uint32_t> LocalExperts::hold(const model::MoeLayer& layer, std::uint32_t expert) {
    if (const auto found = index_.find({layer.layer, expert}); found != index_.end()) {
        held_.splice(held_.begin(), held_, found->second);
        return held_.front().key;
    }
    auto bytes = options_.only_compares ? model::read_slice(file_, layer, expert) : slice(layer.layer, expert);
    if (!bytes) { return std::unexpected(bytes.error()); }
    while (!held_.empty() && held_bytes_ + bytes->size() > options_.memory_bytes) {
        const Held& oldest = held_.back();
        engine_->drop(oldest.key);
        held_bytes_ -= oldest.bytes;
        index_.erase({oldest.layer, oldest.expert});
        held_.pop_back();
    }
    model::MoeLayer alone = layer;  // a layer of its own for the engine
    alone.layer = next_key_++;
    const std::array experts{static_cast<std::uint16_t>(expert)};
    const auto source = [&](std::uint32_t, std::uint32_t, std::span<std::byte> to) -> Status {
        std::ranges::copy(*bytes, to.begin());
        return {};
    };
    LINKCPP_CHECK(engine_->hold(0, alone, experts, source));
    held_.push_front({layer.layer, expert, alone.layer, bytes->size()});
    index_[{layer.layer, expert}] = held_.begin();
    held_bytes_ += bytes->size();
    return alone.layer;
}

Status LocalExperts::compute(std::uint32_t layer, std::optional<model::Role> product, std::uint32_t expert,
                             std::span<const float> rows, std::span<float> out) {
    const model::MoeLayer* described = manifest_.model.find(layer);
    const std::uint32_t n_in = described != nullptr ? model::widths_of(*described, product).n_in : 0;
    if (n_in == 0) { return fail(ErrorKind::not_found, "layer {} has no such experts", model::layer_name(layer)); }
    LINKCPP_TRY(const std::uint32_t key, hold(*described, expert));
    std::vector<expert::Pair> pairs(rows.size() / n_in);
    for (std::size_t i = 0; i < pairs.size(); ++i) {
        pairs[i] = {static_cast<std::uint16_t>(i), static_cast<std::uint16_t>(expert), 0};
    }
    return engine_->compute_rows({0, key, n_in, rows, pairs, product}, out);
}

}  // namespace linkcpp::coordinator
