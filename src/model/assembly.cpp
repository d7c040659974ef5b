#include "model/assembly.h"

#include <algorithm>
#include <cerrno>
#include <optional>

#include <unistd.h>

#include "base/log.h"
#include "base/platform.h"
#include "base/progress.h"
#include "model/parallel.h"
#include "model/slicer.h"
#include "model/split_name.h"

namespace linkcpp::model {
namespace {

namespace fs = std::filesystem;

std::string rest_key(std::size_t split) {
    return kBackboneRestKey + std::to_string(split);
}

// Where a file has bytes that are no tensor's. `tensors`: in the order of their offsets.
struct Gap {
    std::uint64_t offset = 0;
    std::uint64_t n_bytes = 0;
};
std::vector<Gap> gaps_of(std::span<const TensorInfo> tensors, std::uint64_t file_bytes) {
    std::vector<Gap> gaps;
    std::uint64_t at = 0;
    for (const TensorInfo& tensor : tensors) {
        if (tensor.offset > at) { gaps.push_back({at, tensor.offset - at}); }
        at = tensor.offset + tensor.n_bytes;
    }
    if (file_bytes > at) { gaps.push_back({at, file_bytes - at}); }
    return gaps;
}

std::uint64_t tensors_bytes(std::span<const TensorInfo> tensors) {
    std::uint64_t sum = 0;
    for (const TensorInfo& tensor : tensors) { sum += tensor.n_bytes; }
    return sum;
}

std::vector<std::uint64_t> as_numbers(ByteView bytes) {
    std::vector<std::uint64_t> numbers(1 + (bytes.size() + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t));
    numbers[0] = bytes.size();
    std::ranges::copy(bytes, std::as_writable_bytes(std::span(numbers)).subspan(sizeof(std::uint64_t)).begin());
    return numbers;
}

std::optional<Bytes> as_rest(std::span<const std::uint64_t> numbers) {
    if (numbers.empty()) { return std::nullopt; }
    const ByteView bytes = std::as_bytes(numbers.subspan(1));
    if (numbers[0] > bytes.size()) { return std::nullopt; }
    const ByteView rest = bytes.first(numbers[0]);
    return Bytes(rest.begin(), rest.end());
}

std::unexpected<Error> contradiction(const GgufFile& backbone, std::string_view what) {
    return fail(ErrorKind::corrupt, "{}: {} does not fit the rest of this backbone; make it again from the model",
                backbone.path().string(), what);
}

// One file of the model, while it is being written.
struct Part {
    AtomicFile file;
    std::vector<TensorInfo> tensors;
};

// Begins a file with its rest; its tensors are holes.
Result<Part> begin_part(const GgufFile& backbone, ByteView rest, const fs::path& path) {
    LINKCPP_TRY(AtomicFile file, AtomicFile::create(path));
    // The header stands at the front of the rest, where it is read like any other.
    LINKCPP_CHECK(write_at(file.fd(), rest, 0, file.name()));
    LINKCPP_TRY(GgufHeader header, read_gguf_header(file.fd(), rest.size(), backbone.path().string()));
    const std::uint64_t n_bytes = rest.size() + tensors_bytes(header.tensors);
    if (header.end > n_bytes || rest.size() < header.data_offset) { return contradiction(backbone, "a file's header"); }
    if (::ftruncate(file.fd(), static_cast<off_t>(header.data_offset)) != 0 ||
        ::ftruncate(file.fd(), static_cast<off_t>(n_bytes)) != 0) {
        return fail_errno(errno, file.name());
    }
    for (const Gap& gap : gaps_of(header.tensors, n_bytes)) {
        if (gap.n_bytes > rest.size()) { return contradiction(backbone, "a file's header"); }
        LINKCPP_CHECK(write_at(file.fd(), rest.first(gap.n_bytes), gap.offset, file.name()));
        rest = rest.subspan(gap.n_bytes);
    }
    return Part{.file = std::move(file), .tensors = std::move(header.tensors)};
}

// Where each of a backbone's tensors goes: a part and a tensor of it.
struct Place {
    const AtomicFile* file = nullptr;
    std::uint64_t offset = 0;
};
Result<std::unordered_map<std::string, Place>> places_of(const GgufFile& backbone, const std::vector<Part>& parts) {
    std::unordered_map<std::string, Place> places;
    for (const Part& part : parts) {
        for (const TensorInfo& tensor : part.tensors) {
            const TensorInfo* known = backbone.find(tensor.name);
            const bool fits = known != nullptr && known->type == tensor.type && known->ne == tensor.ne;
            if (!fits || !places.emplace(tensor.name, Place{&part.file, tensor.offset}).second) {
                return contradiction(backbone, fmt::format("tensor '{}'", tensor.name));
            }
        }
    }
    if (places.size() != backbone.tensors().size()) { return contradiction(backbone, "the number of tensors"); }
    return places;
}

Result<std::vector<Part>> begin_parts(const GgufFile& backbone, const std::vector<fs::path>& paths) {
    std::vector<Part> parts;
    for (std::size_t i = 0; i < paths.size(); ++i) {
        const auto rest = as_rest(backbone.numbers(rest_key(i)).value_or(std::vector<std::uint64_t>()));
        if (!rest) { return contradiction(backbone, rest_key(i)); }
        LINKCPP_TRY(Part part, begin_part(backbone, *rest, paths[i]));
        parts.push_back(std::move(part));
    }
    return parts;
}

std::vector<fs::path> paths_of(const fs::path& out, std::size_t n_files) {
    if (n_files == 1) { return {out}; }
    const std::string name = out.filename().string();
    auto split = parse_split_name(name);
    if (!split) { split = SplitName{.prefix = name.ends_with(".gguf") ? out.stem().string() : name}; }
    split->count = n_files;
    std::vector<fs::path> paths;
    for (std::size_t i = 0; i < n_files; ++i) { paths.push_back(out.parent_path() / split_name(*split, i)); }
    return paths;
}

}  // namespace

Status add_rest(const GgufFile& file, GgufWriter& writer) {
    if (file.flag(kBackboneKey).value_or(false)) {
        for (const RawKey& raw : file.keys()) {
            if (raw.key.starts_with(kBackboneRestKey)) { writer.add_raw(raw.key, file.raw_value(raw)); }
        }
        return {};
    }
    std::vector<std::vector<TensorInfo>> tensors(file.n_splits());
    for (const TensorInfo& tensor : file.tensors()) { tensors[tensor.split].push_back(tensor); }
    std::uint64_t n_bytes = file.file_bytes() - tensors_bytes(file.tensors());
    if (n_bytes > kMaxRestBytes || file.n_splits() > kMaxGgufKeys / 2) {
        log_warn(
            "{}: {} bytes besides its tensors are more than a backbone keeps: it cannot be assembled from it again",
            file.path().string(), n_bytes);
        return {};
    }
    for (std::size_t i = 0; i < file.n_splits(); ++i) {
        Bytes rest;
        for (const Gap& gap : gaps_of(tensors[i], file.file_bytes(i))) {
            const std::size_t at = rest.size();
            rest.resize(at + gap.n_bytes);
            LINKCPP_CHECK(read_at(file.fd(i), std::span(rest).subspan(at), gap.offset, file.path(i).string()));
        }
        writer.add(rest_key(i), as_numbers(rest));
    }
    return {};
}

Result<std::vector<fs::path>> assemble(const GgufFile& backbone, const SliceReader& slice, const fs::path& out) {
    if (!backbone.flag(kBackboneKey).value_or(false)) {
        return fail(ErrorKind::invalid, "{}: expected a backbone, got another GGUF; `linkcpp backbone` makes one",
                    backbone.path().string());
    }
    std::size_t n_files = 0;
    while (backbone.numbers(rest_key(n_files))) { ++n_files; }
    if (n_files == 0) {
        return fail(ErrorKind::invalid,
                    "{}: this backbone does not say how the model's files were laid out; make it again from the model",
                    backbone.path().string());
    }
    LINKCPP_TRY(const MoeModel model, read_moe(backbone));
    const std::vector<fs::path> paths = paths_of(out, n_files);
    for (const fs::path& path : paths) { LINKCPP_CHECK(check_not_source(backbone, path)); }
    LINKCPP_TRY(std::vector<Part> parts, begin_parts(backbone, paths));
    LINKCPP_TRY(const auto places, places_of(backbone, parts));

    // What is to be written: a tensor that is no expert's, or one expert.
    struct Item {
        const TensorInfo* tensor = nullptr;
        const MoeLayer* layer = nullptr;
        std::uint32_t expert = 0;
    };
    std::vector<Item> items;
    for (const TensorInfo& tensor : backbone.tensors()) {
        if (!is_left_out(tensor)) { items.push_back({.tensor = &tensor}); }
    }
    for (const MoeLayer& layer : model.layers) {
        for (std::uint32_t expert = 0; expert < layer.n_expert; ++expert) {
            items.push_back({.layer = &layer, .expert = expert});
        }
    }
    Progress progress("assembling", tensors_bytes(backbone.tensors()));
    LINKCPP_CHECK(for_all(items.size(), 0, progress, [&](std::size_t i) -> Result<std::uint64_t> {
        const Item& item = items[i];
        if (item.tensor != nullptr) {
            const Place& to = places.at(item.tensor->name);
            LINKCPP_CHECK(copy_range(backbone.fd(0), item.tensor->offset, to.file->fd(), to.offset,
                                     item.tensor->n_bytes, backbone.path().string(), to.file->name()));
            return item.tensor->n_bytes;
        }
        LINKCPP_TRY(const Bytes bytes, slice(*item.layer, item.expert));
        if (bytes.size() != item.layer->slice_bytes()) {
            return fail(ErrorKind::corrupt, "layer {}: expected {} bytes of expert {}, got {}",
                        layer_name(item.layer->layer), item.layer->slice_bytes(), item.expert, bytes.size());
        }
        ByteView left = bytes;
        for (const ExpertTensor& tensor : item.layer->tensors) {
            const ByteView slab = left.first(tensor.slab_bytes);
            left = left.subspan(slab.size());
            if (!is_weight(tensor.role)) { continue; }  // it is in the backbone
            const Place& to = places.at(tensor.name);
            LINKCPP_CHECK(write_at(to.file->fd(), slab, to.offset + item.expert * tensor.slab_bytes, to.file->name()));
        }
        return bytes.size();
    }));
    for (Part& part : parts) { LINKCPP_CHECK(part.file.commit(AtomicFile::Flush::no)); }
    return paths;
}

}  // namespace linkcpp::model
