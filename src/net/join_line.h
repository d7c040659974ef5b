// The join line: all that a machine needs to join a hub. One line to paste:
//
//   linkcpp://HOST:PORT/FINGERPRINT/TOKEN
//
// HTTPS is on the next port; where it is not, "?https=PORT" stands behind the token.
// FINGERPRINT is that of the hub's key (64 hexadecimal digits): who joins knows whom it talks to. TOKEN is a secret.
#pragma once

#include <string>
#include <string_view>

#include "base/error.h"
#include "base/sha256.h"
#include "net/socket.h"

namespace linkcpp::net {

struct JoinLine {
    Address hub;
    Digest fingerprint;
    std::string token;
    std::uint16_t https_port = 0;

    std::string text() const;
    // The line with the token left out, for logs.
    std::string redacted() const;
};

// Whether a join line can carry it.
bool is_token(std::string_view text);

// Errors: invalid, without repeating the secret.
Result<JoinLine> parse_join_line(std::string_view text);

}  // namespace linkcpp::net
