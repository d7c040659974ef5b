#include "net/socket.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/platform.h"
#include "base/text.h"

namespace linkcpp::net {
namespace {

constexpr int kBacklog = 128;

struct FreeAddresses {
    void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using AddressList = std::unique_ptr<addrinfo, FreeAddresses>;

Result<AddressList> resolve(const Address& address, int flags) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV;
    addrinfo* list = nullptr;
    const std::string port = std::to_string(address.port);
    const int error = ::getaddrinfo(address.host.empty() ? nullptr : address.host.c_str(), port.c_str(), &hints, &list);
    if (error != 0) {
        return fail(ErrorKind::not_found, "{}: {}; check the name or use a number", address.text(),
                    ::gai_strerror(error));
    }
    return AddressList(list);
}

void set_no_delay(int fd) {
    const int on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

// A Unix socket's buffers do not grow by themselves as TCP's do; large frames would go back and forth in small pieces.
// The kernel cuts this down to what the system allows (net.core.wmem_max).
void set_large_buffer(int fd) {
    const int bytes = 4 << 20;
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

std::string name_of(const sockaddr_storage& address, socklen_t length) {
    std::array<char, NI_MAXHOST> host{};
    std::array<char, NI_MAXSERV> port{};
    if (::getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, host.data(), host.size(), port.data(),
                      port.size(), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return "unknown";
    }
    const std::string_view text(host.data());
    return text.find(':') == std::string_view::npos ? fmt::format("{}:{}", text, port.data())
                                                    : fmt::format("[{}]:{}", text, port.data());
}

std::uint16_t port_of(int fd) {
    sockaddr_storage bound{};
    socklen_t length = sizeof bound;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length) != 0) { return 0; }
    return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

Result<sockaddr_un> unix_address(const std::filesystem::path& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string text = path.string();
    if (text.size() >= sizeof address.sun_path) {
        return fail(ErrorKind::invalid,
                    "{}: a socket's path has at most {} characters; set LINKCPP_HOME to a short one", text,
                    sizeof address.sun_path - 1);
    }
    std::memcpy(address.sun_path, text.c_str(), text.size() + 1);
    return address;
}

Status await_connected(int fd, Duration timeout, std::string_view name) {
    pollfd entry{fd, POLLOUT, 0};
    const int ready = ::poll(&entry, 1, to_poll_ms(timeout));
    if (ready == 0) { return fail(ErrorKind::timeout, "{}: no connection within {:.1f} s", name, to_seconds(timeout)); }
    int error = 0;
    socklen_t length = sizeof error;
    if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) { error = errno; }
    if (error != 0) { return fail_errno(error, name); }
    return {};
}

}  // namespace

std::string Address::text() const {
    return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port) : fmt::format("[{}]:{}", host, port);
}

Result<Address> parse_address(std::string_view text, std::uint16_t default_port) {
    Address address{"", default_port};
    std::string_view port;
    if (text.starts_with('[')) {
        const std::size_t close = text.find(']');
        if (close == std::string_view::npos) { return fail(ErrorKind::invalid, "address: '{}' lacks a ']'", text); }
        address.host = text.substr(1, close - 1);
        port = text.substr(close + 1);
        if (!port.empty() && !port.starts_with(':')) {
            return fail(ErrorKind::invalid, "address: expected [host]:port, got '{}'", text);
        }
        if (!port.empty()) { port.remove_prefix(1); }
    } else {
        const std::size_t colon = text.rfind(':');
        address.host = text.substr(0, colon);
        if (colon != std::string_view::npos) { port = text.substr(colon + 1); }
    }
    if (!port.empty()) {
        const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
        if (error != std::errc{} || end != port.data() + port.size()) {
            return fail(ErrorKind::invalid, "address: expected a port from 0 to 65535, got '{}'", port);
        }
    }
    const bool is_number = text.starts_with('[');
    const auto fits = [is_number](char c) {
        const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        return letter || c == '.' || c == '-' || c == '_' || (is_number && (c == ':' || c == '%'));
    };
    if (address.host.empty() || !std::ranges::all_of(address.host, fits)) {
        return fail(ErrorKind::invalid, "address: expected host:port, or [number]:port for IPv6, got '{}'",
                    one_line(text));
    }
    return address;
}

Listener::~Listener() {
    if (fd_ && !unix_path_.empty()) { ::unlink(unix_path_.c_str()); }
}

Result<Listener> Listener::tcp(const Address& address) {
    LINKCPP_TRY(const AddressList list, resolve(address, AI_PASSIVE));
    UniqueFd fd(::socket(list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) { return fail_errno(errno, address.text()); }
    const int on = 1;
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (::bind(fd.get(), list->ai_addr, list->ai_addrlen) != 0 || ::listen(fd.get(), kBacklog) != 0) {
        return fail_errno(errno, fmt::format("listening on {}", address.text()));
    }
    Address bound{address.host, port_of(fd.get())};
    return Listener(std::move(fd), std::move(bound), {});
}

Result<Listener> Listener::unix_socket(const std::filesystem::path& path) {
    LINKCPP_TRY(const sockaddr_un address, unix_address(path));
    if (connect_unix(path)) {
        return fail(ErrorKind::invalid, "{}: another process listens there; stop it first", path.string());
    }
    ::unlink(path.c_str());
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) { return fail_errno(errno, path.string()); }
    // Before listen() nobody can connect: no moment in which the mode is wrong.
    if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
        ::chmod(path.c_str(), 0600) != 0 || ::listen(fd.get(), kBacklog) != 0) {
        return fail_errno(errno, path.string());
    }
    return Listener(std::move(fd), {}, path);
}

Result<std::optional<Listener::Accepted>> Listener::accept() {
    while (true) {
        sockaddr_storage from{};
        socklen_t length = sizeof from;
        UniqueFd fd(::accept4(fd_.get(), reinterpret_cast<sockaddr*>(&from), &length, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (fd) {
            Accepted accepted;
            if (unix_path_.empty()) {
                set_no_delay(fd.get());
                accepted.from = name_of(from, length);
            } else {
                set_large_buffer(fd.get());
                accepted.uid = peer_uid(fd.get());
                accepted.from = accepted.uid ? fmt::format("unix, user {}", *accepted.uid) : "unix, unknown user";
            }
            accepted.fd = std::move(fd);
            return accepted;
        }
        if (errno == EAGAIN || errno == EWOULDBLOCK) { return std::nullopt; }
        if (errno == EINTR || errno == ECONNABORTED) { continue; }
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            return fail(ErrorKind::overloaded, "accept: {}; raise the limit of open files (ulimit -n)",
                        std::strerror(errno));
        }
        return fail_errno(errno, "accept");
    }
}

std::string peer_name(int fd) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) { return "an unknown address"; }
    return name_of(address, length);
}

std::string_view host_of(std::string_view from) {
    return from.substr(0, from.rfind(':'));
}

Result<UniqueFd> connect_tcp(const Address& address, Duration timeout) {
    LINKCPP_TRY(const AddressList list, resolve(address, 0));
    Error last{ErrorKind::failed, fmt::format("{}: no address", address.text())};
    for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
        UniqueFd fd(::socket(entry->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
        if (!fd) {
            last = fail_errno(errno, address.text()).error();
            continue;
        }
        set_no_delay(fd.get());
        Status connected;
        if (::connect(fd.get(), entry->ai_addr, entry->ai_addrlen) != 0) {
            connected = errno == EINPROGRESS ? await_connected(fd.get(), timeout, address.text())
                                             : Status(fail_errno(errno, address.text()));
        }
        if (connected) { return fd; }
        last = connected.error();
    }
    return std::unexpected(last);
}

Result<UniqueFd> connect_unix(const std::filesystem::path& path) {
    LINKCPP_TRY(const sockaddr_un address, unix_address(path));
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) { return fail_errno(errno, path.string()); }
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
        return fail_errno(errno, path.string());
    }
    set_large_buffer(fd.get());
    return fd;
}

Result<std::pair<UniqueFd, UniqueFd>> socket_pair() {
    std::array<int, 2> fds{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds.data()) != 0) {
        return fail_errno(errno, "socketpair");
    }
    return std::pair(UniqueFd(fds[0]), UniqueFd(fds[1]));
}

std::string lan_host() {
    // A UDP socket "connected" to an address of the documentation range sends nothing, but has the kernel choose the
    // interface that traffic to the outside would leave by.
    const UniqueFd fd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_in outside{};
    outside.sin_family = AF_INET;
    outside.sin_port = htons(9);
    ::inet_pton(AF_INET, "192.0.2.1", &outside.sin_addr);
    sockaddr_in own{};
    socklen_t length = sizeof own;
    std::array<char, INET_ADDRSTRLEN> text{};
    if (!fd || ::connect(fd.get(), reinterpret_cast<sockaddr*>(&outside), sizeof outside) != 0 ||
        ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &length) != 0 ||
        ::inet_ntop(AF_INET, &own.sin_addr, text.data(), text.size()) == nullptr) {
        return "127.0.0.1";
    }
    return text.data();
}

bool is_loopback(std::string_view host) {
    return host == "localhost" || host == "::1" || host.starts_with("127.");
}

}  // namespace linkcpp::net
