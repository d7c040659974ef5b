#include "store/transfer.h"

namespace linkcpp::store {

Status transfer(const FetchRest& fetch_rest, std::uint64_t n_bytes, const Digest& hash, PartialFile& file,
                const OnPiece& on_piece) {
    for (bool resumed = file.n_bytes() > 0;; resumed = false) {
        if (file.n_bytes() > n_bytes) { LINKCPP_CHECK(file.clear()); }
        if (file.n_bytes() < n_bytes) {
            LINKCPP_CHECK(fetch_rest(file.n_bytes(), [&](ByteView piece) -> Status {
                LINKCPP_CHECK(file.add(piece));
                return on_piece(piece.size());
            }));
        }
        LINKCPP_TRY(const Digest found, file.hash());
        if (found == hash) { return {}; }
        LINKCPP_CHECK(file.clear());
        if (!resumed) {
            return fail(ErrorKind::corrupt, "{}: the bytes received have another hash", hash.hex().substr(0, 12));
        }
    }
}

bool may_pass(ErrorKind kind) {
    return kind == ErrorKind::disconnected || kind == ErrorKind::timeout || kind == ErrorKind::overloaded;
}

}  // namespace linkcpp::store
