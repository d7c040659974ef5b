// linkcpp: one Mixture-of-Experts model, served by whatever hardware shows up.

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "base/platform.h"
#include "base/text.h"
#include "base/units.h"
#include "commands.h"

namespace linkcpp::cli {

namespace {

// No exception where standard error is closed.
void print_error(std::string_view message) {
    std::fprintf(stderr, "linkcpp: error: %s\n", one_line(message).c_str());
}

// What was printed is where it belongs.
void end_output() {
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) { exit_with(1, "the output could not be written"); }
}

}  // namespace

void exit_with(int status, std::string_view error) {
    print_error(error);
    throw CLI::RuntimeError(status);
}

CLI::Validator is_number() {
    const auto check = [](std::string& text) -> std::string {
        const bool good = parse_number<std::uint64_t>(text).has_value();
        return good ? "" : fmt::format("expected a number from 0 to {}, got '{}'", UINT64_MAX, text);
    };
    return {check, "UINT"};
}

CLI::Validator is_port() {
    const auto check = [](std::string& text) -> std::string {
        const bool good = parse_number<std::uint16_t>(text).has_value();
        return good ? "" : fmt::format("expected a port from 0 to 65535, got '{}'", text);
    };
    return {check, "PORT"};
}

CLI::Validator is_size(std::uint64_t least, std::uint64_t most) {
    std::string range = fmt::format("from {} to {}", format_bytes(least), format_bytes(most));
    const auto check = [=](std::string& text) -> std::string {
        const auto bytes = parse_bytes(text);
        if (!bytes) { return bytes.error().message; }
        if (*bytes < least || *bytes > most) { return fmt::format("expected a size {}, got '{}'", range, text); }
        text = std::to_string(*bytes);
        return "";
    };
    return {check, std::move(range)};
}

CLI::Validator is_between(double least, double most) {
    const auto check = [least, most](const std::string& text) -> std::string {
        const auto number = parse_number<double>(text);
        const bool good = number && *number >= least && *number <= most;
        return good ? "" : fmt::format("expected a number from {} to {}, got '{}'", least, most, text);
    };
    return {check, "NUMBER"};
}

void run_or_exit(CLI::App* command, std::function<Status()> work) {
    command->callback([work = std::move(work)] {
        if (const Status status = work(); !status) { exit_with(1, status.error().message); }
        end_output();
    });
}

void judge_or_exit(CLI::App* command, std::function<Result<std::string>()> work) {
    command->callback([work = std::move(work)] {
        const Result<std::string> verdict = work();
        if (!verdict) { exit_with(2, verdict.error().message); }
        end_output();
        if (!verdict->empty()) { exit_with(1, *verdict); }
    });
}

namespace {

constexpr int kUsageError = 2;

int run(int argc, char** argv) {
    CLI::App app(
        "Serves one Mixture-of-Experts model from many machines: llama.cpp runs unmodified, routed experts live on "
        "workers.",
        "linkcpp");
    app.set_version_flag("-V,--version", "linkcpp " LINKCPP_VERSION);
    app.require_subcommand(1);
    const bool serves = argc > 1 && std::string_view(argv[1]) == "serve";
    app.failure_message([serves](const CLI::App* /*app*/, const CLI::Error& error) {
        const bool hint = error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError) && serves;
        return fmt::format("linkcpp: error: {}{}; see --help\n", error.what(),
                           hint ? " (llama-server's own arguments go behind --)" : "");
    });
#ifdef LINKCPP_WORKER_ONLY
    app.footer(
        "This build has what a worker needs. Start with: linkcpp join LINE, with the line that linkcpp serve prints");
#else
    app.footer("Start with: linkcpp serve -m model.gguf --local-workers 2");
    add_serve(app);
    add_exec(app);
#endif
    add_join(app);
    add_status(app);
    add_clear(app);
    add_drain(app);
    add_token(app);
    add_revoke(app);
    add_devices(app);
    add_inspect(app);
    add_manifest(app);
    add_slice(app);
    add_backbone(app);
    add_assemble(app);
    add_store(app);
    add_synth(app);
    add_probe(app);
    add_compare(app);
    add_verify(app);

    // Under the name linkcpp-expert-worker the program is `linkcpp join`.
    std::vector<std::string> arguments(argv + 1, argv + argc);
    if (argc > 0 && std::filesystem::path(argv[0]).filename() == "linkcpp-expert-worker") {
        arguments.insert(arguments.begin(), "join");
    }
    if (arguments.empty()) {
        fmt::print("{}", app.help());
        return kUsageError;
    }
    if (arguments[0] == "help") {
        arguments.erase(arguments.begin());
        arguments.resize(std::min<std::size_t>(arguments.size(), 1));
        arguments.emplace_back("--help");
    }
    const auto commands = app.get_subcommands([](const CLI::App*) { return true; });
    if (!arguments[0].starts_with('-') &&
        std::ranges::find(commands, arguments[0], &CLI::App::get_name) == commands.end()) {
        std::string names;
        for (const CLI::App* command : commands) { names += (names.empty() ? "" : ", ") + command->get_name(); }
        print_error(fmt::format("'{}' is no command; there are {}; see --help", arguments[0], names));
        return kUsageError;
    }
    const auto is = [&](std::string_view text) { return std::ranges::find(arguments, text) != arguments.end(); };
    if (arguments[0] == "exec" && arguments.size() > 1 && !is("--") && !is("--help") && !is("-h")) {
        print_error("exec: put -- before the program: linkcpp exec -- llama-bench -m model.gguf; see --help");
        return kUsageError;
    }
    std::reverse(arguments.begin(), arguments.end());  // CLI11 wants the last one first
    try {
        app.parse(arguments);
    } catch (const CLI::RuntimeError& error) {
        return error.get_exit_code();  // what a command has said already, or a child's status
    } catch (const CLI::ParseError& error) { return app.exit(error) == 0 ? 0 : kUsageError; }
    return 0;
}

}  // namespace
}  // namespace linkcpp::cli

int main(int argc, char** argv) {
    // Else the next socket would get the number of standard output or error, and text would be written into it.
    linkcpp::open_standard_streams();
    std::signal(SIGXFSZ, SIG_IGN);  // a file over `ulimit -f` is an error that names it, like a full disk
    try {
        return linkcpp::cli::run(argc, argv);
    } catch (const std::exception& error) {
        linkcpp::cli::print_error(error.what());
        return 1;
    }
}
