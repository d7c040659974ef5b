// The hub's HTTPS side: manifest, slices, status, and what its operator does. TLS 1.3 with the hub's own certificate;
// every request needs a bearer token, and what changes anything needs the operator's. Requests run on the server's own
// threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/sha256.h"
#include "hub/https_guests.h"
#include "hub/model_files.h"
#include "model/gguf_file.h"
#include "model/manifest.h"
#include "net/identity.h"
#include "net/socket.h"

namespace httplib {
class SSLServer;
}

namespace linkcpp::hub {

// The tokens that open the HTTPS side. Thread-safe.
class Tokens {
  public:
    void add(std::string token);
    void remove(const std::string& token);
    // In a time that does not depend on how much of a token is right.
    bool accept(std::string_view token) const;

  private:
    mutable std::mutex mutex_;
    std::set<std::string> tokens_;
};

// What the operator may do, with arguments by name.
enum class Command : std::uint8_t {
    clear,         // worker
    drain,         // worker
    undrain,       // worker
    list_tokens,   //
    make_token,    // name, for, seconds (0: it never ends)
    rotate_token,  // name
    revoke_token,  // name, members ("yes": those who came in with it, too)
    revoke,        // member
    unrevoke,      // member
};
using Arguments = std::map<std::string, std::string>;

class HttpServer {
  public:
    // What is served. All that is referred to outlives the server; functions are called on its threads.
    struct Source {
        const model::GgufFile& file;
        const model::Manifest& manifest;
        const Tokens& tokens;
        const Tokens& operator_tokens;
        std::function<std::string()> status;  // JSON
        // Is told of each connection or request that was turned away: under which name, and what to say of it.
        std::function<void(const std::string& name, const std::string& text)> refused;
        // What it has done, for the command line to say: a name, or JSON.
        std::function<Result<std::string>(Command command, const Arguments& arguments)> operate;
    };

    struct Limits {
        std::size_t requests;     // at a time
        std::size_t per_address;  // connections that have shown no token yet
        Duration hello_time;      // until a token must have been shown
    };

    // Opens the port; connections wait until start(). Errors: invalid (the port is in use).
    static Result<std::unique_ptr<HttpServer>> make(const net::Address& address, const net::Identity& identity,
                                                    const Limits& limits, Source source);
    ~HttpServer();
    // Starts the server's threads.
    void start();
    // To be called about once a second, from any thread.
    void sweep(TimePoint now) { guests_->sweep(now); }
    std::uint16_t port() const { return port_; }
    // From any thread: slices that were asked for and sent.
    std::uint64_t slices_sent() const { return files_->slices_sent(); }
    std::uint64_t bytes_sent() const { return files_->bytes_sent(); }

  private:
    HttpServer();
    std::unique_ptr<HttpsGuests> guests_;  // these two outlive the server
    std::unique_ptr<ModelFiles> files_;
    std::unique_ptr<httplib::SSLServer> server_;
    std::uint16_t port_ = 0;
    std::atomic<bool> ended_{false};
    std::thread thread_;
};

}  // namespace linkcpp::hub
