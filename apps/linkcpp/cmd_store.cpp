#include <map>
#include <memory>
#include <mutex>
#include <set>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/progress.h"
#include "base/text.h"
#include "base/units.h"
#include "commands.h"
#include "model/parallel.h"
#include "print_json.h"
#include "store/slice_store.h"
#include "store_folder.h"

namespace linkcpp::cli {
namespace {

struct StoreArguments {
    std::string store;
    std::vector<std::string> keep;
    std::uint64_t limit = 0;
    bool limited = false;
    bool dry_run = false;
    bool json = false;
};

// A folder that is not there is no store: to make it would hide a mistyped name.
Result<store::SliceStore> open_store(const StoreArguments& options) {
    LINKCPP_TRY(const std::filesystem::path folder, store_folder(options.store));
    std::error_code error;
    if (!std::filesystem::is_directory(folder, error)) {
        return fail(ErrorKind::not_found, "{}: there is no store here; name another with --store", folder.string());
    }
    return store::SliceStore::open(folder);
}

struct Sum {
    std::uint64_t slices = 0;
    std::uint64_t bytes = 0;

    void add(std::uint64_t n_bytes) {
        ++slices;
        bytes += n_bytes;
    }
};

nlohmann::json to_json(const Sum& sum) {
    return {{"slices", sum.slices}, {"bytes", sum.bytes}};
}

// What is in a store, and whose.
struct Contents {
    std::vector<store::SliceStore::Entry> entries;
    std::vector<model::Manifest> models;
    std::vector<store::SliceStore::Partial> partials;
    std::map<Digest, std::uint64_t> bytes;  // of each slice

    explicit Contents(const store::SliceStore& store)
        : entries(store.list()), models(store.models()), partials(store.partials()) {
        for (const auto& entry : entries) { bytes[entry.hash] = entry.bytes; }
    }

    Sum all() const {
        Sum sum;
        for (const auto& entry : entries) { sum.add(entry.bytes); }
        return sum;
    }
    Sum of(const model::Manifest& manifest) const {
        Sum sum;
        for (const Digest& hash : slices_of(manifest)) {
            if (const auto found = bytes.find(hash); found != bytes.end()) { sum.add(found->second); }
        }
        return sum;
    }
    static std::set<Digest> slices_of(const model::Manifest& manifest) {
        std::set<Digest> slices;
        for (const auto& layer : manifest.slices) { slices.insert(layer.begin(), layer.end()); }
        return slices;
    }
};

Status list_store(const StoreArguments& options) {
    LINKCPP_TRY(const store::SliceStore store, open_store(options));
    const Contents contents(store);
    std::set<Digest> known;
    nlohmann::json models = nlohmann::json::array();
    if (!options.json) { fmt::print("{:<16} {:<28} {:>15} {:>10}\n", "MODEL", "NAME", "SLICES", "BYTES"); }
    for (const model::Manifest& manifest : contents.models) {
        known.merge(Contents::slices_of(manifest));
        const Sum here = contents.of(manifest);
        const std::string id = manifest.id().hex();
        if (options.json) {
            models.push_back({{"id", id},
                              {"name", manifest.model.name},
                              {"architecture", manifest.model.architecture},
                              {"all_slices", manifest.model.n_slices()},
                              {"slices", here.slices},
                              {"bytes", here.bytes}});
        } else {
            fmt::print("{:<16.16} {:<28.28} {:>15} {:>10}\n", id, one_line(manifest.model.name),
                       fmt::format("{} of {}", here.slices, manifest.model.n_slices()), format_bytes(here.bytes));
        }
    }
    Sum unknown;
    for (const auto& entry : contents.entries) {
        if (!known.contains(entry.hash)) { unknown.add(entry.bytes); }
    }
    Sum begun;
    for (const auto& partial : contents.partials) { begun.add(partial.bytes); }
    if (options.json) {
        print_json(nlohmann::json{{"store", store.dir().string()},
                                  {"models", std::move(models)},
                                  {"unknown", to_json(unknown)},
                                  {"begun", to_json(begun)},
                                  {"all", to_json(contents.all())}});
        return {};
    }
    if (unknown.slices > 0) {
        fmt::print("of no model that is known here: {}, {}\n", counted(unknown.slices, "slice"),
                   format_bytes(unknown.bytes));
    }
    if (begun.slices > 0) {
        fmt::print("begun and not fetched to the end: {}, {}\n", counted(begun.slices, "slice"),
                   format_bytes(begun.bytes));
    }
    const Sum all = contents.all();
    fmt::print("in all {}, {}, in {}\n", counted(all.slices, "slice"), format_bytes(all.bytes), store.dir().string());
    return {};
}

// Errors: not_found, invalid (several begin so).
Result<const model::Manifest*> find_model(const Contents& contents, const std::string& name) {
    const model::Manifest* found = nullptr;
    for (const model::Manifest& manifest : contents.models) {
        const bool by_id = name.size() >= 6 && manifest.id().hex().starts_with(name);
        if (!by_id && manifest.model.name != name) { continue; }
        if (found != nullptr) {
            return fail(ErrorKind::invalid, "--keep {}: there are several; give more of the id", one_line(name));
        }
        found = &manifest;
    }
    if (found == nullptr) {
        return fail(ErrorKind::not_found, "--keep {}: no such model here; `linkcpp store ls` lists them",
                    one_line(name));
    }
    return found;
}

Status collect(const StoreArguments& options) {
    LINKCPP_TRY(const store::SliceStore store, open_store(options));
    const Contents contents(store);
    std::set<Digest> wanted;
    std::vector<const model::Manifest*> forgotten;
    std::set<const model::Manifest*> kept;
    for (const std::string& name : options.keep) {
        LINKCPP_TRY(const model::Manifest* manifest, find_model(contents, name));
        kept.insert(manifest);
    }
    for (const model::Manifest& manifest : contents.models) {
        if (kept.empty() || kept.contains(&manifest)) {
            wanted.merge(Contents::slices_of(manifest));
        } else {
            forgotten.push_back(&manifest);
        }
    }
    std::vector<std::filesystem::path> doomed;
    Sum gone;
    std::uint64_t left = contents.all().bytes;
    for (const auto& entry : contents.entries) {  // those first that were not used for longest
        if (wanted.contains(entry.hash)) { continue; }
        doomed.push_back(entry.path);
        gone.add(entry.bytes);
        left -= entry.bytes;
    }
    for (const auto& entry : contents.entries) {
        if (!options.limited || left <= options.limit) { break; }
        if (!wanted.contains(entry.hash)) { continue; }
        doomed.push_back(entry.path);
        gone.add(entry.bytes);
        left -= entry.bytes;
    }
    Sum begun;
    for (const auto& partial : contents.partials) {
        if (partial.in_use) { continue; }
        doomed.push_back(partial.path);
        begun.add(partial.bytes);
    }
    for (const model::Manifest* manifest : forgotten) { doomed.push_back(store.manifest_path(manifest->id())); }
    if (!options.dry_run) {
        for (const auto& path : doomed) {
            std::error_code error;
            std::filesystem::remove(path, error);
            if (error) { return fail_errno(error.value(), path.string()); }
        }
    }
    if (options.json) {
        print_json(nlohmann::json{{"dry_run", options.dry_run},
                                  {"deleted", to_json(gone)},
                                  {"begun", to_json(begun)},
                                  {"models", forgotten.size()},
                                  {"left_bytes", left}});
    } else {
        fmt::print("{} {}, {}, and {} that had been begun, {}; {} left\n", options.dry_run ? "would delete" : "deleted",
                   counted(gone.slices, "slice"), format_bytes(gone.bytes), begun.slices, format_bytes(begun.bytes),
                   format_bytes(left));
    }
    return {};
}

Result<std::string> verify_store(const StoreArguments& options) {
    LINKCPP_TRY(const store::SliceStore store, open_store(options));
    const Contents contents(store);
    const Sum all = contents.all();
    std::mutex mutex;  // guards damaged
    std::vector<std::string> damaged;
    Progress progress("verifying", all.bytes);
    LINKCPP_CHECK(model::for_all(contents.entries.size(), 0, progress, [&](std::size_t i) -> Result<std::uint64_t> {
        const auto& entry = contents.entries[i];
        const auto good = store.verify(entry);
        if (!good && good.error().kind != ErrorKind::not_found) { return std::unexpected(good.error()); }
        if (good && !*good) {
            const std::lock_guard lock(mutex);
            damaged.push_back(entry.hash.hex());
        }
        return entry.bytes;
    }));
    if (options.json) {
        print_json(nlohmann::json{{"slices", all.slices}, {"bytes", all.bytes}, {"damaged", damaged}});
    } else {
        fmt::print("{}, {}: {}\n", counted(all.slices, "slice"), format_bytes(all.bytes),
                   damaged.empty() ? "all have the bytes that their names say" : "see below");
    }
    if (damaged.empty()) { return ""; }
    return fmt::format("{} did not have the bytes that its name says, and was deleted: a worker fetches it again",
                       counted(damaged.size(), "slice"));
}

void add_store_options(CLI::App* command, StoreArguments& options) {
    command->add_option("--store", options.store, "The store (default: that of this user's workers)");
    command->add_flag("--json", options.json, "Machine-readable");
}

}  // namespace

void add_store(CLI::App& app) {
    CLI::App* group =
        app.add_subcommand("store", "The slices on this machine's disk: what is there, and whether it is whole");
    group->require_subcommand(1);
    group->footer(
        "Workers may run meanwhile: what they lack they fetch again.\n"
        "Example: linkcpp store ls\n"
        "Example: linkcpp store gc --limit 50G\n"
        "Example: linkcpp store verify --store /mnt/slices");

    auto options = std::make_shared<StoreArguments>();
    CLI::App* command = group->add_subcommand("ls", "Lists models and how much of each is there");
    add_store_options(command, *options);
    run_or_exit(command, [options] { return list_store(*options); });

    options = std::make_shared<StoreArguments>();
    command = group->add_subcommand(
        "gc", "Deletes what is of no use: slices of no known model, fetches that nobody goes on with");
    command->add_option("--keep", options->keep,
                        "Of the models only this one, by its name or id; may be given more than once");
    auto* limit = command
                      ->add_option("--limit", options->limit,
                                   "Then also those slices that were not used for longest, until the others are no "
                                   "more than that, such as 50G")
                      ->transform(is_size(0, UINT64_MAX))
                      ->type_name("SIZE");
    command->add_flag("--dry-run", options->dry_run, "Only say what would be deleted");
    add_store_options(command, *options);
    run_or_exit(command, [options, limit] {
        options->limited = limit->count() > 0;
        return collect(*options);
    });

    options = std::make_shared<StoreArguments>();
    command = group->add_subcommand("verify",
                                    "Reads every slice and deletes those that are damaged; status 1 if there were any");
    add_store_options(command, *options);
    judge_or_exit(command, [options] { return verify_store(*options); });
}

}  // namespace linkcpp::cli
