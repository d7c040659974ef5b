#include "base/refusals.h"

#include <utility>

#include "base/log.h"

namespace linkcpp {

void Refusals::note(const std::string& name, std::string_view text) {
    count(name);
    say(name, text);
}

void Refusals::count(const std::string& name) {
    const std::lock_guard lock(mutex_);
    ++counts_[name];
}

void Refusals::say(const std::string& name, std::string_view text) {
    if (const auto line = text_to_say(name, text, steady_now())) { log_warn("{}", *line); }
}

std::map<std::string, std::uint64_t> Refusals::counts() const {
    const std::lock_guard lock(mutex_);
    return counts_;
}

std::optional<std::string> Refusals::text_to_say(const std::string& name, std::string_view text, TimePoint now) {
    const std::lock_guard lock(mutex_);
    const auto [entry, is_new] = said_.try_emplace(name);
    Said& said = entry->second;
    if (!is_new && now - said.at < kSayEvery) {
        ++said.n_since;
        return std::nullopt;
    }
    said.at = now;
    const std::uint64_t n = std::exchange(said.n_since, 0);
    return n == 0 ? std::string(text) : fmt::format("{} ({} more like this were not said)", text, n);
}

}  // namespace linkcpp
