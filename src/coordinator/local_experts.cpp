#include "coordinator/local_experts.h"

#include <algorithm>

#include "base/log.h"

namespace linkcpp::coordinator {

Result<std::unique_ptr<LocalExperts>> LocalExperts::open(const std::filesystem::path& path,
                                                         const model::Manifest& manifest, unsigned n_threads) {
    LINKCPP_TRY(model::GgufFile file, model::GgufFile::open(path));
    LINKCPP_TRY(const model::MoeModel model, model::read_moe(file));
    if (model.layers != manifest.model.layers) {
        return fail(ErrorKind::invalid, "{}: it is another model than the hub serves", path.string());
    }
    // Our own plugin's device is left out of devices(); a GPU is the backbone's.
    const std::vector<expert::Device> devices = expert::devices();
    const auto cpu = std::ranges::find_if(devices, &expert::Device::is_cpu);
    if (cpu == devices.end()) { return fail(ErrorKind::unsupported, "no CPU backend to compute experts on"); }
    std::unique_ptr<LocalExperts> local(new LocalExperts(manifest, std::move(file)));
    for (std::size_t i = 0; i < local->file_.n_splits(); ++i) {
        LINKCPP_TRY(MappedFile mapped, MappedFile::open(local->file_.path(i)));
        local->mapped_.push_back(std::move(mapped));
    }
    LINKCPP_TRY(local->engine_, expert::Engine::open(*cpu, n_threads));
    return local;
}

Result<std::vector<ByteView>> LocalExperts::tensors(const model::MoeLayer& layer) const {
    std::vector<ByteView> data;
    for (const model::ExpertTensor& tensor : layer.tensors) {
        const model::TensorInfo* info = file_.find(tensor.name);
        if (info == nullptr || info->offset + info->n_bytes > mapped_[info->split].bytes().size()) {
            return fail(ErrorKind::corrupt, "{}: not in the file any more", tensor.name);
        }
        data.push_back(mapped_[info->split].bytes().subspan(info->offset, info->n_bytes));
    }
    return data;
}

Status LocalExperts::hold(const model::MoeLayer& layer) {
    if (held_.contains(layer.layer)) { return {}; }
    LINKCPP_TRY(const std::vector<ByteView> data, tensors(layer));
    LINKCPP_CHECK(engine_->hold_mapped(0, layer, data));
    held_.insert(layer.layer);
    return {};
}

Status LocalExperts::verify(const model::MoeLayer& layer, std::uint32_t expert) {
    if (verified_.contains({layer.layer, expert})) { return {}; }
    const Digest* expected = manifest_.slice(layer.layer, expert);
    LINKCPP_TRY(const std::vector<ByteView> data, tensors(layer));
    Sha256 hash;
    for (std::size_t i = 0; i < data.size(); ++i) {
        hash.add(data[i].subspan(expert * layer.tensors[i].slab_bytes, layer.tensors[i].slab_bytes));
    }
    if (expected == nullptr || hash.finish() != *expected) {
        return fail(ErrorKind::corrupt, "{}: expert {} of layer {} has other bytes than the model that is served",
                    file_.path().string(), expert, layer.layer);
    }
    verified_.insert({layer.layer, expert});
    return {};
}

Status LocalExperts::compute_rows(std::uint32_t layer, std::span<const float> rows, std::span<const expert::Pair> pairs,
                                  std::span<float> out) {
    const model::MoeLayer* described = manifest_.model.find(layer);
    if (described == nullptr) { return fail(ErrorKind::not_found, "layer {} has no routed experts", layer); }
    LINKCPP_CHECK(hold(*described));
    for (const expert::Pair& pair : pairs) { LINKCPP_CHECK(verify(*described, pair.expert)); }
    return engine_->compute_rows({0, layer, described->n_embd, rows, pairs}, out);
}

}  // namespace linkcpp::coordinator
