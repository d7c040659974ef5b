#include "net/wakeup.h"

#include <array>
#include <cerrno>
#include <system_error>

#include <fcntl.h>
#include <unistd.h>

namespace linkcpp::net {

Wakeup::Wakeup() {
    std::array<int, 2> fds{};
    if (::pipe2(fds.data(), O_NONBLOCK | O_CLOEXEC) != 0) {
        throw std::system_error(errno, std::generic_category(), "pipe");
    }
    read_ = UniqueFd(fds[0]);
    write_ = UniqueFd(fds[1]);
}

void Wakeup::signal() const {
    const char byte = 0;
    // A full pipe is awake already.
    [[maybe_unused]] const ssize_t n = ::write(write_.get(), &byte, 1);
}

void Wakeup::clear() const {
    std::array<char, 64> bytes{};
    while (::read(read_.get(), bytes.data(), bytes.size()) > 0) {}
}

}  // namespace linkcpp::net
