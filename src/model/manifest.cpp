#include "model/manifest.h"

#include <algorithm>
#include <optional>

#include <nlohmann/json.hpp>

#include "base/log.h"
#include "base/platform.h"
#include "base/progress.h"
#include "model/parallel.h"
#include "model/slicer.h"

namespace linkcpp::model {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::string_view kFormat = "linkcpp.manifest.2";
constexpr int kMaxDepth = 6;  // object, "layers", layer, "tensors", tensor, value

Json layer_to_json(const MoeLayer& layer, const std::vector<Digest>& slices) {
    Json tensors = Json::array();
    for (const ExpertTensor& tensor : layer.tensors) {
        tensors.push_back({{"role", static_cast<int>(tensor.role)}, {"type", static_cast<int>(tensor.type)}});
    }
    Json hashes = Json::array();
    for (const Digest& digest : slices) { hashes.push_back(digest.hex()); }
    return {{"layer", layer.layer},
            {"n_expert", layer.n_expert},
            {"n_expert_used", layer.n_expert_used},
            {"n_embd", layer.n_embd},
            {"n_ff", layer.n_ff},
            {"activation", static_cast<int>(layer.activation.kind)},
            {"parameters", layer.activation.parameters},
            {"weights_first", layer.weights_first},
            {"tensors", std::move(tensors)},
            {"slices", std::move(hashes)}};
}

std::unexpected<Error> wrong(std::string_view key, std::string_view expected) {
    return fail(ErrorKind::corrupt, "manifest: '{}': expected {}, got something else", key, expected);
}

Result<std::uint32_t> number(const Json& object, const char* key) {
    const auto found = object.find(key);
    if (found == object.end() || !found->is_number_unsigned() || found->get<std::uint64_t>() > UINT32_MAX) {
        return wrong(key, "a number below 2^32");
    }
    return found->get<std::uint32_t>();
}

Result<std::string> text(const Json& object, const char* key) {
    const auto found = object.find(key);
    if (found == object.end() || !found->is_string()) { return wrong(key, "text"); }
    return found->get<std::string>();
}

Result<const Json*> array(const Json& object, const char* key, std::size_t limit) {
    const auto found = object.find(key);
    if (found == object.end() || !found->is_array() || found->size() > limit) {
        return wrong(key, fmt::format("an array of at most {}", limit));
    }
    return &*found;
}

Result<std::array<float, 2>> parameters_from_json(const Json& layer) {
    std::array<float, 2> parameters{};
    LINKCPP_TRY(const Json* numbers, array(layer, "parameters", parameters.size()));
    if (numbers->size() != parameters.size() ||
        !std::ranges::all_of(*numbers, [](const Json& json) { return json.is_number(); })) {
        return wrong("parameters", "two numbers");
    }
    std::ranges::transform(*numbers, parameters.begin(), [](const Json& json) { return json.get<float>(); });
    return parameters;
}

// Fills in what follows from the layer's numbers and the tensor's role and type.
Result<ExpertTensor> tensor_from_json(const Json& json, const MoeLayer& layer) {
    if (!json.is_object()) { return wrong("tensors", "an object for each"); }
    LINKCPP_TRY(const std::uint32_t role, number(json, "role"));
    LINKCPP_TRY(const std::uint32_t type, number(json, "type"));
    if (role < 1 || role > kMaxRole) { return wrong("role", fmt::format("1 to {}", kMaxRole)); }
    if (type >= GGML_TYPE_COUNT) { return wrong("type", "a type of GGUF"); }
    ExpertTensor tensor;
    tensor.role = static_cast<Role>(role);
    tensor.type = static_cast<ggml_type>(type);
    tensor.name = expert_tensor_name(layer.layer, tensor.role);
    tensor.ne = shape_of(layer, tensor.role);
    tensor.slab_bytes = slab_bytes_of(layer, tensor.role, tensor.type).value_or(0);
    return tensor;
}

Result<MoeLayer> layer_from_json(const Json& json) {
    if (!json.is_object()) { return wrong("layers", "an object for each"); }
    MoeLayer layer;
    LINKCPP_TRY(layer.layer, number(json, "layer"));
    LINKCPP_TRY(layer.n_expert, number(json, "n_expert"));
    LINKCPP_TRY(layer.n_expert_used, number(json, "n_expert_used"));
    LINKCPP_TRY(layer.n_embd, number(json, "n_embd"));
    LINKCPP_TRY(layer.n_ff, number(json, "n_ff"));
    LINKCPP_TRY(const std::uint32_t activation, number(json, "activation"));
    if (activation > kMaxActivation) { return wrong("activation", fmt::format("0 to {}", kMaxActivation)); }
    layer.activation.kind = static_cast<Activation>(activation);
    LINKCPP_TRY(layer.activation.parameters, parameters_from_json(json));
    const auto weights_first = json.find("weights_first");
    if (weights_first == json.end() || !weights_first->is_boolean()) { return wrong("weights_first", "true or false"); }
    layer.weights_first = weights_first->get<bool>();
    LINKCPP_TRY(const Json* tensors, array(json, "tensors", kMaxRole));
    for (const Json& tensor : *tensors) {
        LINKCPP_TRY(ExpertTensor read, tensor_from_json(tensor, layer));
        layer.tensors.push_back(std::move(read));
    }
    return layer;
}

Result<std::vector<Digest>> slices_from_json(const Json& json, std::uint32_t n_expert) {
    LINKCPP_TRY(const Json* hashes, array(json, "slices", kMaxExperts));
    std::vector<Digest> slices;
    for (const Json& hash : *hashes) {
        const auto digest = hash.is_string() ? Digest::from_hex(hash.get_ref<const std::string&>()) : std::nullopt;
        if (!digest) { return wrong("slices", "64 hexadecimal digits for each"); }
        slices.push_back(*digest);
    }
    if (slices.size() != n_expert) { return wrong("slices", fmt::format("{} of them", n_expert)); }
    return slices;
}

// Where what follows from a file's bytes is kept; `what` tells its kind.
Result<fs::path> cache_path(const GgufFile& file, std::string_view what) {
    LINKCPP_TRY(const fs::path folder, cache_dir());
    std::error_code error;
    fs::create_directories(folder / "manifests", error);
    if (error) { return fail_errno(error.value(), (folder / "manifests").string()); }
    return folder / "manifests" /
           (sha256(as_bytes(fmt::format("{}\n{}", kFormat, file.version()))).hex() + std::string(what));
}

// Nothing when there is none, or it is not this file's.
std::optional<Manifest> load_cached(const fs::path& path, const MoeModel& model) {
    const auto json = read_file(path, kMaxManifestBytes);
    if (!json) { return std::nullopt; }
    auto manifest = Manifest::from_json(*json);
    if (!manifest || manifest->model.architecture != model.architecture || manifest->model.layers != model.layers) {
        log_warn("{}: not a manifest of this model; making it anew", path.string());
        return std::nullopt;
    }
    return *std::move(manifest);
}

// A cache that cannot be written is no reason to fail.
void keep(const Result<fs::path>& path, std::string_view text) {
    const Status written = path ? write_file_atomically(*path, text) : Status(std::unexpected(path.error()));
    if (!written) { log_warn("not kept in the cache: {}", written.error().message); }
}

}  // namespace

const Digest* Manifest::slice(std::uint32_t layer, std::uint32_t expert) const {
    const auto found = std::ranges::find(model.layers, layer, &MoeLayer::layer);
    if (found == model.layers.end()) { return nullptr; }
    const auto index = static_cast<std::size_t>(found - model.layers.begin());
    if (index >= slices.size() || expert >= slices[index].size()) { return nullptr; }
    return &slices[index][expert];
}

std::string Manifest::to_json() const {
    Json layers = Json::array();
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
        layers.push_back(layer_to_json(model.layers[i], slices[i]));
    }
    const Json json = {{"format", kFormat},      {"architecture", model.architecture},
                       {"name", model.name},     {"n_layer", model.n_layer},
                       {"n_embd", model.n_embd}, {"layers", std::move(layers)}};
    return json.dump(-1, ' ', true, Json::error_handler_t::replace);
}

Result<Manifest> Manifest::from_json(std::string_view json) {
    if (json.size() > kMaxManifestBytes) {
        return fail(ErrorKind::corrupt, "manifest: expected at most {} bytes, got {}", kMaxManifestBytes, json.size());
    }
    bool too_deep = false;
    const auto watch_depth = [&](int depth, Json::parse_event_t, Json&) {
        too_deep |= depth > kMaxDepth;
        return !too_deep;
    };
    const Json parsed = Json::parse(json, watch_depth, false);
    if (parsed.is_discarded() || too_deep || !parsed.is_object()) { return wrong("manifest", "a JSON object"); }

    LINKCPP_TRY(const std::string format, text(parsed, "format"));
    if (format != kFormat) { return wrong("format", kFormat); }
    Manifest manifest;
    LINKCPP_TRY(manifest.model.architecture, text(parsed, "architecture"));
    LINKCPP_TRY(manifest.model.name, text(parsed, "name"));
    LINKCPP_TRY(manifest.model.n_layer, number(parsed, "n_layer"));
    LINKCPP_TRY(manifest.model.n_embd, number(parsed, "n_embd"));
    LINKCPP_TRY(const Json* layers, array(parsed, "layers", kMaxLayers));
    for (const Json& json_layer : *layers) {
        LINKCPP_TRY(MoeLayer layer, layer_from_json(json_layer));
        LINKCPP_TRY(std::vector<Digest> slices, slices_from_json(json_layer, layer.n_expert));
        manifest.model.layers.push_back(std::move(layer));
        manifest.slices.push_back(std::move(slices));
    }
    if (Status status = check(manifest.model); !status) { return fail_with("manifest", std::move(status).error()); }
    // The id is a hash of the text, so there must be no second text for the same manifest.
    if (manifest.to_json() != json) { return wrong("manifest", "the canonical text"); }
    return manifest;
}

Digest Manifest::id() const {
    return sha256(as_bytes(to_json()));
}

Result<Manifest> make_manifest(const GgufFile& file, unsigned n_threads) {
    Manifest manifest;
    LINKCPP_TRY(manifest.model, read_moe(file));
    LINKCPP_CHECK(check_has_experts(file));
    struct Item {
        const MoeLayer* layer;
        std::uint32_t expert;
        Digest* digest;
    };
    std::vector<Item> items;
    manifest.slices.resize(manifest.model.layers.size());
    for (std::size_t i = 0; i < manifest.slices.size(); ++i) {
        const MoeLayer& layer = manifest.model.layers[i];
        manifest.slices[i].resize(layer.n_expert);
        for (std::uint32_t expert = 0; expert < layer.n_expert; ++expert) {
            items.push_back({&layer, expert, &manifest.slices[i][expert]});
        }
    }
    Progress progress("hashing experts", manifest.model.expert_bytes());
    LINKCPP_CHECK(for_all(items.size(), n_threads, progress, [&](std::size_t i) -> Result<std::uint64_t> {
        const Composition slice = compose_slice(file, *items[i].layer, items[i].expert);
        LINKCPP_TRY(*items[i].digest, slice.hash(slice.n_bytes()));
        return slice.n_bytes();
    }));
    return manifest;
}

Result<Manifest> load_or_make_manifest(const GgufFile& file) {
    LINKCPP_TRY(const MoeModel model, read_moe(file));
    LINKCPP_CHECK(check_has_experts(file));
    const auto path = cache_path(file, ".json");
    if (path) {
        if (auto cached = load_cached(*path, model)) { return *std::move(cached); }
    }
    LINKCPP_TRY(Manifest manifest, make_manifest(file));
    LINKCPP_CHECK(file.check_unchanged());
    keep(path, manifest.to_json());
    return manifest;
}

Result<Digest> load_or_make_front_hash(const GgufFile& file, const Backbone& backbone) {
    const auto path = cache_path(file, ".backbone");
    if (path) {
        const auto cached = read_file(*path, Digest().hex().size());
        if (const auto digest = cached ? Digest::from_hex(*cached) : std::nullopt) { return *digest; }
    }
    LINKCPP_TRY(const Digest digest, backbone.content.hash(backbone.front_bytes));
    LINKCPP_CHECK(file.check_unchanged());
    keep(path, digest.hex());
    return digest;
}

Result<Bytes> read_slice(const GgufFile& file, const MoeLayer& layer, std::uint32_t expert) {
    if (expert >= layer.n_expert) {
        return fail(ErrorKind::not_found, "layer {}: expected an expert below {}, got {}", layer.layer, layer.n_expert,
                    expert);
    }
    Bytes slice(layer.slice_bytes());
    std::size_t at = 0;
    for (const ExpertTensor& tensor : layer.tensors) {
        const TensorInfo* info = file.find(tensor.name);
        if (info == nullptr) {
            return fail(ErrorKind::not_found, "{}: no tensor '{}'", file.path().string(), tensor.name);
        }
        const std::uint64_t start = expert * tensor.slab_bytes;
        LINKCPP_CHECK(file.read(*info, start, std::span(slice).subspan(at, tensor.slab_bytes)));
        at += tensor.slab_bytes;
    }
    return slice;
}

Result<Bytes> read_slice(const GgufFile& file, const Manifest& manifest, std::uint32_t layer, std::uint32_t expert) {
    const MoeLayer* described = manifest.model.find(layer);
    const Digest* expected = manifest.slice(layer, expert);
    if (described == nullptr || expected == nullptr) {
        return fail(ErrorKind::not_found, "layer {} has no expert {}", layer_name(layer), expert);
    }
    LINKCPP_TRY(Bytes slice, read_slice(file, *described, expert));
    if (sha256(slice) != *expected) {
        return fail(ErrorKind::corrupt, "{}: expert {} of layer {} has other bytes than the model that is served",
                    file.path().string(), expert, layer);
    }
    return slice;
}

}  // namespace linkcpp::model
