// Fetching one thing whole into a file, whoever broke off the last time.
#pragma once

#include <cstdint>
#include <functional>

#include "base/error.h"
#include "base/sha256.h"
#include "store/partial_file.h"
#include "store/slice_origin.h"

namespace linkcpp::store {

// Fetches the bytes from there on.
using FetchRest = std::function<Status(std::uint64_t from, const Take& take)>;

// Called with each piece, once it is in the file; an error of its own ends the transfer.
using OnPiece = std::function<Status(std::uint64_t n_bytes)>;

// Fetches what `file` lacks of `n_bytes` bytes and checks the hash of all of it. What an earlier transfer has left
// behind and turns out to be something else is fetched anew. On an error what has come stays in the file, but for bytes
// with a wrong hash. Errors: those of `fetch_rest`, corrupt (the bytes have another hash), failed (disk), those of
// `on_piece`.
Status transfer(const FetchRest& fetch_rest, std::uint64_t n_bytes, const Digest& hash, PartialFile& file,
                const OnPiece& on_piece);

// Whether trying again, perhaps elsewhere, may help.
bool may_pass(ErrorKind kind);

}  // namespace linkcpp::store
