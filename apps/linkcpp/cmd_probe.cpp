#include <filesystem>
#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "base/clock.h"
#include "base/log.h"
#include "base/platform.h"
#include "base/text.h"
#include "commands.h"
#include "expert/device.h"
#include "trust/record.h"
#include "trust/truth.h"

namespace linkcpp::cli {
namespace {

struct ProbeArguments {
    std::string shard;
    std::optional<std::uint32_t> layer;
    std::string device;
    std::string backend;
    std::uint32_t n_tokens = 12;
    std::uint64_t seed = 1;
    std::string rounding;
    unsigned n_threads = 0;
    bool quiet = false;
    std::string out;
};

Result<expert::Device> device_of(const ProbeArguments& options) {
    if (!options.backend.empty()) { return expert::load_device(options.backend); }
    expert::load_backends();
    return expert::choose_device(expert::devices(), options.device);
}

Status probe_reference(const ProbeArguments& options, const trust::ShardFile& shard, const trust::ProbeInput& input,
                       trust::Record& record) {
    const std::string_view name = options.rounding.empty() ? "none" : std::string_view(options.rounding);
    const auto rounding = expert::rounding_of(name);
    // How sums of 16 bits are added up only the device knows.
    if (!rounding || *rounding == expert::Rounding::f16_sums) {
        std::string names;
        for (const auto each : expert::kRoundings) {
            if (each == expert::Rounding::f16_sums) { continue; }
            names += fmt::format("{}{}", names.empty() ? "" : ", ", expert::to_string(each));
        }
        return fail(ErrorKind::invalid, "--rounding: expected one of {}, got '{}'", names, name);
    }
    LINKCPP_TRY(record.rows,
                trust::run_reference(shard.layer, shard.read, input, {*rounding, *rounding}, options.n_threads));
    for (const auto& [part, rows] : record.rows) { record.roundings[part] = {*rounding, *rounding}; }
    record.place = {.device = std::string(trust::kReferenceDevice),
                    .description = fmt::format("double precision, rows rounded as {}", name),
                    .backend = std::string(trust::kReferenceDevice),
                    .ggml_version = ggml_version(),
                    .ggml_commit = ggml_commit(),
                    .release = LINKCPP_VERSION,
                    .machine = machine_name(),
                    .driver = {},
                    .features = {}};
    return {};
}

Status probe_device(const ProbeArguments& options, const trust::ShardFile& shard, const trust::ProbeInput& input,
                    trust::Record& record) {
    constexpr std::uint64_t kModel = 0;
    LINKCPP_TRY(const expert::Device device, device_of(options));
    LINKCPP_TRY(const auto engine, expert::Engine::open(device, options.n_threads));
    const std::vector<std::uint16_t> used = trust::used_experts(input);
    LINKCPP_CHECK(engine->hold(kModel, shard.layer, used,
                               [&](std::uint32_t, std::uint32_t expert, std::span<std::byte> to) -> Status {
                                   LINKCPP_TRY(const Bytes slice, shard.read(expert));
                                   std::ranges::copy(slice, to.begin());
                                   return {};
                               }));
    LINKCPP_TRY(record.rows, trust::run_probe(*engine, kModel, shard.layer, input));
    record.place = trust::place_of(device);
    // How it rounds shows in one expert's rows; `linkcpp verify` looks at all of them.
    LINKCPP_TRY(const trust::Findings findings,
                trust::judge(shard.layer, shard.read, input, record.rows, {.n_threads = 1, .n_experts = 1}));
    record.roundings = findings.roundings();
    if (!findings.passed()) {
        log_warn("{}: what it computes is not what it should be: {}", device.name, findings.why());
    }
    return {};
}

Status probe(const ProbeArguments& options) {
    const auto start = steady_now();
    LINKCPP_TRY(const trust::ShardFile shard, trust::open_shard(options.shard, options.layer));
    std::error_code none;  // an output that is not there yet is no shard
    if (std::filesystem::equivalent(options.shard, options.out, none)) {
        return fail(ErrorKind::invalid, "{}: expected another file than the shard itself; choose another name (-o)",
                    options.out);
    }
    LINKCPP_TRY(const trust::ProbeInput input,
                trust::make_input(shard.layer, shard.experts, options.seed, options.n_tokens));
    LINKCPP_TRY(trust::Record record, trust::begin_record(shard, input));
    const bool is_reference = options.device == trust::kReferenceDevice;
    if (!is_reference && !options.rounding.empty()) {
        return fail(ErrorKind::invalid,
                    "--rounding is of the reference (--device reference): a device rounds as it does");
    }
    LINKCPP_CHECK(is_reference ? probe_reference(options, shard, input, record)
                               : probe_device(options, shard, input, record));
    LINKCPP_CHECK(trust::write_record(record, options.out));
    if (options.quiet) { return {}; }
    fmt::print("{}: {} ({}), layer {}, {} of {} experts, {:.1f} s\n", options.out, record.place.device,
               record.place.description, model::layer_name(shard.layer.layer), counted(input.n_pairs(), "pair"),
               record.manifest.slices[0].size(), to_seconds(steady_now() - start));
    return {};
}

}  // namespace

void add_probe(CLI::App& app) {
    auto options = std::make_shared<ProbeArguments>();
    CLI::App* command = app.add_subcommand(
        "probe", "Computes a fixed input with a shard's experts on one device and records what comes out");
    command->add_option("--shard", options->shard, "Slices that `linkcpp slice` has cut, or a whole model")->required();
    command->add_option("--layer", options->layer, "Of a whole model (default: its first with experts)");
    auto* device = command->add_option("--device", options->device,
                                       "Where to compute, see `linkcpp devices`, or `reference`: in double precision "
                                       "(default: the first that is not a CPU, else the CPU)");
    command->add_option("--backend", options->backend, "Compute on the device of this ggml module and load no other")
        ->excludes(device)
        ->check(CLI::ExistingFile);
    command->add_option("--tokens", options->n_tokens, "Rows of input (default: 12)")
        ->check(CLI::Range(1u, trust::kMaxProbeTokens));
    command->add_option("--seed", options->seed, "Another seed, another input (default: 1)")->check(is_number());
    command->add_option(
        "--rounding", options->rounding,
        "Of the reference: round rows as a family of kernels does: none, f16, bf16, q8_0, q8_wide, q8_k");
    command->add_option("--threads", options->n_threads, "Threads of a CPU device (default: all processors)")
        ->check(CLI::Range(1u, kMaxThreads));
    command->add_flag("--quiet", options->quiet, "Say nothing but what goes wrong");
    command->add_option("-o,--out", options->out, "The record to write: a small GGUF")->required();
    command->footer(
        "Example: linkcpp probe --shard part.gguf --device CPU -o cpu.gguf\n"
        "Example: linkcpp probe --shard part.gguf --device reference -o truth.gguf");
    run_or_exit(command, [options] { return probe(*options); });
}

}  // namespace linkcpp::cli
