// Reports for machines.
#pragma once

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace linkcpp::cli {

// On standard output, for people to read as well. Text that is no UTF-8 is replaced, not refused.
template <class Json>
void print_json(const Json& value) {
    fmt::print("{}\n", value.dump(2, ' ', false, Json::error_handler_t::replace));
}

}  // namespace linkcpp::cli
