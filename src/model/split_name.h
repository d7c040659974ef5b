// Names of the files of a model that is split: "model-00002-of-00003.gguf".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace linkcpp::model {

struct SplitName {
    std::string prefix;        // "model"
    std::uint64_t number = 0;  // 2
    std::uint64_t count = 0;   // 3
};

// Nothing for any other name of a file.
std::optional<SplitName> parse_split_name(std::string_view file_name);
// The name of split `index`, counted from 0; SplitName::number does not matter.
std::string split_name(const SplitName& name, std::uint64_t index);

}  // namespace linkcpp::model
