// The commands of the `linkcpp` program. Each add_*() puts one on the command line; what it does runs from a callback.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include <CLI/CLI.hpp>

#include "base/error.h"
#include "base/units.h"

namespace linkcpp::cli {

// Of a CPU device.
inline constexpr unsigned kMaxThreads = 1024;

void add_serve(CLI::App& app);
void add_join(CLI::App& app);
void add_exec(CLI::App& app);
void add_status(CLI::App& app);
void add_clear(CLI::App& app);
void add_drain(CLI::App& app);
void add_token(CLI::App& app);
void add_revoke(CLI::App& app);
void add_devices(CLI::App& app);
void add_inspect(CLI::App& app);
void add_manifest(CLI::App& app);
void add_slice(CLI::App& app);
void add_backbone(CLI::App& app);
void add_assemble(CLI::App& app);
void add_store(CLI::App& app);
void add_synth(CLI::App& app);
void add_probe(CLI::App& app);
void add_compare(CLI::App& app);
void add_verify(CLI::App& app);

// For options of 64 bits: CLI11 takes -1 for the largest number.
CLI::Validator is_number();
CLI::Validator is_port();
// For options of fractions; CLI11's own range has NaN in it.
CLI::Validator is_between(double least, double most);
// Turns "32M" into a number of bytes.
CLI::Validator is_size(std::uint64_t least, std::uint64_t most);

// An option in bytes that takes sizes such as "32M"; its default is what `bytes` is.
template <std::unsigned_integral Bytes>
CLI::Option* add_size(CLI::App* command, const std::string& name, Bytes& bytes, const std::string& text,
                      std::uint64_t least, std::uint64_t most) {
    return command->add_option(name, bytes, text)
        ->transform(is_size(least, most))
        ->type_name("SIZE")
        ->default_str(format_bytes(bytes));
}

// Runs `work` when `command` is given. An error is one line on standard error, and exit status 1.
void run_or_exit(CLI::App* command, std::function<Status()> work);

// From within `work`: one line on standard error, and that exit status.
[[noreturn]] void exit_with(int status, std::string_view error);

// Of `linkcpp join`, when the hub does not let it in and trying again would not help.
inline constexpr int kNotLetIn = 3;

// The same for what gives a verdict, like diff(1): 0 when `work` gives an empty text, 1 when it gives another, which is
// said on standard error, 2 when it could not be done.
void judge_or_exit(CLI::App* command, std::function<Result<std::string>()> work);

}  // namespace linkcpp::cli
