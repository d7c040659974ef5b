#include <array>
#include <memory>

#include <openssl/evp.h>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "base/units.h"
#include "commands.h"
#include "hub_file.h"
#include "hub_status.h"
#include "print_json.h"

namespace linkcpp::cli {
namespace {

using nlohmann::json;

struct StatusArguments {
    std::string hub;
    bool json = false;
};

double tokens_per_second(const json& worker, std::uint64_t n_layers) {
    const double busy = worker["busy_us"].get<double>() / 1e6;
    return busy > 0 && n_layers > 0 ? worker["rows"].get<double>() / static_cast<double>(n_layers) / busy : 0;
}

// Layers that linkcpp does not recognise: what somebody who teaches it needs to know.
void print_unknown(const json& layers) {
    if (layers.empty()) { return; }
    fmt::print("\n{} layers were computed one product at a time, right and slow. Their nodes, as a program had them:\n",
               layers.size());
    std::string previous;
    for (const json& layer : layers) {
        const auto nodes = layer["nodes"].get<std::string>();
        fmt::print("  {:>5}  {}\n", layer["layer"].get<std::uint64_t>(), nodes == previous ? "the same" : nodes);
        previous = nodes;
    }
}

// What is known of a worker's numbers.
void print_trust(const json& worker) {
    if (!worker.contains("trust")) { return; }  // it has not joined since the hub was started
    const json& trust = worker["trust"];
    if (trust["state"] == "admitted") {
        const json& off = trust["worst_row"]["relative_l2"];
        fmt::print(
            "    admitted {}: {} passed, rounds like {}; of the last, nearest to its tolerance: {} off by {} ({:.0e}); "
            "{} audited\n",
            trust["since"].get<std::string>(), counted(trust["probes"].get<std::uint64_t>(), "probe"),
            trust["rounding"].get<std::string>(), trust["worst_row"]["part"].get<std::string>(),
            off.is_null() ? "what is no number: the model's own are none there"
                          : fmt::format("{:.1e}", off.get<double>()),
            trust["worst_row"]["tolerance"].get<double>(),
            counted(worker["audits"]["pairs"].get<std::uint64_t>(), "result"));
    } else if (trust["state"] == "unproven" && !trust["why"].get<std::string>().empty()) {
        fmt::print("    not admitted: {}\n", trust["why"].get<std::string>());
    }
}

void print_quarantine(const json& workers) {
    for (const json& worker : workers) {
        const auto text = [&](const char* key) { return worker[key].is_null() ? "" : worker[key].get<std::string>(); };
        fmt::print("\nquarantine {} ({:.12}) since {}: {}\n", text("name"), text("id"), text("since"), text("why"));
        fmt::print("    its work {}; `linkcpp clear {:.12}` lets it be probed and serve again\n",
                   worker["in_doubt_since"].is_null() ? "was never used"
                                                      : fmt::format("since {} is in doubt", text("in_doubt_since")),
                   text("id"));
    }
}

// {"dead": 2, "hung": 0} → "dead 2x"
std::string counts(const json& numbers) {
    std::string text;
    for (const auto& [name, n] : numbers.items()) {
        if (n.get<std::uint64_t>() == 0) { continue; }
        text += fmt::format("{}{} {}x", text.empty() ? "" : ", ", name, n.get<std::uint64_t>());
    }
    return text;
}

// Of a worker or a program.
void print_turned_away(const json& peer) {
    if (const json& numbers = peer["turned_away"]; !numbers.empty()) {
        fmt::print("    turned away: {}\n", counts(numbers));
    }
}

// How long a program waits for workers, and what it has made of each that was ever at fault.
void print_links(const json& coordinator) {
    const json& twice = coordinator["twice"];
    if (twice["requests"].get<std::uint64_t>() > 0) {
        fmt::print("    {} were late and given to another worker, too; it was first {} times\n",
                   counted(twice["requests"].get<std::uint64_t>(), "request"),
                   twice["other_first"].get<std::uint64_t>());
    }
    for (const json& link : coordinator["links"]) {
        const std::string faults = counts(link["faults"]);
        if (faults.empty() && link["condition"] == "good") { continue; }
        auto name = link["name"].get<std::string>();
        if (name.empty()) { name = link["worker"].get<std::string>(); }
        fmt::print("    worker {:.16}: {}{}{}\n", name, link["condition"].get<std::string>(),
                   faults.empty() ? "" : "; ", faults);
    }
    if (const json& patience = coordinator["patience"]; patience.is_object()) {
        fmt::print(
            "    hung after {} s without a sign of life, stuck after {} s without an answer, late by {} s or more\n",
            patience["hang_s"].get<double>(), patience["stuck_s"].get<double>(), patience["late_s"].get<double>());
    }
}

// How far a worker is: into its memory, and what it has to fetch for that.
void print_loading(const json& loading) {
    const auto number = [&](const char* key) { return loading[key].get<std::uint64_t>(); };
    const std::uint64_t total = number("total_bytes");
    if (total == 0) { return; }
    const auto percent = [](std::uint64_t done, std::uint64_t of) {
        return 100 * static_cast<double>(done) / static_cast<double>(of);
    };
    fmt::print("    loading {} of {} ({:.0f} %)", format_bytes(number("done_bytes")), format_bytes(total),
               percent(number("done_bytes"), total));
    if (const std::uint64_t fetch = number("fetch_bytes"); fetch > 0) {
        fmt::print("; fetched {} of {}, {}/s", format_bytes(number("fetched_bytes")), format_bytes(fetch),
                   format_bytes(number("bytes_per_second")));
        if (const json& left = loading["seconds_left"]; left.is_number()) {
            fmt::print(", {:.0f} s left", left.get<double>());
        }
    }
    fmt::print("\n");
}

// The last few; --json has more.
void print_events(const json& events) {
    constexpr std::size_t kMost = 8;
    if (events.empty()) { return; }
    fmt::print("\nevents\n");
    for (std::size_t i = events.size() - std::min(kMost, events.size()); i < events.size(); ++i) {
        const json& event = events[i];
        const auto by = event["by"].get<std::string>();
        fmt::print("  {}  {}: {}{}\n", event["time"].get<std::string>(), event["worker"].get<std::string>(),
                   event["text"].get<std::string>(), by == "hub" ? "" : fmt::format(" ({})", by));
    }
}

void print_status(const json& status) {
    const json& model = status["model"];
    const json& coverage = status["coverage"];
    const auto n_layers = model["moe_layers"].get<std::uint64_t>();
    fmt::print("model     {} ({}), {} with experts, {} slices, {}\n", model["name"].get<std::string>(),
               model["architecture"].get<std::string>(), counted(n_layers, "layer"),
               model["slices"].get<std::uint64_t>(), format_bytes(model["expert_bytes"].get<std::uint64_t>()));
    fmt::print("coverage  {:.1f} % of the slices have a live holder, {} missing, {} wanted of each\n\n",
               100 * coverage["share"].get<double>(), coverage["missing_slices"].get<std::uint64_t>(),
               coverage["replicas"].get<std::uint64_t>());
    fmt::print("{:<16} {:<10} {:>7} {:>9} {:>12} {:>9}  {}\n", "WORKER", "STATE", "SLICES", "BYTES", "PAIRS",
               "TOKENS/S", "DEVICE");
    for (const json& worker : status["workers"]) {
        fmt::print("{:<16} {:<10} {:>7} {:>9} {:>12} {:>9.0f}  {}\n", worker["name"].get<std::string>(),
                   worker["state"].get<std::string>(), worker["slices"].get<std::uint64_t>(),
                   format_bytes(worker["bytes"].get<std::uint64_t>()), worker["pairs"].get<std::uint64_t>(),
                   tokens_per_second(worker, n_layers), worker["device"].get<std::string>());
        if (worker["state"] == "loading") { print_loading(worker["loading"]); }
        print_trust(worker);
        if (const auto error = worker["error"].get<std::string>(); !error.empty()) {
            fmt::print("    {}\n", one_line(error));
        }
        print_turned_away(worker);
    }
    for (const json& coordinator : status["coordinators"]) {
        fmt::print("\ncoordinator {}: {} expert blocks, {} pairs ({} computed by itself), {} sent again, {} failures\n",
                   coordinator["process"].get<std::string>(), coordinator["layers"].get<std::uint64_t>(),
                   coordinator["pairs"].get<std::uint64_t>(), coordinator["local_pairs"].get<std::uint64_t>(),
                   coordinator["retries"].get<std::uint64_t>(), coordinator["failures"].get<std::uint64_t>());
        if (const auto unchecked = coordinator["audits"]["unchecked"].get<std::uint64_t>(); unchecked > 0) {
            fmt::print(
                "    {} drawn for an audit could not be checked: nobody else computes them, and the hub was away\n",
                counted(unchecked, "pair"));
        }
        if (const auto products = coordinator["products"].get<std::uint64_t>(); products > 0) {
            fmt::print(
                "    {} of these blocks were single products: see below, or a program that looks at every node\n",
                products);
        }
        print_links(coordinator);
        print_turned_away(coordinator);
    }
    print_quarantine(status["quarantine"]);
    print_unknown(status["unknown_layers"]);
    for (const json& member : status["revoked"]) {
        fmt::print("\nrevoked   {} ({:.12}); `linkcpp revoke --undo {:.12}` lets it in again\n",
                   one_line(member["name"].get<std::string>()), member["id"].get<std::string>(),
                   member["id"].get<std::string>());
    }
    if (const json& refused = status["refused"]; !refused.empty()) { fmt::print("\nrefused   {}\n", counts(refused)); }
    print_events(status["events"]);
}

// As curl --pinnedpubkey wants it.
std::string pin_of(const Digest& fingerprint) {
    std::array<unsigned char, 64> text{};
    EVP_EncodeBlock(text.data(), reinterpret_cast<const unsigned char*>(fingerprint.bytes.data()),
                    static_cast<int>(fingerprint.bytes.size()));
    return fmt::format("sha256//{}", reinterpret_cast<const char*>(text.data()));
}

Status show(const StatusArguments& options) {
    LINKCPP_CHECK(hide_join_line(options.hub));
    LINKCPP_TRY(const net::JoinLine hub, find_hub(options.hub));
    LINKCPP_TRY(json status, fetch_status(hub));
    if (options.json) {
        status["https"] = {{"url", fmt::format("https://{}:{}", hub.hub.host, hub.https_port)},
                           {"pinned_public_key", pin_of(hub.fingerprint)}};
        print_json(status);
    } else {
        print_status(status);
        fmt::print("\nhttps     https://{}:{}/status, key {}\n", hub.hub.host, hub.https_port, pin_of(hub.fingerprint));
    }
    return {};
}

}  // namespace

void add_status(CLI::App& app) {
    auto options = std::make_shared<StatusArguments>();
    CLI::App* command = app.add_subcommand("status", "Shows a swarm: model, coverage, workers, coordinators");
    command->add_option("HUB", options->hub,
                        "Its join line, or @FILE (default: $LINKCPP_HUB, or the hub on this machine)");
    command->add_flag("--json", options->json, "Machine-readable");
    command->footer(
        "TOKENS/S is what a worker would do if it computed all the time, for its share of the experts.\n"
        "Example: linkcpp status --json");
    run_or_exit(command, [options] { return show(*options); });
}

}  // namespace linkcpp::cli
