#include "model/split_name.h"

#include <charconv>
#include <system_error>

#include <fmt/format.h>

namespace linkcpp::model {

std::optional<SplitName> parse_split_name(std::string_view file_name) {
    constexpr std::string_view tail = "-00000-of-00000.gguf";
    if (file_name.size() <= tail.size()) { return std::nullopt; }
    const std::string_view end = file_name.substr(file_name.size() - tail.size());
    SplitName name;
    const auto parse_number = [&](std::size_t at, std::uint64_t& value) {
        const auto [rest, error] = std::from_chars(end.data() + at, end.data() + at + 5, value);
        return error == std::errc{} && rest == end.data() + at + 5;
    };
    if (end[0] != '-' || end.substr(6, 4) != "-of-" || !end.ends_with(".gguf")) { return std::nullopt; }
    if (!parse_number(1, name.number) || !parse_number(10, name.count)) { return std::nullopt; }
    name.prefix = file_name.substr(0, file_name.size() - tail.size());
    return name;
}

std::string split_name(const SplitName& name, std::uint64_t index) {
    return fmt::format("{}-{:05}-of-{:05}.gguf", name.prefix, index + 1, name.count);
}

}  // namespace linkcpp::model
