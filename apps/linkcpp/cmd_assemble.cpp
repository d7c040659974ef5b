#include <map>
#include <memory>
#include <optional>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/text.h"
#include "base/units.h"
#include "commands.h"
#include "model/assembly.h"
#include "model/backbone_stamp.h"
#include "model/manifest.h"
#include "model/slicer.h"
#include "print_json.h"
#include "store/slice_store.h"
#include "store_folder.h"

namespace linkcpp::cli {
namespace {

struct AssembleArguments {
    std::string backbone;
    std::vector<std::string> parts;
    std::string manifest;
    std::string store;
    std::string out;
    bool json = false;
};

// Where a model's slices are read from: files of `linkcpp slice`, and a store where the manifest says what to look for.
class Slices {
  public:
    explicit Slices(model::MoeModel model) : model_(std::move(model)) {}

    Status add_manifest(const std::string& path) {
        LINKCPP_TRY(const std::string json, read_file(path, model::kMaxManifestBytes));
        auto manifest = model::Manifest::from_json(json);
        if (!manifest) { return fail_with(path, std::move(manifest).error()); }
        if (manifest->model.layers != model_.layers) {
            return fail(ErrorKind::invalid, "{}: this is the manifest of another model than the backbone's", path);
        }
        manifest_ = *std::move(manifest);
        return {};
    }

    Status add_part(const std::string& path) {
        LINKCPP_TRY(model::SliceFile part, model::open_slices(path));
        const model::MoeLayer* layer = model_.find(part.layer.layer);
        if (layer == nullptr || *layer != part.layer) {
            return fail(ErrorKind::invalid, "{}: layer {} of this file is not like the backbone's", path,
                        model::layer_name(part.layer.layer));
        }
        for (std::size_t i = 0; i < part.experts.size(); ++i) {
            in_parts_.try_emplace({layer->layer, part.experts[i]}, Position{parts_.size(), i});
        }
        parts_.push_back(std::move(part));
        return {};
    }

    void add_store(store::SliceStore store) { store_ = std::move(store); }

    // Errors: not_found, with all that is missing.
    Status check_complete() const {
        std::string missing;
        for (const model::MoeLayer& layer : model_.layers) {
            std::vector<std::uint32_t> experts;
            for (std::uint32_t expert = 0; expert < layer.n_expert; ++expert) {
                if (!has(layer.layer, expert)) { experts.push_back(expert); }
            }
            if (experts.empty()) { continue; }
            missing += fmt::format("{}layer {}: {}", missing.empty() ? "" : "; ", model::layer_name(layer.layer),
                                   ranges(experts));
        }
        if (missing.empty()) { return {}; }
        return fail(ErrorKind::not_found, "these experts are in none of the files given: {}", missing);
    }

    // One slice; where its hash is known, its bytes have it.
    Result<Bytes> read(const model::MoeLayer& layer, std::uint32_t expert) const {
        const std::optional<Digest> hash = hash_of(layer.layer, expert);
        if (const auto found = in_parts_.find({layer.layer, expert}); found != in_parts_.end()) {
            const model::SliceFile& part = parts_[found->second.part];
            LINKCPP_TRY(Bytes bytes, part.read(found->second.position));
            if (hash && sha256(bytes) != *hash) {
                return fail(ErrorKind::corrupt, "{}: expert {} of layer {} has other bytes than the model's",
                            part.file.path().string(), expert, model::layer_name(layer.layer));
            }
            return bytes;
        }
        Bytes bytes(layer.slice_bytes());
        LINKCPP_CHECK(store_->read(*hash, bytes));
        return bytes;
    }

    // What the backbone itself knows of hashes: one expert's of each layer.
    Status read_stamps(const model::GgufFile& backbone) {
        for (const model::MoeLayer& layer : model_.layers) {
            Bytes bytes(model::BackboneStamp::kBytes);
            const model::TensorInfo& tensor = *backbone.find(layer.tensors.front().name);
            if (tensor.n_bytes < bytes.size()) { continue; }
            LINKCPP_CHECK(backbone.read(tensor, 0, bytes));
            const auto stamp = model::decode_backbone_stamp(bytes);
            if (!stamp) { continue; }
            if (manifest_ && manifest_->slice(layer.layer, stamp->expert) != nullptr &&
                *manifest_->slice(layer.layer, stamp->expert) != stamp->slice) {
                return fail(ErrorKind::invalid, "the manifest is of another model than {}", backbone.path().string());
            }
            stamps_[layer.layer] = *stamp;
        }
        return {};
    }

  private:
    struct Position {
        std::size_t part = 0;
        std::size_t position = 0;
    };

    std::optional<Digest> hash_of(std::uint32_t layer, std::uint32_t expert) const {
        if (manifest_) { return *manifest_->slice(layer, expert); }
        const auto stamp = stamps_.find(layer);
        if (stamp != stamps_.end() && stamp->second.expert == expert) { return stamp->second.slice; }
        return std::nullopt;
    }

    bool has(std::uint32_t layer, std::uint32_t expert) const {
        return in_parts_.contains({layer, expert}) ||
               (store_ && manifest_ && store_->has(*manifest_->slice(layer, expert)));
    }

    model::MoeModel model_;
    std::optional<model::Manifest> manifest_;
    std::optional<store::SliceStore> store_;
    std::vector<model::SliceFile> parts_;
    std::map<std::pair<std::uint32_t, std::uint32_t>, Position> in_parts_;
    std::map<std::uint32_t, model::BackboneStamp> stamps_;
};

Status assemble(const AssembleArguments& options) {
    LINKCPP_TRY(const auto backbone, model::GgufFile::open(options.backbone));
    LINKCPP_TRY(model::MoeModel model, model::read_moe(backbone));
    Slices slices(std::move(model));
    if (!options.manifest.empty()) { LINKCPP_CHECK(slices.add_manifest(options.manifest)); }
    LINKCPP_CHECK(slices.read_stamps(backbone));
    for (const std::string& part : options.parts) { LINKCPP_CHECK(slices.add_part(part)); }
    if (!options.manifest.empty()) {
        LINKCPP_TRY(const auto folder, store_folder(options.store));
        LINKCPP_TRY(store::SliceStore store, store::SliceStore::open(folder));
        slices.add_store(std::move(store));
    }
    LINKCPP_CHECK(slices.check_complete());
    LINKCPP_TRY(
        const auto paths,
        model::assemble(
            backbone, [&](const model::MoeLayer& layer, std::uint32_t expert) { return slices.read(layer, expert); },
            options.out));
    nlohmann::json files = nlohmann::json::array();
    for (const auto& path : paths) {
        std::error_code error;
        const std::uint64_t n_bytes = std::filesystem::file_size(path, error);
        files.push_back({{"path", path.string()}, {"bytes", n_bytes}});
        if (!options.json) { fmt::print("{}: {}\n", path.string(), format_bytes(n_bytes)); }
    }
    if (options.json) { print_json(nlohmann::json{{"files", std::move(files)}}); }
    return {};
}

}  // namespace

void add_assemble(CLI::App& app) {
    auto options = std::make_shared<AssembleArguments>();
    CLI::App* command =
        app.add_subcommand("assemble", "Puts a model together again, bit for bit, from its backbone and its slices");
    command->add_option("BACKBONE", options->backbone, "What `linkcpp backbone` has written")->required();
    command->add_option("PARTS", options->parts, "Files of `linkcpp slice`, or of a hub's /expert-shard");
    auto* manifest = command->add_option(
        "--manifest", options->manifest,
        "The model's manifest (`linkcpp manifest -o`): every byte is checked, and the store is looked into, too");
    command->add_option("--store", options->store, "The store (default: that of this user's workers)")->needs(manifest);
    command
        ->add_option("-o,--out", options->out,
                     "The GGUF to write; of a model in several files the name that theirs are made of")
        ->required();
    command->add_flag("--json", options->json, "Machine-readable");
    command->footer(
        "Without a manifest one expert of each layer is checked.\n"
        "Example: linkcpp assemble backbone.gguf layer-*.gguf -o model.gguf\n"
        "Example: linkcpp assemble backbone.gguf --manifest model.json -o model.gguf");
    run_or_exit(command, [options] { return assemble(*options); });
}

}  // namespace linkcpp::cli
