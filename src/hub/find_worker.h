// A worker, or a program, as its operator names it.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/text.h"

namespace linkcpp::hub {

// What of a worker's id people are shown, and the least of one that says whose it is: less may be a slip of the finger.
inline constexpr std::size_t kShortId = 12;
inline constexpr std::size_t kShortestId = 6;

// The id of the one worker in `workers` (by id) whose name is `worker`, or whose id is or begins with it. `name_of`
// gives a record's name, and nothing for one that is not looked for. `kind` and `state` say what those are who are, for
// errors: a "worker" that "has joined". Errors: not_found, invalid (fits several).
template <class Record, class NameOf>
Result<std::string> find_worker(std::string_view worker, const std::map<std::string, Record>& workers, NameOf name_of,
                                std::string_view kind, std::string_view state) {
    std::vector<std::string> ids;
    for (const auto& [id, record] : workers) {
        const std::string name = name_of(record);
        if (name.empty()) { continue; }
        if (id == worker) { return id; }  // whatever others call themselves
        if (name == worker || (worker.size() >= kShortestId && id.starts_with(worker))) { ids.push_back(id); }
    }
    if (ids.empty()) {
        return fail(ErrorKind::not_found, "no {} '{}' {} (its name, or at least {} digits of its id)", kind,
                    one_line(worker), state, kShortestId);
    }
    if (ids.size() > 1) {
        return fail(ErrorKind::invalid, "'{}' fits {}: {}; give more of the id", one_line(worker), ids.size(),
                    fmt::join(ids, ", "));
    }
    return ids.front();
}

}  // namespace linkcpp::hub
