#include "base/error.h"

#include <cerrno>
#include <cstring>

namespace linkcpp {

std::string_view to_string(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::invalid: return "invalid";
        case ErrorKind::not_found: return "not found";
        case ErrorKind::corrupt: return "corrupt";
        case ErrorKind::unsupported: return "unsupported";
        case ErrorKind::disconnected: return "disconnected";
        case ErrorKind::overloaded: return "overloaded";
        case ErrorKind::timeout: return "timeout";
        case ErrorKind::failed: return "failed";
    }
    return "unknown";
}

std::unexpected<Error> fail_errno(int errno_value, std::string_view what) {
    switch (errno_value) {
        case ENOENT:
        case ENOTDIR: return fail(ErrorKind::not_found, "{}: no such file or directory", what);
        case EACCES:
        case EPERM:
            return fail(ErrorKind::invalid, "{}: permission denied; check the owner and mode of the path", what);
        case ENOSPC:
        case EDQUOT: return fail(ErrorKind::failed, "{}: the disk is full; free space or choose another folder", what);
        case EADDRINUSE:
            return fail(ErrorKind::invalid, "{}: the address is in use; stop the other program or choose another port",
                        what);
        case ECONNREFUSED: return fail(ErrorKind::disconnected, "{}: connection refused; is it running there?", what);
        case ECONNRESET:
        case EPIPE: return fail(ErrorKind::disconnected, "{}: connection closed by the peer", what);
        case ETIMEDOUT: return fail(ErrorKind::timeout, "{}: timed out", what);
        default: return fail(ErrorKind::failed, "{}: {}", what, std::strerror(errno_value));
    }
}

std::unexpected<Error> fail_with(std::string_view context, Error error) {
    error.message = fmt::format("{}: {}", context, error.message);
    return std::unexpected(std::move(error));
}

}  // namespace linkcpp
