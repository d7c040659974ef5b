#include "process.h"

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <thread>

#include <fcntl.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/platform.h"

namespace linkcpp::cli {
namespace {

sigset_t stop_signals() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    return set;
}

// In the child, between fork and exec. Reports errno through the pipe, which exec closes.
[[noreturn]] void become(const ProcessOptions& options, int check_in, int error_pipe) {
    die_with_parent();
    if (options.own_group) { ::setpgid(0, 0); }
    const sigset_t set = stop_signals();
    sigprocmask(SIG_UNBLOCK, &set, nullptr);
    for (const auto& [name, value] : options.environment) { ::setenv(name.c_str(), value.c_str(), 1); }
    if (check_in >= 0) {
        ::fcntl(check_in, F_SETFD, 0);
        ::setenv("LINKCPP_CHECK_IN_FD", std::to_string(check_in).c_str(), 1);
    }
    std::vector<char*> arguments;
    for (const std::string& argument : options.arguments) { arguments.push_back(const_cast<char*>(argument.c_str())); }
    arguments.push_back(nullptr);
    ::execvp(arguments[0], arguments.data());
    const int error = errno;
    [[maybe_unused]] const ssize_t n = ::write(error_pipe, &error, sizeof error);
    ::_exit(127);
}

}  // namespace

Result<Process> Process::start(const ProcessOptions& options) {
    int errors[2];
    int check_in[2] = {-1, -1};
    if (::pipe2(errors, O_CLOEXEC) != 0) { return fail_errno(errno, "pipe"); }
    UniqueFd error_read(errors[0]);
    UniqueFd error_write(errors[1]);
    if (options.check_in && ::pipe2(check_in, O_CLOEXEC | O_NONBLOCK) != 0) { return fail_errno(errno, "pipe"); }
    UniqueFd check_in_read(check_in[0]);
    UniqueFd check_in_write(check_in[1]);
    const pid_t pid = ::fork();
    if (pid < 0) { return fail_errno(errno, "fork"); }
    if (pid == 0) { become(options, check_in_write.get(), error_write.get()); }
    error_write.reset();
    int error = 0;
    if (::read(error_read.get(), &error, sizeof error) == sizeof error) {
        ::waitpid(pid, nullptr, 0);
        return fail_errno(error, options.arguments[0]);
    }
    return Process(pid, std::move(check_in_read));
}

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      check_in_(std::move(other.check_in_)),
      checked_in_(other.checked_in_),
      status_(other.status_) {}

Process::~Process() {
    using namespace std::chrono_literals;
    if (pid_ < 0 || poll()) { return; }
    signal(SIGTERM);
    for (int i = 0; i < 500 && !poll(); ++i) { std::this_thread::sleep_for(10ms); }
    if (poll()) { return; }
    signal(SIGKILL);
    ::waitpid(pid_, nullptr, 0);
}

void Process::signal(int number) const {
    if (pid_ > 0 && !status_) { ::kill(pid_, number); }
}

std::optional<int> Process::poll() {
    if (status_ || pid_ < 0) { return status_; }
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) != pid_) { return std::nullopt; }
    status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return status_;
}

bool Process::checked_in() {
    char byte = 0;
    if (!checked_in_ && check_in_) { checked_in_ = ::read(check_in_.get(), &byte, 1) == 1; }
    return checked_in_;
}

StopOnSignal::StopOnSignal() {
    const sigset_t set = stop_signals();
    // Blocked in this thread and all that it starts: the signals are read from the descriptor instead.
    pthread_sigmask(SIG_BLOCK, &set, nullptr);
    signal_fd_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

StopOnSignal::~StopOnSignal() {
    if (signal_fd_ >= 0) { ::close(signal_fd_); }
}

StopOnSignal::Signal StopOnSignal::sleep(Duration time) {
    pollfd entry{signal_fd_, POLLIN, 0};
    ::poll(&entry, 1, to_poll_ms(time));
    signalfd_siginfo info{};
    if (::read(signal_fd_, &info, sizeof info) != sizeof info) { return {}; }
    source_.request_stop();
    return {static_cast<int>(info.ssi_signo), info.ssi_code == SI_KERNEL};
}

}  // namespace linkcpp::cli
