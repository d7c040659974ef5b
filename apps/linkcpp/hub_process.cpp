#include "hub_process.h"

#include <cstdlib>
#include <utility>

#include <unistd.h>

#include "base/log.h"
#include "base/platform.h"

namespace linkcpp::cli {

bool tell_parent(const HubLines& lines) {
    const UniqueFd parent = take_check_in();
    if (!parent) { return false; }
    const std::string text = lines.own.text() + "\n" + lines.printed + "\n";
    [[maybe_unused]] const ssize_t n = ::write(parent.get(), text.data(), text.size());
    return true;
}

Result<Process> HubProcess::start_one(const Place& place) {
    ProcessOptions options;
    options.arguments = {(executable_dir() / "linkcpp").string(), "serve", "--hub-only"};
    options.arguments.insert(options.arguments.end(), place.arguments.begin(), place.arguments.end());
    options.arguments.insert(options.arguments.end(),
                             {"--listen", place.listen.text(), "--https-port", std::to_string(place.https_port)});
    options.own_group = true;
    options.check_in = true;
    options.dies_at_once = true;  // its ports are wanted by whoever is started next
    return Process::start(options);
}

Result<HubProcess> HubProcess::start(std::vector<std::string> arguments, net::Address listen,
                                     std::uint16_t https_port) {
    auto place = std::make_shared<Place>(std::move(arguments), std::move(listen), https_port);
    LINKCPP_TRY(KeptAlive hub, KeptAlive::run([place] { return start_one(*place); }));
    return HubProcess(std::move(place), std::move(hub));
}

Status HubProcess::watch() {
    if (const auto status = hub_.watch()) {
        if (!lines_) {
            status_ = *status;
            return fail(ErrorKind::failed, "the hub ended with status {} before it was ready", *status);
        }
        log_error("the hub ended with status {}; starting it again, what it has started goes on", *status);
    }
    if (hub_.start_again()) { ready_ = false; }
    if (ready_) { return {}; }
    const std::string& said = hub_.process().said();
    const std::size_t first = said.find('\n');
    if (first == std::string::npos || !said.ends_with('\n') || first + 1 == said.size()) { return {}; }
    LINKCPP_TRY(net::JoinLine own, net::parse_join_line(said.substr(0, first)));
    place_->listen.port = own.hub.port;  // from now on it has to be there
    place_->https_port = own.https_port;
    lines_ = HubLines{std::move(own), said.substr(first + 1, said.size() - first - 2)};
    ready_ = true;
    return {};
}

}  // namespace linkcpp::cli
