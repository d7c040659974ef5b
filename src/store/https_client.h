// Fetching from a hub over HTTPS. The hub is known by its key, as on every link; no certificate authority is asked.
#pragma once

#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/sha256.h"
#include "net/socket.h"
#include "store/slice_origin.h"

namespace linkcpp::store {

// Keeps its connection between calls. One thread at a time.
class HttpsClient {
  public:
    // How long to wait for a connection, and then for the next byte; whole seconds.
    struct Patience {
        Duration connect = std::chrono::seconds(10);
        Duration stall = std::chrono::seconds(30);
    };
    // `token`: sent as bearer token, after the key has been checked.
    HttpsClient(net::Address address, const Digest& fingerprint, std::string token);
    HttpsClient(net::Address address, const Digest& fingerprint, std::string token, const Patience& patience);
    ~HttpsClient();
    HttpsClient(const HttpsClient&) = delete;
    HttpsClient& operator=(const HttpsClient&) = delete;

    // Transfers end, with the error failed, within about a second once `stop` is requested.
    void end_with(std::stop_token stop) { stop_ = std::move(stop); }

    // GET `path`, at most `limit` bytes. Errors: not_found (404), invalid (401 or 403; another key), overloaded (503),
    // corrupt (more than `limit` bytes), disconnected, timeout (nothing came for `stall`), failed; where the hub says
    // why, in its words.
    Result<Bytes> get(const std::string& path, std::uint64_t limit);

    // What is known of an answer before its bytes.
    struct Head {
        std::uint64_t n_bytes = 0;  // of the whole, also where only a part is sent
        std::string tag;            // its ETag, without the quotation marks
    };
    Result<Head> head(const std::string& path);

    // GET `path` from byte `from` on. `take` is given the bytes in their order and can stop it with an error.
    // Errors: as get(), those of `take`, corrupt (it is not `expected` any more, or does not have as many bytes).
    Status fetch(const std::string& path, std::uint64_t from, const Head& expected, const Take& take);

    // PUT or DELETE `path`, with "?NAME=VALUE&…" behind it. Errors: as above, where the hub says why in its words.
    using Arguments = std::vector<std::pair<std::string, std::string>>;
    Result<std::string> put(const std::string& path, const Arguments& arguments);
    Result<std::string> remove(const std::string& path, const Arguments& arguments);

  private:
    struct Request;
    struct Answer;
    Result<Answer> perform(const Request& request);
    Result<std::string> change(const char* method, const std::string& path, const Arguments& arguments);

    struct Handle;
    std::unique_ptr<Handle> handle_;
    net::Address address_;
    std::string token_;
    std::stop_token stop_;
};

}  // namespace linkcpp::store
