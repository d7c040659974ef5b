#include <filesystem>
#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "commands.h"
#include "print_json.h"
#include "trust/compare.h"

namespace linkcpp::cli {
namespace {

using trust::Part;

struct CompareArguments {
    std::vector<std::string> files;
    bool json = false;
    bool markdown = false;
};

struct Entry {
    std::string label;
    trust::Record record;
};

struct PairOf {
    const Entry* a;
    const Entry* b;
    trust::Comparison comparison;
};

// What the matrix shows: the vectors that a swarm adds up, or, of a layer whose activation is unknown, its last
// product.
Part headline(const trust::Comparison& comparison) {
    return comparison.parts.contains(Part::sums) ? Part::sums : comparison.parts.rbegin()->first;
}

nlohmann::json figures(const expert::Difference& difference) {
    // NaN and infinity are no JSON.
    const auto number = [](double x) { return std::isfinite(x) ? nlohmann::json(x) : nlohmann::json(nullptr); };
    return {{"cosine", number(difference.cosine)},   {"relative_l2", number(difference.relative_l2)},
            {"max_abs", number(difference.max_abs)}, {"relative_max", number(difference.relative_max)},
            {"nmse", number(difference.nmse)},       {"finite", difference.finite},
            {"identical", difference.identical}};
}

nlohmann::json to_json(const PairOf& pair) {
    nlohmann::json parts = nlohmann::json::object();
    for (const auto& [part, result] : pair.comparison.parts) {
        nlohmann::json entry = figures(result.all);
        entry["verdict"] = trust::to_string(result.verdict);
        entry["worst_row"] = figures(result.worst);
        entry["worst_row"]["row"] = result.worst_row;
        entry["tolerance"] = {{"relative_l2", result.tolerance.relative_l2},
                              {"relative_max", result.tolerance.relative_max}};
        parts[std::string(trust::to_string(part))] = std::move(entry);
    }
    return {{"a", pair.a->label},
            {"b", pair.b->label},
            {"verdict", trust::to_string(pair.comparison.verdict)},
            {"decisive", trust::to_string(pair.comparison.decisive)},
            {"parts", std::move(parts)}};
}

nlohmann::json to_json(const Entry& entry) {
    const trust::Place& place = entry.record.place;
    nlohmann::json roundings = nlohmann::json::object();
    for (const auto& [part, rounding] : entry.record.roundings) {
        roundings[std::string(trust::to_string(part))] = {expert::to_string(rounding.input),
                                                          expert::to_string(rounding.inner)};
    }
    return {{"label", entry.label},
            {"device", place.device},
            {"description", place.description},
            {"backend", place.backend},
            {"machine", place.machine},
            {"ggml_version", place.ggml_version},
            {"ggml_commit", place.ggml_commit},
            {"release", place.release},
            {"driver", place.driver},
            {"features", place.features},
            {"roundings", std::move(roundings)}};
}

// The tolerance and the worst row of the part that decides.
std::string decided_by(const trust::Comparison& comparison) {
    const trust::PartComparison& part = comparison.parts.at(comparison.decisive);
    if (!part.worst.finite) { return fmt::format("{}: not finite", trust::to_string(comparison.decisive)); }
    return fmt::format("{}: {:.1e} ({:.0e}), {:.1e} ({:.0e})", trust::to_string(comparison.decisive),
                       part.worst.relative_l2, part.tolerance.relative_l2, part.worst.relative_max,
                       part.tolerance.relative_max);
}

void print_pairs(const std::vector<PairOf>& pairs, bool markdown, std::size_t width) {
    if (markdown) {
        fmt::print(
            "| a | b | sums: cosine | relative L2 | max abs difference | NMSE | verdict | nearest to its tolerance "
            "|\n");
        fmt::print("|---|---|---|---|---|---|---|---|\n");
    } else {
        fmt::print("{:<{}}  {:<{}}  {:>13} {:>9} {:>9} {:>9}  {:<13} {}\n", "A", width, "B", width, "SUMS: COSINE",
                   "REL L2", "MAX ABS", "NMSE", "VERDICT", "NEAREST TO ITS TOLERANCE");
    }
    for (const PairOf& pair : pairs) {
        const expert::Difference& all = pair.comparison.parts.at(headline(pair.comparison)).all;
        const std::string_view verdict = trust::to_string(pair.comparison.verdict);
        const std::string decided = decided_by(pair.comparison);
        if (markdown) {
            fmt::print("| {} | {} | {:.10f} | {:.2e} | {:.2e} | {:.2e} | {} | {} |\n", pair.a->label, pair.b->label,
                       all.cosine, all.relative_l2, all.max_abs, all.nmse, verdict, decided);
        } else {
            fmt::print("{:<{}}  {:<{}}  {:>13.10f} {:>9.2e} {:>9.2e} {:>9.2e}  {:<13} {}\n", pair.a->label, width,
                       pair.b->label, width, all.cosine, all.relative_l2, all.max_abs, all.nmse, verdict, decided);
        }
    }
}

void print_entries(const std::vector<Entry>& entries, bool markdown, std::size_t width) {
    if (markdown) {
        fmt::print("\n| | device | machine | rounds rows like |\n|---|---|---|---|\n");
    } else {
        fmt::print("\n");
    }
    for (const Entry& entry : entries) {
        const trust::Place& place = entry.record.place;
        const auto batch = entry.record.roundings.find(Part::batch);
        const std::string roundings =
            batch == entry.record.roundings.end() ? "nothing known" : expert::to_string(batch->second);
        const std::string device = one_line(fmt::format("{} ({})", place.device, place.description));
        if (markdown) {
            fmt::print("| {} | {} | {} | {} |\n", entry.label, device, one_line(place.machine), roundings);
        } else {
            fmt::print("{:<{}}  {}, {}, rounds rows like {}\n", entry.label, width, device, one_line(place.machine),
                       roundings);
        }
    }
}

// Empty when no two are different.
std::string verdict_of(const std::vector<PairOf>& pairs) {
    const auto n = std::ranges::count(pairs, trust::Verdict::different,
                                      [](const PairOf& pair) { return pair.comparison.verdict; });
    if (n == 0) { return {}; }
    return fmt::format("{} of {} different", n, counted(pairs.size(), "pair"));
}

Result<std::string> compare(const CompareArguments& options) {
    std::vector<Entry> entries;
    const auto stem_of = [](const std::string& file) { return std::filesystem::path(file).stem().string(); };
    for (const std::string& file : options.files) {
        LINKCPP_TRY(trust::Record record, trust::read_record(file));
        const bool unique = std::ranges::count(options.files, stem_of(file), stem_of) == 1;
        entries.push_back({one_line(unique ? stem_of(file) : file), std::move(record)});
    }
    std::vector<PairOf> pairs;
    for (std::size_t i = 0; i < entries.size(); ++i) {
        for (std::size_t j = i + 1; j < entries.size(); ++j) {
            auto comparison = trust::compare(entries[i].record, entries[j].record);
            if (!comparison) {
                return fail_with(fmt::format("{} and {}", options.files[i], options.files[j]), comparison.error());
            }
            pairs.push_back({&entries[i], &entries[j], *std::move(comparison)});
        }
    }
    if (options.json) {
        nlohmann::json out = {{"records", nlohmann::json::array()}, {"pairs", nlohmann::json::array()}};
        for (const Entry& entry : entries) { out["records"].push_back(to_json(entry)); }
        for (const PairOf& pair : pairs) { out["pairs"].push_back(to_json(pair)); }
        print_json(out);
        return verdict_of(pairs);
    }
    std::size_t width = 1;
    for (const Entry& entry : entries) { width = std::max(width, entry.label.size()); }
    print_pairs(pairs, options.markdown, width);
    print_entries(entries, options.markdown, width);
    return verdict_of(pairs);
}

}  // namespace

void add_compare(CLI::App& app) {
    auto options = std::make_shared<CompareArguments>();
    CLI::App* command =
        app.add_subcommand("compare", "Compares records of `linkcpp probe`, each with each, also of other machines");
    command->add_option("RECORD", options->files, "Records of one probe: the same slices, seed and tokens")
        ->required()
        ->expected(2, 64)
        ->type_name("FILE...");
    auto* json = command->add_flag("--json", options->json, "Machine-readable, with every part");
    command->add_flag("--markdown", options->markdown, "As tables of Markdown")->excludes(json);
    command->footer(
        "Exit status 1 when two are different, 2 when they cannot be compared. Each of two may be off by its "
        "tolerance, so their difference has more "
        "room\n"
        "than `linkcpp verify` gives to one.\n"
        "The figures are of all weighted sums as one vector; the verdict is about every row of every part, of which "
        "the\n"
        "last column shows the one nearest to its tolerance: relative L2 (tolerance), largest difference in units of "
        "the\n"
        "row's root mean square (tolerance).\n"
        "Example: linkcpp compare truth.gguf cpu.gguf phone.gguf");
    judge_or_exit(command, [options] { return compare(*options); });
}

}  // namespace linkcpp::cli
