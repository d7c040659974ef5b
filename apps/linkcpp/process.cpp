#include "process.h"

#include <array>
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

constexpr const char* kCheckIn = "LINKCPP_CHECK_IN_FD";

sigset_t stop_signals() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    return set;
}

// In the child, between fork and exec. Reports errno through the pipe, which exec closes.
[[noreturn]] void become(const ProcessOptions& options, pid_t parent, int check_in, int error_pipe) {
    die_with_parent(options.dies_at_once);
    if (::getppid() != parent) { ::_exit(127); }  // it has ended already
    if (options.own_group) { ::setpgid(0, 0); }
    const sigset_t set = stop_signals();
    sigprocmask(SIG_UNBLOCK, &set, nullptr);
    for (const auto& [name, value] : options.environment) { ::setenv(name.c_str(), value.c_str(), 1); }
    if (check_in >= 0) {
        ::fcntl(check_in, F_SETFD, 0);
        ::setenv(kCheckIn, std::to_string(check_in).c_str(), 1);
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
    const pid_t parent = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) { return fail_errno(errno, "fork"); }
    if (pid == 0) { become(options, parent, check_in_write.get(), error_write.get()); }
    error_write.reset();
    int error = 0;
    if (::read(error_read.get(), &error, sizeof error) == sizeof error) {
        ::waitpid(pid, nullptr, 0);
        if (error == ENOENT && options.arguments[0].find('/') == std::string::npos) {
            return fail(ErrorKind::not_found, "{}: no such file, neither in {} (llama.cpp) nor in PATH",
                        options.arguments[0], LINKCPP_LLAMA_BIN);
        }
        return fail_errno(error, options.arguments[0]);
    }
    return Process(pid, std::move(check_in_read));
}

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      check_in_(std::move(other.check_in_)),
      said_(std::move(other.said_)),
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

const std::string& Process::said() {
    std::array<char, 1024> bytes;
    while (check_in_) {
        const ssize_t n = ::read(check_in_.get(), bytes.data(), bytes.size());
        if (n <= 0) { break; }
        said_.append(bytes.data(), static_cast<std::size_t>(n));
    }
    return said_;
}

UniqueFd take_check_in() {
    const char* text = std::getenv(kCheckIn);
    UniqueFd fd(text == nullptr ? -1 : std::atoi(text));
    ::unsetenv(kCheckIn);
    if (fd && fd.get() <= STDERR_FILENO) { static_cast<void>(fd.release()); }
    return fd;
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
