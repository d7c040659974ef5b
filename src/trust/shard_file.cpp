#include "trust/shard_file.h"

#include <algorithm>
#include <numeric>

#include "base/text.h"
#include "model/manifest.h"
#include "model/slicer.h"

namespace linkcpp::trust {
namespace {

Result<ShardFile> from_slices(const std::filesystem::path& path, std::optional<std::uint32_t> layer) {
    LINKCPP_TRY(auto slices, model::open_slices(path));
    ShardFile shard{.architecture = slices.file.architecture(),
                    .name = slices.file.text("general.name").value_or(""),
                    .layer = slices.layer,
                    .experts = {slices.experts.begin(), slices.experts.end()},
                    .read = {}};
    if (layer && *layer != shard.layer.layer) {
        return fail(ErrorKind::not_found, "{}: expected layer {}, got slices of layer {}", path.string(), *layer,
                    model::layer_name(shard.layer.layer));
    }
    const auto file = std::make_shared<model::SliceFile>(std::move(slices));
    shard.read = [file, path](std::uint32_t expert) -> Result<Bytes> {
        const auto found = std::ranges::find(file->experts, expert);
        if (found == file->experts.end()) {
            return fail(ErrorKind::not_found, "{}: it has no expert {}", path.string(), expert);
        }
        return file->read(static_cast<std::size_t>(found - file->experts.begin()));
    };
    return shard;
}

}  // namespace

Result<ShardFile> open_shard(const std::filesystem::path& path, std::optional<std::uint32_t> layer) {
    LINKCPP_TRY(model::GgufFile opened, model::GgufFile::open(path));
    if (opened.number(model::kSliceLayerKey)) { return from_slices(path, layer); }
    LINKCPP_TRY(const model::MoeModel model, model::read_moe(opened));
    LINKCPP_CHECK(model::check_has_experts(opened));
    const model::MoeLayer* chosen = layer ? model.find(*layer) : &model.layers.front();
    if (chosen == nullptr) {
        std::vector<std::uint32_t> all;
        for (const model::MoeLayer& each : model.layers) { all.push_back(each.layer); }
        return fail(ErrorKind::not_found, "{}: expected a layer with routed experts ({}), got {}", path.string(),
                    ranges(all), *layer);
    }
    ShardFile shard{.architecture = model.architecture,
                    .name = model.name,
                    .layer = *chosen,
                    .experts = std::vector<std::uint16_t>(chosen->n_expert),
                    .read = {}};
    std::iota(shard.experts.begin(), shard.experts.end(), std::uint16_t{0});
    const auto file = std::make_shared<model::GgufFile>(std::move(opened));
    shard.read = [file, described = *chosen](std::uint32_t expert) {
        return model::read_slice(*file, described, expert);
    };
    return shard;
}

}  // namespace linkcpp::trust
