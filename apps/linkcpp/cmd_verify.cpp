#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <unistd.h>
#include <nlohmann/json.hpp>

#include "base/platform.h"
#include "base/text.h"
#include "commands.h"
#include "expert/device.h"
#include "print_json.h"
#include "process.h"
#include "trust/record.h"
#include "trust/truth.h"

namespace linkcpp::cli {
namespace {

struct VerifyArguments {
    std::string shard;
    std::optional<std::uint32_t> layer;
    std::string device = "all";
    std::vector<std::string> backends;
    std::vector<std::string> records;
    std::uint32_t n_tokens = 12;
    std::uint64_t seed = 1;
    unsigned n_threads = 0;
    bool json = false;
};

// One device, and what came of it.
struct Verified {
    std::string device;
    std::string description;
    std::string crash;  // how the probe ended, if it did not end well
    trust::Findings findings;

    bool may_serve() const { return crash.empty() && findings.passed(); }
    std::string why() const { return crash.empty() ? findings.why() : crash; }
};

// A folder of its own for records, gone afterwards.
class Scratch {
  public:
    static Result<Scratch> make() {
        LINKCPP_TRY(const std::filesystem::path dir, runtime_dir());
        std::error_code error;
        // Those of processes that were killed.
        for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
            const std::string name = entry.path().filename().string();
            const long pid = name.starts_with(kStart) ? std::strtol(name.c_str() + kStart.size(), nullptr, 10) : 0;
            if (pid > 0 && ::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) {
                std::filesystem::remove_all(entry.path(), error);
            }
        }
        Scratch scratch;
        scratch.path_ = dir / fmt::format("{}{}-{}", kStart, ::getpid(), random_hex(3));
        std::filesystem::create_directory(scratch.path_, error);
        if (error) { return fail_errno(error.value(), scratch.path_.string()); }
        return scratch;
    }
    ~Scratch() {
        std::error_code ignored;
        if (!path_.empty()) { std::filesystem::remove_all(path_, ignored); }
    }
    Scratch(Scratch&& other) noexcept : path_(std::exchange(other.path_, {})) {}
    Scratch& operator=(Scratch&&) = delete;
    std::filesystem::path operator/(std::string_view name) const { return path_ / name; }

  private:
    static constexpr std::string_view kStart = "verify-";

    Scratch() = default;
    std::filesystem::path path_;
};

Result<Verified> judge_record(const VerifyArguments& options, const trust::ShardFile& shard, const std::string& name,
                              const std::filesystem::path& file) {
    Verified verified{.device = name, .description = {}, .crash = {}, .findings = {}};
    LINKCPP_TRY(const trust::Record record, trust::read_record(file));
    LINKCPP_TRY(const trust::ProbeInput input, record.input());
    const auto ours = trust::begin_record(shard, input);
    if (!ours || ours->layer() != record.layer() || ours->manifest.slices != record.manifest.slices) {
        return fail(ErrorKind::invalid, "{}: expected a record of this shard's slices, got one of others",
                    file.string());
    }
    verified.description = fmt::format("{} ({})", record.place.device, record.place.description);
    LINKCPP_TRY(verified.findings,
                trust::judge(shard.layer, shard.read, input, record.rows, {.n_threads = options.n_threads}));
    return verified;
}

// In a process of its own: a driver that dies takes nobody along.
Result<Verified> verify_one(const VerifyArguments& options, StopOnSignal& stop, const trust::ShardFile& shard,
                            std::string_view option, const std::string& device, const std::filesystem::path& out) {
    using namespace std::chrono_literals;
    ProcessOptions process;
    process.arguments = {(executable_dir() / "linkcpp").string(),
                         "probe",
                         "--quiet",
                         "--shard",
                         options.shard,
                         "--layer",
                         std::to_string(shard.layer.layer),
                         std::string(option),
                         device,
                         "--tokens",
                         std::to_string(options.n_tokens),
                         "--seed",
                         std::to_string(options.seed),
                         "-o",
                         out.string()};
    if (options.n_threads != 0) {
        process.arguments.insert(process.arguments.end(), {"--threads", std::to_string(options.n_threads)});
    }
    LINKCPP_TRY(Process child, Process::start(process));
    std::optional<int> status;
    while (!(status = child.poll())) {
        stop.sleep(10ms);
        if (stop.requested()) { return fail(ErrorKind::failed, "stopped"); }
    }
    Verified verified{.device = device, .description = {}, .crash = {}, .findings = {}};
    constexpr int kSignals = 128;
    if (*status > kSignals) {
        verified.crash = fmt::format("the probe was ended by signal {}", *status - kSignals);
    } else if (*status != 0) {
        verified.crash = "the probe failed; it has said why on standard error";
    }
    if (!verified.crash.empty()) { return verified; }
    return judge_record(options, shard, device, out);
}

nlohmann::json to_json(const Verified& verified) {
    nlohmann::json parts = nlohmann::json::object();
    for (const auto& [part, findings] : verified.findings.parts) {
        const auto number = [](double x) { return std::isfinite(x) ? nlohmann::json(x) : nlohmann::json(nullptr); };
        parts[std::string(trust::to_string(part))] = {
            {"rows", findings.n_rows},
            {"wrong", findings.n_wrong},
            {"rounding", {expert::to_string(findings.rounding.input), expert::to_string(findings.rounding.inner)}},
            {"worst_row",
             {{"row", findings.worst_row},
              {"expert", findings.worst_expert},
              {"relative_l2", number(findings.worst.difference.relative_l2)},
              {"relative_max", number(findings.worst.difference.relative_max)}}},
            {"tolerance",
             {{"relative_l2", findings.worst.tolerance.relative_l2},
              {"relative_max", findings.worst.tolerance.relative_max}}}};
    }
    return {{"device", verified.device},
            {"description", verified.description},
            {"may_serve", verified.may_serve()},
            {"why", verified.why()},
            {"parts", std::move(parts)}};
}

void print(const Verified& verified) {
    const std::string_view verdict = verified.may_serve()     ? "may serve"
                                     : verified.crash.empty() ? "MAY NOT SERVE: "
                                                              : "COULD NOT BE PROBED: ";
    fmt::print("{}: {}{}\n", one_line(verified.device), verdict, one_line(verified.why()));
    if (!verified.description.empty()) { fmt::print("  {}\n", one_line(verified.description)); }
    if (verified.findings.parts.empty()) { return; }
    fmt::print("  {:<8} {:>5} {:>6}  {:<16} {:>9} {:>9}   {:>9} {:>9}\n", "PART", "ROWS", "WRONG", "ROUNDS LIKE",
               "WORST L2", "TOLERANCE", "WORST MAX", "TOLERANCE");
    for (const auto& [part, findings] : verified.findings.parts) {
        const std::string rounding = part == trust::Part::sums ? "-" : expert::to_string(findings.rounding);
        fmt::print("  {:<8} {:>5} {:>6}  {:<16} {:>9.2e} {:>9.0e}   {:>9.2e} {:>9.0e}\n", trust::to_string(part),
                   findings.n_rows, findings.n_wrong, rounding, findings.worst.difference.relative_l2,
                   findings.worst.tolerance.relative_l2, findings.worst.difference.relative_max,
                   findings.worst.tolerance.relative_max);
    }
}

Result<std::string> verify(const VerifyArguments& options) {
    LINKCPP_TRY(const trust::ShardFile shard, trust::open_shard(options.shard, options.layer));
    StopOnSignal stop;
    LINKCPP_TRY(const Scratch scratch, Scratch::make());
    std::vector<std::pair<std::string, std::string>> wanted;  // option and value of `linkcpp probe`
    for (const std::string& backend : options.backends) { wanted.emplace_back("--backend", backend); }
    for (const std::string& record : options.records) { wanted.emplace_back("--record", record); }
    if (wanted.empty()) {
        expert::load_backends();
        const auto devices = expert::devices();
        if (options.device == "all") {
            for (const expert::Device& device : devices) { wanted.emplace_back("--device", device.name); }
        } else {
            LINKCPP_TRY(const expert::Device device, expert::choose_device(devices, options.device));
            wanted.emplace_back("--device", device.name);
        }
    }
    nlohmann::json list = nlohmann::json::array();
    std::size_t n_refused = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        const auto& [option, name] = wanted[i];
        auto verified = option == "--record"
                            ? judge_record(options, shard, name, name)
                            : verify_one(options, stop, shard, option, name, scratch / fmt::format("{}.gguf", i));
        // A record that is none, or of something else, is a slip of whoever called this, and no device's fault.
        if (!verified && (stop.requested() || option == "--record")) { return std::unexpected(verified.error()); }
        if (!verified) { verified = Verified{.device = name, .crash = verified.error().message}; }
        n_refused += verified->may_serve() ? 0 : 1;
        if (options.json) {
            list.push_back(to_json(*verified));
        } else {
            print(*verified);
        }
    }
    if (options.json) { print_json(list); }
    if (n_refused == 0) { return ""; }
    return fmt::format("{} of {} may not serve", n_refused, counted(wanted.size(), "device"));
}

}  // namespace

void add_verify(CLI::App& app) {
    auto options = std::make_shared<VerifyArguments>();
    CLI::App* command =
        app.add_subcommand("verify", "Probes this machine's devices against double precision and says which may serve");
    command->add_option("--shard", options->shard, "Slices that `linkcpp slice` has cut, or a whole model")->required();
    command->add_option("--layer", options->layer, "Of a whole model (default: its first with experts)");
    auto* device = command->add_option("--device", options->device, "One device of `linkcpp devices` (default: all)");
    command->add_option("--backend", options->backends, "Devices of these ggml modules, each loaded alone")
        ->excludes(device)
        ->check(CLI::ExistingFile);
    command->add_option("--record", options->records, "Records that `linkcpp probe` has made, here or elsewhere")
        ->excludes(device);
    command->add_option("--tokens", options->n_tokens, "Rows of input (default: 12)")
        ->check(CLI::Range(1u, trust::kMaxProbeTokens));
    command->add_option("--seed", options->seed, "Another seed, another input (default: 1)")->check(is_number());
    command->add_option("--threads", options->n_threads, "Threads (default: all processors)")
        ->check(CLI::Range(1u, kMaxThreads));
    command->add_flag("--json", options->json, "Machine-readable");
    command->footer(
        "Exit status 1 when a device may not serve, 2 when that could not be found out.\n"
        "Example: linkcpp verify --shard part.gguf");
    judge_or_exit(command, [options] { return verify(*options); });
}

}  // namespace linkcpp::cli
