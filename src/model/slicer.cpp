#include "model/slicer.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <unordered_set>

#include <unistd.h>

#include "base/file.h"
#include "base/progress.h"
#include "base/text.h"
#include "model/assembly.h"
#include "model/backbone_stamp.h"
#include "model/gguf_writer.h"
#include "model/manifest.h"

namespace linkcpp::model {
namespace {

namespace fs = std::filesystem;

// Longer values of the architecture's keys are tables that no worker needs.
constexpr std::uint64_t kMaxSliceValueBytes = 16u << 10;
Status check_experts(const MoeLayer& layer, std::span<const std::uint32_t> experts) {
    if (experts.empty()) {
        return fail(ErrorKind::invalid, "layer {}: expected at least one expert, got none", layer.layer);
    }
    std::unordered_set<std::uint32_t> seen;
    for (const std::uint32_t expert : experts) {
        if (expert >= layer.n_expert) {
            return fail(ErrorKind::not_found, "layer {}: expected experts from 0 to {}, got {}", layer.layer,
                        layer.n_expert - 1, expert);
        }
        if (!seen.insert(expert).second) {
            return fail(ErrorKind::invalid, "layer {}: expected every expert once, got {} twice", layer.layer, expert);
        }
    }
    return {};
}

GgufWriter begin_slices(const GgufFile& file, const MoeModel& model, const MoeLayer& layer,
                        std::span<const std::uint32_t> experts) {
    GgufWriter writer;
    for (const RawKey& raw : file.keys()) {
        const bool of_model = raw.key.starts_with(model.architecture + ".") && raw.n_bytes <= kMaxSliceValueBytes;
        if (of_model || raw.key == "general.architecture" || raw.key == "general.name") {
            writer.add_raw(raw.key, file.raw_value(raw));
        }
    }
    writer.add(kSliceLayerKey, layer.layer);
    writer.add(kSliceExpertsKey, experts);
    writer.add(kSliceNExpertKey, layer.n_expert);
    return writer;
}

// The slabs of one tensor; neighbours in one piece.
void add_slabs(Composition& part, const GgufFile& file, const ExpertTensor& tensor,
               std::span<const std::uint32_t> experts) {
    const TensorInfo& info = *file.find(tensor.name);
    for (std::size_t i = 0; i < experts.size();) {
        std::size_t n = 1;
        while (i + n < experts.size() && experts[i + n] == experts[i] + n) { ++n; }
        part.add(info, experts[i] * tensor.slab_bytes, n * tensor.slab_bytes);
        i += n;
    }
}

// The tensors of a backbone in its order, as indices into file.tensors(): experts last.
struct BackboneOrder {
    std::vector<const TensorInfo*> tensors;
    std::size_t n_dense = 0;
};
BackboneOrder order_for_backbone(const GgufFile& file) {
    BackboneOrder order;
    for (const TensorInfo& tensor : file.tensors()) { order.tensors.push_back(&tensor); }
    const auto experts = std::stable_partition(order.tensors.begin(), order.tensors.end(),
                                               [](const TensorInfo* tensor) { return !is_left_out(*tensor); });
    order.n_dense = static_cast<std::size_t>(experts - order.tensors.begin());
    return order;
}

Result<GgufWriter> begin_backbone(const GgufFile& file, const BackboneOrder& order) {
    GgufWriter writer(file.alignment());
    for (const RawKey& raw : file.keys()) {
        const bool of_file = raw.key.starts_with("split.") || raw.key.starts_with(kBackboneKey);
        if (!of_file && raw.key != GGUF_KEY_GENERAL_ALIGNMENT) { writer.add_raw(raw.key, file.raw_value(raw)); }
    }
    writer.add(kBackboneKey, true);
    writer.add(kBackboneSourceKey, file.number(kBackboneSourceKey).value_or(file.file_bytes()));
    LINKCPP_CHECK(add_rest(file, writer));
    for (const TensorInfo* tensor : order.tensors) {
        LINKCPP_CHECK(writer.add_tensor(tensor->name, tensor->type, tensor->ne));
    }
    return writer;
}

// Whose experts a layer's were: read from the slabs, or from the stamp where `file` is a backbone itself.
Result<Bytes> stamp_of(const GgufFile& file, const MoeLayer& layer) {
    const std::uint32_t expert = sampled_expert(layer.layer, layer.n_expert);
    if (file.flag(kBackboneKey).value_or(false)) {
        Bytes bytes(BackboneStamp::kBytes);
        const ExpertTensor& tensor = layer.tensors.front();
        LINKCPP_CHECK(file.read(*file.find(tensor.name), 0, bytes));
        if (decode_backbone_stamp(bytes)) { return bytes; }
        return fail(ErrorKind::invalid,
                    "{}: {}: this backbone does not say which experts it lacks; make it from the model",
                    file.path().string(), tensor.name);
    }
    LINKCPP_TRY(const Bytes slice, read_slice(file, layer, expert));
    const auto stamp = encode(BackboneStamp{expert, sha256(slice)});
    return Bytes(stamp.begin(), stamp.end());
}

std::unexpected<Error> contradiction(const fs::path& path, std::string_view key) {
    return fail(ErrorKind::corrupt,
                "{}: {}: expected what fits the file's own tensors and keys, got something else; cut it again",
                path.string(), key);
}

Result<std::vector<std::uint32_t>> read_experts(const GgufFile& file, std::uint64_t n_expert) {
    const auto ids = file.numbers(kSliceExpertsKey);
    if (!ids || ids->empty() || ids->size() > n_expert) { return contradiction(file.path(), kSliceExpertsKey); }
    std::vector<std::uint32_t> experts;
    std::unordered_set<std::uint64_t> seen;
    for (const std::uint64_t id : *ids) {
        if (id >= n_expert || !seen.insert(id).second) { return contradiction(file.path(), kSliceExpertsKey); }
        experts.push_back(static_cast<std::uint32_t>(id));
    }
    return experts;
}

std::unexpected<Error> without_bytes(const GgufFile& file, std::string_view what) {
    return fail(ErrorKind::invalid, "{}: expected the whole model, got {}; give the file that it was made from",
                file.path().string(), what);
}

Status check_has_bytes(const GgufFile& file) {
    if (file.flag(kHeaderOnlyKey).value_or(false)) { return without_bytes(file, "a header-only file"); }
    return {};
}

}  // namespace

Status check_not_source(const GgufFile& file, const fs::path& out) {
    for (std::size_t i = 0; i < file.n_splits(); ++i) {
        std::error_code none;  // an output that is not there yet is no source
        if (fs::equivalent(file.path(i), out, none)) {
            return fail(ErrorKind::invalid,
                        "{}: expected another file than the model itself; choose another name for the output",
                        out.string());
        }
    }
    return {};
}

bool is_left_out(const TensorInfo& tensor) {
    const auto name = parse_expert_tensor_name(tensor.name);
    return name && is_weight(name->role);
}

Status check_has_experts(const GgufFile& file) {
    if (file.flag(kBackboneKey).value_or(false)) { return without_bytes(file, "a backbone: its experts are holes"); }
    return check_has_bytes(file);
}

Composition compose_slice(const GgufFile& file, const MoeLayer& layer, std::uint32_t expert) {
    Composition slice(file);
    for (const ExpertTensor& tensor : layer.tensors) {
        slice.add(*file.find(tensor.name), expert * tensor.slab_bytes, tensor.slab_bytes);
    }
    return slice;
}

Result<Composition> compose_slices(const GgufFile& file, const MoeModel& model, std::uint32_t layer_number,
                                   std::span<const std::uint32_t> experts) {
    LINKCPP_CHECK(check_has_experts(file));
    const MoeLayer* layer = model.find(layer_number);
    if (layer == nullptr) {
        std::vector<std::uint32_t> all;
        for (const MoeLayer& each : model.layers) { all.push_back(each.layer); }
        return fail(ErrorKind::not_found, "{}: expected a layer with routed experts ({}), got {}", file.path().string(),
                    ranges(all), layer_number);
    }
    LINKCPP_CHECK(check_experts(*layer, experts));

    GgufWriter writer = begin_slices(file, model, *layer, experts);
    for (const ExpertTensor& tensor : layer->tensors) {
        const auto [a, b, c] = tensor.shape_with(static_cast<std::int64_t>(experts.size()));
        LINKCPP_CHECK(writer.add_tensor(tensor.name, tensor.type, {a, b, c, 1}));
    }
    Composition part(file);
    part.add(writer.header());
    for (std::size_t i = 0; i < layer->tensors.size(); ++i) {
        part.fill_to(writer.offset(i));
        add_slabs(part, file, layer->tensors[i], experts);
    }
    part.fill_to(writer.file_bytes());
    return part;
}

Status write_slices(const GgufFile& file, std::uint32_t layer, std::span<const std::uint32_t> experts,
                    const fs::path& out) {
    LINKCPP_TRY(const MoeModel model, read_moe(file));
    LINKCPP_TRY(const Composition part, compose_slices(file, model, layer, experts));
    LINKCPP_CHECK(check_not_source(file, out));
    LINKCPP_TRY(AtomicFile to, AtomicFile::create(out));
    Progress progress("slicing", part.data_bytes());
    LINKCPP_CHECK(part.write(to, progress));
    return to.commit(AtomicFile::Flush::no);
}

Result<Bytes> SliceFile::read(std::size_t position) const {
    if (position >= experts.size()) {
        return fail(ErrorKind::not_found, "{}: expected a position below {}, got {}", file.path().string(),
                    experts.size(), position);
    }
    return read_slice(file, layer, static_cast<std::uint32_t>(position));
}

Result<SliceFile> open_slices(const fs::path& path) {
    LINKCPP_TRY(GgufFile file, GgufFile::open(path));
    const auto layer = file.number(kSliceLayerKey);
    const auto n_expert = file.number(kSliceNExpertKey);
    if (!layer || !n_expert || *n_expert > kMaxExperts) {
        return fail(ErrorKind::invalid,
                    "{}: expected a file of some experts of one layer, got another GGUF; cut one with linkcpp slice",
                    path.string());
    }
    LINKCPP_TRY(std::vector<std::uint32_t> experts, read_experts(file, *n_expert));
    LINKCPP_TRY(const MoeModel part, read_moe_part(file, static_cast<std::uint32_t>(*n_expert)));
    if (part.layers.size() != 1 || part.layers[0].layer != *layer) { return contradiction(path, kSliceLayerKey); }
    const ExpertTensor& first = part.layers[0].tensors.front();
    if (file.find(first.name)->ne[expert_dimension(first.role)] != static_cast<std::int64_t>(experts.size())) {
        return contradiction(path, kSliceExpertsKey);
    }
    return SliceFile{.file = std::move(file), .layer = part.layers[0], .experts = std::move(experts)};
}

Result<Backbone> compose_backbone(const GgufFile& file) {
    LINKCPP_TRY(const MoeModel model, read_moe(file));
    LINKCPP_CHECK(check_has_bytes(file));
    const BackboneOrder order = order_for_backbone(file);
    LINKCPP_TRY(const GgufWriter writer, begin_backbone(file, order));
    std::map<std::uint32_t, Bytes> stamps;
    for (const MoeLayer& layer : model.layers) { LINKCPP_TRY(stamps[layer.layer], stamp_of(file, layer)); }

    Composition content(file);
    content.add(writer.header());
    std::uint64_t front_bytes = writer.file_bytes();
    for (std::size_t i = 0; i < order.tensors.size(); ++i) {
        const TensorInfo& tensor = *order.tensors[i];
        content.fill_to(writer.offset(i));
        if (i == order.n_dense) { front_bytes = content.n_bytes(); }
        if (i < order.n_dense) {
            content.add(tensor, 0, tensor.n_bytes);
        } else {
            const Bytes& stamp = stamps[parse_expert_tensor_name(tensor.name)->layer];
            if (stamp.size() <= tensor.n_bytes) { content.add(stamp); }
        }
    }
    content.fill_to(writer.file_bytes());
    return Backbone{.content = std::move(content), .front_bytes = front_bytes};
}

Result<BackboneSize> write_backbone(const GgufFile& file, const fs::path& out) {
    LINKCPP_TRY(const Backbone backbone, compose_backbone(file));
    const Composition& content = backbone.content;
    LINKCPP_CHECK(check_not_source(file, out));
    LINKCPP_TRY(AtomicFile to, AtomicFile::create(out));
    Progress progress("copying", content.data_bytes());
    LINKCPP_CHECK(content.write(to, progress));
    LINKCPP_CHECK(to.commit(AtomicFile::Flush::no));
    return BackboneSize{.apparent_bytes = content.n_bytes(), .bytes = content.data_bytes()};
}

Status complete_backbone(int fd, std::string_view name, std::uint64_t front_bytes, const Manifest& manifest) {
    LINKCPP_TRY(const GgufHeader header, read_gguf_header(fd, front_bytes, name));
    const auto padded = [&](std::uint64_t n) {
        return (n + header.alignment - 1) / header.alignment * header.alignment;
    };
    const auto first = std::ranges::find_if(header.tensors, is_left_out);
    const bool one_tail = std::all_of(first, header.tensors.end(), is_left_out);
    if (!one_tail || (first == header.tensors.end() ? padded(header.end) : first->offset) != front_bytes) {
        return fail(ErrorKind::corrupt, "{}: this is not the front of a backbone", name);
    }
    if (::ftruncate(fd, static_cast<off_t>(padded(header.end))) != 0) { return fail_errno(errno, name); }
    for (auto tensor = first; tensor != header.tensors.end(); ++tensor) {
        const MoeLayer* layer = manifest.model.find(parse_expert_tensor_name(tensor->name)->layer);
        if (layer == nullptr) {
            return fail(ErrorKind::corrupt, "{}: '{}' is not in the manifest", name, tensor->name);
        }
        const std::uint32_t expert = sampled_expert(layer->layer, layer->n_expert);
        const auto stamp = encode(BackboneStamp{expert, *manifest.slice(layer->layer, expert)});
        if (stamp.size() > tensor->n_bytes) { continue; }
        LINKCPP_CHECK(write_at(fd, stamp, tensor->offset, name));
    }
    return {};
}

}  // namespace linkcpp::model
