// Errors as values. Every function that can fail for a reason outside this program returns Result<T>.
//
// The kind tells the caller what to do; the message is for a person and reads
// "what: expected X, got Y (where)". No exception leaves a room.
#pragma once

#include <cstdint>
#include <expected>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace linkcpp {

enum class ErrorKind : std::uint8_t {
    invalid = 1,       // the caller's input is wrong: fix it
    not_found = 2,     // the named thing is not there
    corrupt = 3,       // bytes break their format: close the link, refuse the file
    unsupported = 4,   // understood, but this build or device cannot do it
    disconnected = 5,  // the peer is gone: fail over
    overloaded = 6,    // try again later
    timeout = 7,       // nothing came in time
    failed = 8,        // anything else: tell a person
};

std::string_view to_string(ErrorKind kind);

struct Error {
    ErrorKind kind = ErrorKind::failed;
    std::string message;
};

template <class T>
using Result = std::expected<T, Error>;
using Status = Result<void>;

template <class... Args>
std::unexpected<Error> fail(ErrorKind kind, fmt::format_string<Args...> format, Args&&... args) {
    return std::unexpected(Error{kind, fmt::format(format, std::forward<Args>(args)...)});
}

// "what: <strerror(errno_value)>", with the kind that fits: ENOENT is not_found, ENOSPC is failed with a
// sentence that says what to do, and so on.
std::unexpected<Error> fail_errno(int errno_value, std::string_view what);

// Passes an error on with a few words of context in front.
std::unexpected<Error> fail_with(std::string_view context, Error error);

}  // namespace linkcpp

// LINKCPP_TRY(auto x, f()): x = the value of f(), or return its error from the enclosing function.
// LINKCPP_CHECK(f()): the same for a Status.
#define LINKCPP_CONCAT_(a, b) a##b
#define LINKCPP_CONCAT(a, b) LINKCPP_CONCAT_(a, b)
#define LINKCPP_TRY_(decl, expr, tmp)                             \
    auto tmp = (expr);                                            \
    if (!tmp) { return std::unexpected(std::move(tmp).error()); } \
    decl = *std::move(tmp)
#define LINKCPP_TRY(decl, expr) LINKCPP_TRY_(decl, expr, LINKCPP_CONCAT(linkcpp_try_, __COUNTER__))
#define LINKCPP_CHECK_(expr, tmp)                                     \
    do {                                                              \
        auto tmp = (expr);                                            \
        if (!tmp) { return std::unexpected(std::move(tmp).error()); } \
    } while (false)
#define LINKCPP_CHECK(expr) LINKCPP_CHECK_(expr, LINKCPP_CONCAT(linkcpp_check_, __COUNTER__))
