#include "trust/record.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "base/file.h"
#include "base/platform.h"
#include "model/gguf_writer.h"

namespace linkcpp::trust {
namespace {

namespace fs = std::filesystem;
using expert::FfnRounding;
using model::MoeLayer;

constexpr std::string_view kArchitecture = "linkcpp-probe";
constexpr std::uint32_t kVersion = 1;
constexpr std::array kParts{Part::sums, Part::batch, Part::single,  Part::crowd,
                            Part::gate, Part::up,    Part::gate_up, Part::down};

std::string key(std::string_view name) {
    return fmt::format("linkcpp.probe.{}", name);
}

// The layer with so many experts.
MoeLayer with_experts(const MoeLayer& layer, std::uint32_t n_expert) {
    MoeLayer part = layer;
    part.n_expert = n_expert;
    part.n_expert_used = std::min(layer.n_expert_used, n_expert);
    for (model::ExpertTensor& tensor : part.tensors) { tensor.ne = model::shape_of(part, tensor.role); }
    return part;
}

std::vector<std::string> rounding_texts(const Record& record) {
    std::vector<std::string> texts;
    for (const auto& [part, rounding] : record.roundings) {
        texts.push_back(fmt::format("{} {} {}", to_string(part), to_string(rounding.input), to_string(rounding.inner)));
    }
    return texts;
}

struct Reader {
    const model::GgufFile& file;

    std::unexpected<Error> wrong(std::string_view name, std::string_view expected) const {
        return fail(ErrorKind::corrupt, "{}: {}: expected {}", file.path().string(), key(name), expected);
    }
    Result<std::string> text(std::string_view name) const {
        const auto value = file.text(key(name));
        if (!value) { return wrong(name, "a text"); }
        return *value;
    }
    Result<std::uint64_t> number(std::string_view name, std::uint64_t most) const {
        const auto value = file.number(key(name));
        if (!value || *value > most) { return wrong(name, fmt::format("a number of at most {}", most)); }
        return *value;
    }
    Result<std::vector<std::string>> texts(std::string_view name) const {
        const auto value = file.texts(key(name));
        if (!value) { return wrong(name, "a list of texts"); }
        return *value;
    }
};

Result<std::map<Part, FfnRounding>> read_roundings(const Reader& reader) {
    LINKCPP_TRY(const auto texts, reader.texts("rounding"));
    std::map<Part, FfnRounding> roundings;
    for (const std::string& text : texts) {
        std::istringstream words(text);
        std::string name;
        std::string input;
        std::string inner;
        words >> name >> input >> inner;
        const auto part = std::ranges::find(kParts, name, [](Part each) { return to_string(each); });
        const auto first = expert::rounding_of(input);
        const auto second = expert::rounding_of(inner);
        if (part == kParts.end() || !first || !second) { return reader.wrong("rounding", "parts and roundings"); }
        roundings[*part] = {*first, *second};
    }
    return roundings;
}

Result<Place> read_place(const Reader& reader) {
    Place place;
    LINKCPP_TRY(place.device, reader.text("device"));
    LINKCPP_TRY(place.description, reader.text("description"));
    LINKCPP_TRY(place.backend, reader.text("backend"));
    LINKCPP_TRY(place.ggml_version, reader.text("ggml_version"));
    LINKCPP_TRY(place.ggml_commit, reader.text("ggml_commit"));
    LINKCPP_TRY(place.release, reader.text("release"));
    LINKCPP_TRY(place.machine, reader.text("machine"));
    LINKCPP_TRY(place.driver, reader.texts("driver"));
    LINKCPP_TRY(place.features, reader.texts("features"));
    return place;
}

}  // namespace

Place place_of(const expert::Device& device) {
    return {.device = device.name,
            .description = device.description,
            .backend = device.backend,
            .ggml_version = ggml_version(),
            .ggml_commit = ggml_commit(),
            .release = LINKCPP_VERSION,
            .machine = machine_name(),
            .driver = expert::driver_libraries(),
            .features = expert::features_of(device)};
}

MoeLayer Record::layer() const {
    return with_experts(manifest.model.layers.front(), n_expert);
}

Result<ProbeInput> Record::input() const {
    return make_input(layer(), experts, seed, n_tokens);
}

Result<Record> begin_record(const ShardFile& shard, const ProbeInput& input) {
    Record record{.seed = input.seed, .n_tokens = input.n_tokens, .experts = shard.experts};
    record.n_expert = shard.layer.n_expert;
    const std::vector<std::uint16_t> used = used_experts(input);
    model::MoeModel& model = record.manifest.model;
    model.architecture = shard.architecture;
    model.name = shard.name;
    model.n_layer = shard.layer.layer % model::kSecondSet + 1;
    model.n_embd = shard.layer.n_embd;
    model.layers = {with_experts(shard.layer, static_cast<std::uint32_t>(used.size()))};
    record.manifest.slices.emplace_back();
    for (const std::uint16_t expert : used) {
        LINKCPP_TRY(const Bytes slice, shard.read(expert));
        record.manifest.slices[0].push_back(sha256(slice));
    }
    return record;
}

Status write_record(const Record& record, const fs::path& path) {
    model::GgufWriter writer;
    writer.add("general.architecture", kArchitecture);
    writer.add(key("version"), kVersion);
    writer.add(key("seed"), record.seed);
    writer.add(key("n_tokens"), record.n_tokens);
    const std::vector<std::uint32_t> experts(record.experts.begin(), record.experts.end());
    writer.add(key("experts"), std::span<const std::uint32_t>(experts));
    writer.add(key("n_expert"), record.n_expert);
    writer.add(key("manifest"), record.manifest.to_json());
    const Place& place = record.place;
    writer.add(key("device"), place.device);
    writer.add(key("description"), place.description);
    writer.add(key("backend"), place.backend);
    writer.add(key("ggml_version"), place.ggml_version);
    writer.add(key("ggml_commit"), place.ggml_commit);
    writer.add(key("release"), place.release);
    writer.add(key("machine"), place.machine);
    writer.add(key("driver"), std::span<const std::string>(place.driver));
    writer.add(key("features"), std::span<const std::string>(place.features));
    writer.add(key("rounding"), std::span<const std::string>(rounding_texts(record)));
    LINKCPP_TRY(const ProbeInput input, record.input());
    const MoeLayer layer = record.layer();
    for (const auto& [part, rows] : record.rows) {
        const PartShape shape = shape_of(part, layer, input);
        LINKCPP_CHECK(
            writer.add_tensor(to_string(part), GGML_TYPE_F32,
                              {static_cast<std::int64_t>(shape.n), static_cast<std::int64_t>(shape.n_rows), 1, 1}));
    }
    LINKCPP_TRY(AtomicFile file, AtomicFile::create(path));
    LINKCPP_CHECK(write_at(file.fd(), writer.header(), 0, file.name()));
    std::size_t tensor = 0;
    for (const auto& [part, rows] : record.rows) {
        LINKCPP_CHECK(write_at(file.fd(), std::as_bytes(std::span(rows)), writer.offset(tensor++), file.name()));
    }
    // The last tensor's padding is part of the file.
    const Bytes padding(writer.file_bytes() - writer.offset(tensor - 1) - record.rows.rbegin()->second.size() * 4);
    LINKCPP_CHECK(write_at(file.fd(), padding, writer.file_bytes() - padding.size(), file.name()));
    return file.commit();
}

Result<Record> read_record(const fs::path& path) {
    LINKCPP_TRY(const model::GgufFile file, model::GgufFile::open(path));
    if (file.architecture() != kArchitecture) {
        return fail(ErrorKind::invalid, "{}: expected what linkcpp probe writes, got another GGUF", path.string());
    }
    const Reader reader{file};
    Record record;
    LINKCPP_TRY(const std::uint64_t version, reader.number("version", UINT32_MAX));
    if (version != kVersion) {
        return fail(ErrorKind::unsupported, "{}: expected version {} of a probe, got {}", path.string(), kVersion,
                    version);
    }
    LINKCPP_TRY(record.seed, reader.number("seed", UINT64_MAX));
    LINKCPP_TRY(const std::uint64_t n_tokens, reader.number("n_tokens", kMaxProbeTokens));
    LINKCPP_TRY(const std::uint64_t n_expert, reader.number("n_expert", model::kMaxExperts));
    record.n_tokens = static_cast<std::uint32_t>(n_tokens);
    record.n_expert = static_cast<std::uint32_t>(n_expert);
    const auto experts = file.numbers(key("experts"));
    if (!experts || experts->empty() || experts->size() > n_expert ||
        std::ranges::any_of(*experts, [&](std::uint64_t e) { return e >= n_expert; }) ||
        std::set(experts->begin(), experts->end()).size() != experts->size()) {
        return reader.wrong("experts", "different experts of the layer");
    }
    record.experts.assign(experts->begin(), experts->end());
    LINKCPP_TRY(const std::string json, reader.text("manifest"));
    auto manifest = model::Manifest::from_json(json);
    if (!manifest) { return fail_with(path.string(), manifest.error()); }
    record.manifest = *std::move(manifest);
    if (record.manifest.model.layers.size() != 1) { return reader.wrong("manifest", "one layer"); }
    LINKCPP_TRY(record.place, read_place(reader));
    LINKCPP_TRY(record.roundings, read_roundings(reader));
    const auto input = record.input();
    if (!input) { return fail_with(path.string(), input.error()); }
    const MoeLayer layer = record.layer();
    if (used_experts(*input).size() != record.manifest.slices[0].size()) {
        return reader.wrong("manifest", "the experts that the input uses");
    }
    for (const Part part : parts_of(layer)) {
        const model::TensorInfo* tensor = file.find(to_string(part));
        const PartShape shape = shape_of(part, layer, *input);
        const std::array<std::int64_t, 4> ne{static_cast<std::int64_t>(shape.n),
                                             static_cast<std::int64_t>(shape.n_rows), 1, 1};
        if (tensor == nullptr || tensor->type != GGML_TYPE_F32 || tensor->ne != ne) {
            return fail(ErrorKind::corrupt, "{}: expected a tensor {} of {} × {} numbers", path.string(),
                        to_string(part), shape.n, shape.n_rows);
        }
        std::vector<float>& rows = record.rows[part];
        rows.resize(shape.n * shape.n_rows);
        LINKCPP_CHECK(file.read(*tensor, 0, std::as_writable_bytes(std::span(rows))));
    }
    return record;
}

}  // namespace linkcpp::trust
