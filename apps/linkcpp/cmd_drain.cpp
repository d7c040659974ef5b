#include <memory>
#include <thread>

#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"
#include "base/units.h"
#include "commands.h"
#include "hub_operator.h"
#include "hub_status.h"
#include "print_json.h"

namespace linkcpp::cli {
namespace {

using namespace std::chrono_literals;

struct DrainArguments {
    std::string worker;
    std::string hub;
    bool back = false;
    bool no_wait = false;
    bool json = false;
};

// Waits until the worker has nothing left. Errors: not_found (it has gone), failed (others have no room for the rest).
Status await_empty(store::HttpsClient& hub, const std::string& id, const std::string& name) {
    constexpr Duration kSayEvery = 2s;
    constexpr Duration kStalled = 25s;  // a worker that could not load is asked again within 20 s
    TimePoint next_line = steady_now() + kSayEvery;
    TimePoint progressed = steady_now();
    std::uint64_t least = ~0ull;
    while (true) {
        LINKCPP_TRY(const nlohmann::json status, fetch_status(hub));
        std::uint64_t left = 0;
        bool found = false;
        bool others = false;
        bool others_busy = false;
        bool others_out = false;
        for (const auto& worker : status["workers"]) {
            const auto state = worker["state"].get<std::string>();
            others =
                others || (worker["id"] != id && state != "quarantined" && state != "draining" && state != "drained");
            others_out = others_out || (worker["id"] != id && (state == "draining" || state == "drained"));
            others_busy = others_busy || state == "loading" || state == "probing" || state == "waiting";
            if (worker["id"] != id || (state != "draining" && state != "drained")) { continue; }
            found = true;
            left = worker["assigned_slices"].get<std::uint64_t>();
        }
        if (!found) { return fail(ErrorKind::not_found, "worker {} has gone, or is not to be drained any more", name); }
        if (left == 0) { return {}; }
        const TimePoint now = steady_now();
        if (left < least || others_busy) { progressed = now; }
        least = std::min(least, left);
        if (!others || now - progressed > kStalled) {
            return fail(ErrorKind::failed,
                        "{} still holds {} that no other worker has room for; add workers or give them more memory "
                        "(join --memory){}. It keeps these and gets no others; `linkcpp drain --back {}` ends that",
                        name, counted(left, "slice"),
                        others_out ? ", or take others back that are drained, too (linkcpp drain --back)" : "", name);
        }
        if (now >= next_line) {
            log_info("{} still holds {} that {}", name, counted(left, "slice"),
                     others_busy ? "others are loading" : "no other worker has taken yet");
            next_line = now + kSayEvery;
        }
        std::this_thread::sleep_for(100ms);
    }
}

Status drain(const DrainArguments& options) {
    LINKCPP_TRY(const HubOperator who, find_operator(options.hub));
    const store::HttpsClient::Arguments worker{{"worker", options.worker}};
    LINKCPP_TRY(const std::string text,
                options.back ? who.client->remove("/drain", worker) : who.client->put("/drain", worker));
    LINKCPP_TRY(const nlohmann::json answer, parse_answer(text));
    const auto name = answer["worker"].get<std::string>();
    if (!options.back && !options.no_wait) {
        LINKCPP_CHECK(await_empty(*who.client, answer["id"].get<std::string>(), name));
    }
    const char* state = options.back ? "filled" : options.no_wait ? "draining" : "drained";
    if (options.json) {
        print_json(nlohmann::json{{"worker", name}, {"state", state}});
    } else if (options.back) {
        fmt::print("{} gets slices again\n", one_line(name));
    } else if (options.no_wait) {
        fmt::print("{} gives its slices to others; `linkcpp status` says when it is drained\n", one_line(name));
    } else {
        fmt::print("{} holds nothing any more and can be stopped\n", one_line(name));
    }
    return {};
}

}  // namespace

void add_drain(CLI::App& app) {
    auto options = std::make_shared<DrainArguments>();
    CLI::App* command =
        app.add_subcommand("drain", "Empties a worker, so that it can be stopped without anybody noticing");
    add_worker_argument(command, options->worker);
    add_operator_options(command, options->hub, options->json);
    command->add_flag("--back", options->back, "Let it have slices again");
    command->add_flag("--no-wait", options->no_wait, "Do not wait until others hold what it held");
    command->footer(
        "What nobody else has it keeps, and goes on computing, until another worker has loaded it.\n"
        "Runs where the hub does, as the same user: a join line does not allow it.\n"
        "Example: linkcpp drain laptop");
    run_or_exit(command, [options] { return drain(*options); });
}

}  // namespace linkcpp::cli
