// Child processes and signals, for the commands that start other programs.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include <sys/types.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"

namespace linkcpp::cli {

struct ProcessOptions {
    std::vector<std::string> arguments;              // [0] is the program, looked up in PATH
    std::map<std::string, std::string> environment;  // added to this process's own
    bool own_group = false;                          // the terminal's Ctrl-C reaches us alone, and we tell the child
    bool dies_at_once = false;                       // when this process ends: killed, not asked to end
    bool check_in = false;                           // hand the child LINKCPP_CHECK_IN_FD, see Process::said()
};

// A child process. It ends with its parent, whatever becomes of that.
class Process {
  public:
    // Errors: not_found (no such program), failed.
    static Result<Process> start(const ProcessOptions& options);
    Process(Process&& other) noexcept;
    Process& operator=(Process&& other) noexcept {
        std::swap(pid_, other.pid_);
        std::swap(check_in_, other.check_in_);
        std::swap(said_, other.said_);
        std::swap(status_, other.status_);
        return *this;
    }
    // Asks a living child to end (SIGTERM), and after five seconds makes it.
    ~Process();

    pid_t pid() const { return pid_; }
    void signal(int number) const;
    // The exit status once the child has ended (128 + number when a signal ended it); nothing while it runs.
    std::optional<int> poll();
    // What the child has written so far into the descriptor that it was handed.
    const std::string& said();
    // The plugin inside the child has said that it is there.
    bool checked_in() { return !said().empty(); }

  private:
    Process(pid_t pid, UniqueFd check_in) : pid_(pid), check_in_(std::move(check_in)) {}

    pid_t pid_ = -1;
    UniqueFd check_in_;
    std::string said_;
    std::optional<int> status_;
};

// In a child: the descriptor that its parent listens on; none when there is no such parent. Once.
UniqueFd take_check_in();

// SIGINT and SIGTERM request the stop; call before threads are started.
class StopOnSignal {
  public:
    StopOnSignal();
    ~StopOnSignal();
    std::stop_token token() const { return source_.get_token(); }
    bool requested() const { return source_.stop_requested(); }
    struct Signal {
        int number = 0;              // 0: none came
        bool from_terminal = false;  // Ctrl-C: every process of the group has got it
    };
    // Sleeps at most `time`, less when a signal comes.
    Signal sleep(Duration time);

  private:
    std::stop_source source_;
    int signal_fd_ = -1;
};

}  // namespace linkcpp::cli
