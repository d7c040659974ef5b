// Sockets: addresses as people write them, listening, dialling. All sockets made here are non-blocking.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"

namespace linkcpp::net {

struct Address {
    std::string host;  // name or number, IPv6 without brackets
    std::uint16_t port = 0;

    std::string text() const;  // "host:port", "[::1]:7070"
    bool operator==(const Address&) const = default;
};

// "host:port", "[::1]:port", or "host" alone with `default_port`. Errors: invalid.
Result<Address> parse_address(std::string_view text, std::uint16_t default_port = 0);

class Listener {
  public:
    // Port 0: any free one. Errors: invalid (the port is in use; says which), failed.
    static Result<Listener> tcp(const Address& address);
    // Only this user can connect (mode 0600). A dead socket file of that name is replaced; a living one is an error.
    static Result<Listener> unix_socket(const std::filesystem::path& path);

    Listener(Listener&&) noexcept = default;
    Listener& operator=(Listener&&) noexcept = default;
    ~Listener();

    struct Accepted {
        UniqueFd fd;
        std::string from;                  // "10.0.0.3:41234" or "unix, user 1000"
        std::optional<std::uint32_t> uid;  // Unix sockets only
    };
    // Nothing when nobody waits. Errors: overloaded (out of descriptors), failed.
    Result<std::optional<Accepted>> accept();

    int fd() const { return fd_.get(); }
    const Address& address() const { return address_; }  // with the port in use

  private:
    Listener(UniqueFd fd, Address address, std::filesystem::path unix_path)
        : fd_(std::move(fd)), address_(std::move(address)), unix_path_(std::move(unix_path)) {}

    UniqueFd fd_;
    Address address_;
    std::filesystem::path unix_path_;
};

// Who is at the other end of a connected socket, as in Accepted::from.
std::string peer_name(int fd);
// "10.0.0.3:41234" → "10.0.0.3"
std::string_view host_of(std::string_view from);

// Waits at most `timeout` for the connection. Errors: not_found (no such host), disconnected (refused), timeout.
Result<UniqueFd> connect_tcp(const Address& address, Duration timeout);
Result<UniqueFd> connect_unix(const std::filesystem::path& path);

// Two connected Unix sockets, for tests and benchmarks.
Result<std::pair<UniqueFd, UniqueFd>> socket_pair();

// The address that this machine would be reached at on its local network; 127.0.0.1 when it has none.
std::string lan_host();
bool is_loopback(std::string_view host);

}  // namespace linkcpp::net
