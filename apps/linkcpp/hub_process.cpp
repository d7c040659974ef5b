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

Result<Process> HubProcess::Start::operator()() const {
    ProcessOptions options;
    options.arguments = {(executable_dir() / "linkcpp").string(), "serve", "--hub-only"};
    options.arguments.insert(options.arguments.end(), arguments.begin(), arguments.end());
    options.arguments.insert(options.arguments.end(),
                             {"--listen", listen.text(), "--https-port", std::to_string(https_port)});
    options.own_group = true;
    options.check_in = true;
    return Process::start(options);
}

Result<HubProcess> HubProcess::start(std::vector<std::string> arguments, net::Address listen,
                                     std::uint16_t https_port) {
    Start start{std::move(arguments), std::move(listen), https_port};
    LINKCPP_TRY(Process process, start());
    return HubProcess(std::move(start), std::move(process));
}

Status HubProcess::watch() {
    const TimePoint now = std::chrono::steady_clock::now();
    if (const auto status = process_.poll()) {
        if (!lines_) {
            status_ = *status;
            return fail(ErrorKind::failed, "the hub ended with status {} before it was ready", *status);
        }
        if (restarts_.ended(now)) {
            log_error("the hub ended with status {}; starting it again, what it has started goes on", *status);
        }
        if (!restarts_.due(now)) { return {}; }
        auto process = start_();
        if (!process) {
            log_error("{}", process.error().message);
            restarts_.failed(now);
            return {};
        }
        process_ = *std::move(process);
        restarts_.started(now);
        ready_ = false;
    }
    if (ready_) { return {}; }
    const std::string& said = process_.said();
    const std::size_t first = said.find('\n');
    if (first == std::string::npos || !said.ends_with('\n') || first + 1 == said.size()) { return {}; }
    LINKCPP_TRY(net::JoinLine own, net::parse_join_line(said.substr(0, first)));
    start_.listen.port = own.hub.port;  // from now on it has to be there
    start_.https_port = own.https_port;
    lines_ = HubLines{std::move(own), said.substr(first + 1, said.size() - first - 2)};
    ready_ = true;
    return {};
}

}  // namespace linkcpp::cli
