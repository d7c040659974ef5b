#include <memory>

#include <nlohmann/json.hpp>

#include "base/text.h"
#include "base/units.h"
#include "commands.h"
#include "hub_operator.h"
#include "net/join_line.h"
#include "print_json.h"

namespace linkcpp::cli {
namespace {

using nlohmann::json;

struct TokenArguments {
    std::string name;
    std::string hub;
    std::string admits = "workers";
    std::string lifetime;
    bool lines = false;
    bool members = false;
    bool undo = false;
    bool json = false;
};

Result<std::string> change(const TokenArguments& options, bool put, const std::string& path,
                           const store::HttpsClient::Arguments& arguments) {
    LINKCPP_TRY(const HubOperator who, find_operator(options.hub));
    return put ? who.client->put(path, arguments) : who.client->remove(path, arguments);
}

std::string text_of(const json& value, const char* none) {
    return value.is_null() ? none : one_line(value.get<std::string>());
}

void print_line(const json& token) {
    const auto admits = token["for"].get<std::string>();
    fmt::print("{} lets in {}{}:\n\n", one_line(token["name"].get<std::string>()),
               admits == "all" ? "workers and programs" : admits,
               token["ends"].is_null() ? "" : fmt::format(" until {}", text_of(token["ends"], "")));
    const auto line = token["line"].get<std::string>();
    if (admits != "programs") { fmt::print("  linkcpp join '{}'\n", line); }
    if (admits != "workers") { fmt::print("  linkcpp exec --hub '{}' -- PROGRAM …\n", line); }
    fmt::print("\n");
    if (const auto parsed = net::parse_join_line(line); parsed && net::is_loopback(parsed->hub.host)) {
        fmt::print("On this machine only: the hub listens on {}; `linkcpp serve --lan` lets other machines in.\n",
                   parsed->hub.host);
    }
}

Status list(const TokenArguments& options) {
    LINKCPP_TRY(const std::string text, change(options, true, "/tokens", {}));
    LINKCPP_TRY(json all, parse_answer(text));
    if (!options.lines) {
        for (json& token : all["tokens"]) { token.erase("line"); }
    }
    if (options.json) {
        print_json(all);
        return {};
    }
    fmt::print("{:<20} {:<9} {:>8}  {:<20}  {}\n", "TOKEN", "FOR", "MEMBERS", "MADE", "ENDS");
    for (const json& token : all["tokens"]) {
        fmt::print("{:<20} {:<9} {:>8}  {:<20}  {}{}\n", one_line(token["name"].get<std::string>()),
                   token["for"].get<std::string>(), token["members"].get<std::uint64_t>(), text_of(token["made"], "-"),
                   text_of(token["ends"], "never"), token["ended"].get<bool>() ? " (has ended)" : "");
        if (options.lines) { fmt::print("  {}\n", token["line"].get<std::string>()); }
    }
    for (const json& member : all["revoked"]) {
        fmt::print("revoked: {} ({:.12})\n", one_line(member["name"].get<std::string>()),
                   member["key"].get<std::string>());
    }
    return {};
}

Status make(const TokenArguments& options) {
    std::uint64_t seconds = 0;
    if (!options.lifetime.empty()) {
        auto parsed_lifetime = parse_seconds(options.lifetime);
        if (!parsed_lifetime) { return fail_with("--ends-in", parsed_lifetime.error()); }
        seconds = *parsed_lifetime;
    }
    LINKCPP_TRY(const std::string text,
                change(options, true, "/token",
                       {{"name", options.name}, {"for", options.admits}, {"seconds", std::to_string(seconds)}}));
    LINKCPP_TRY(const json token, parse_answer(text));
    if (options.json) {
        print_json(token);
    } else {
        print_line(token);
    }
    return {};
}

Status rotate(const TokenArguments& options) {
    LINKCPP_TRY(const std::string text, change(options, true, "/token/secret", {{"name", options.name}}));
    LINKCPP_TRY(const json token, parse_answer(text));
    if (options.json) {
        print_json(token);
    } else {
        fmt::print("the old line lets nobody in any more; who is in stays in\n");
        print_line(token);
    }
    return {};
}

Status revoke_token(const TokenArguments& options) {
    LINKCPP_TRY(const std::string text, change(options, false, "/token",
                                               {{"name", options.name}, {"members", options.members ? "yes" : "no"}}));
    LINKCPP_TRY(const json done, parse_answer(text));
    if (options.json) {
        print_json(done);
    } else {
        const auto n = done["revoked_members"].get<std::uint64_t>();
        fmt::print("{} lets nobody in any more{}\n", one_line(options.name),
                   options.members ? fmt::format("; {} that came in with it are out", n)
                                   : "; who came in with it stays in (--members, linkcpp revoke)");
    }
    return {};
}

Status revoke(const TokenArguments& options) {
    LINKCPP_TRY(const std::string name, change(options, options.undo, "/member", {{"member", options.name}}));
    if (options.json) {
        print_json(json{{options.undo ? "restored" : "revoked", name}});
    } else {
        fmt::print("{} {}\n", one_line(name),
                   options.undo ? "may come in again" : "is out, and its key opens nothing any more");
    }
    return {};
}

}  // namespace

void add_token(CLI::App& app) {
    CLI::App* group = app.add_subcommand("token", "Join lines: lists, makes, renews and revokes what lets others in");
    group->require_subcommand(1);
    group->footer(
        "Runs where the hub does, as the same user. Nothing stops meanwhile: who is in stays in, by its own key.\n"
        "Example: linkcpp token new friend --ends-in 24h\n"
        "Example: linkcpp token new laptop --for programs\n"
        "Example: linkcpp token rotate workers");

    auto options = std::make_shared<TokenArguments>();
    CLI::App* command = group->add_subcommand("list", "Shows the tokens, and the keys that were revoked");
    command->add_flag("--lines", options->lines, "With the join lines, which are secrets");
    add_operator_options(command, options->hub, options->json);
    run_or_exit(command, [options] { return list(*options); });

    options = std::make_shared<TokenArguments>();
    command = group->add_subcommand("new", "Makes a token and prints its join line");
    command->add_option("NAME", options->name, "What you call it")->required();
    command
        ->add_option("--for", options->admits,
                     "workers (linkcpp join), programs (linkcpp exec on another machine; they see what is computed "
                     "and can accuse workers), or all")
        ->check(CLI::IsMember({"workers", "programs", "all"}))
        ->capture_default_str();
    command->add_option("--ends-in", options->lifetime, "When it ends, such as 30m, 24h or 7d (default: never)");
    add_operator_options(command, options->hub, options->json);
    run_or_exit(command, [options] { return make(*options); });

    options = std::make_shared<TokenArguments>();
    command = group->add_subcommand("rotate", "Gives a token a new secret; the old join line lets nobody in any more");
    command->add_option("NAME", options->name, "Its name; the one that `linkcpp serve` prints is `workers`")
        ->required();
    add_operator_options(command, options->hub, options->json);
    run_or_exit(command, [options] { return rotate(*options); });

    options = std::make_shared<TokenArguments>();
    command = group->add_subcommand("revoke", "Removes a token");
    command->add_option("NAME", options->name, "Its name")->required();
    command->add_flag("--members", options->members, "Those who came in with it, too");
    add_operator_options(command, options->hub, options->json);
    run_or_exit(command, [options] { return revoke_token(*options); });
}

void add_revoke(CLI::App& app) {
    auto options = std::make_shared<TokenArguments>();
    CLI::App* command = app.add_subcommand("revoke", "Shuts one worker or program out: its key opens nothing any more");
    command
        ->add_option("MEMBER", options->name,
                     "Its name, its key, or at least six digits of that (`linkcpp status --json`)")
        ->required();
    command->add_flag("--undo", options->undo, "Let it come in again");
    add_operator_options(command, options->hub, options->json);
    command->footer(
        "Runs where the hub does, as the same user.\n"
        "Example: linkcpp revoke laptop");
    run_or_exit(command, [options] { return revoke(*options); });
}

}  // namespace linkcpp::cli
