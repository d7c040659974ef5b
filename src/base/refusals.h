// Who was turned away, and why: each counted under a name, for `linkcpp status`, and said in the log, but no more often
// than somebody reads it: strangers must not be able to fill a disk. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"

namespace linkcpp {

class Refusals {
  public:
    // Of each name the first is said, then one in ten seconds, with how many were not.
    static constexpr Duration kSayEvery = std::chrono::seconds(10);

    // Counts it under `name`, and says `text`.
    void note(const std::string& name, std::string_view text);
    void count(const std::string& name);
    void say(const std::string& name, std::string_view text);
    std::map<std::string, std::uint64_t> counts() const;

    // What say() writes, if it is time to.
    std::optional<std::string> text_to_say(const std::string& name, std::string_view text, TimePoint now);

  private:
    struct Said {
        TimePoint at{};
        std::uint64_t n_since = 0;
    };
    mutable std::mutex mutex_;  // guards the two below
    std::map<std::string, std::uint64_t> counts_;
    std::map<std::string, Said> said_;
};

}  // namespace linkcpp
