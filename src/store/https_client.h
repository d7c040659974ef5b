// Fetching from a hub over HTTPS. The hub is known by its key, as on every link; no certificate authority is asked.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "base/sha256.h"
#include "net/socket.h"

namespace linkcpp::store {

// Keeps its connection between calls. One thread at a time.
class HttpsClient {
  public:
    // `token`: sent as bearer token, after the key has been checked.
    HttpsClient(net::Address address, const Digest& fingerprint, std::string token);
    ~HttpsClient();
    HttpsClient(const HttpsClient&) = delete;
    HttpsClient& operator=(const HttpsClient&) = delete;

    // GET `path`. `on_bytes` (may be empty) is told how many bytes have come in and can stop the transfer with false.
    // Errors: not_found (404), invalid (401 or 403; another key), overloaded (503), corrupt (more than `limit` bytes),
    // disconnected, timeout (nothing came for `stall`), failed.
    using OnBytes = std::function<bool(std::uint64_t)>;
    Result<Bytes> get(const std::string& path, std::uint64_t limit, const OnBytes& on_bytes = {});

  private:
    struct Handle;
    std::unique_ptr<Handle> handle_;
    net::Address address_;
    std::string token_;
};

}  // namespace linkcpp::store
