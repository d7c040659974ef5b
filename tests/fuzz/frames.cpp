// Frame headers, compute requests and answers: what comes in on a data link, and the beginning of everything on any
// link.
#include "net/link.h"
#include "net/socket.h"
#include "wire/compute.h"
#include "wire/frame.h"

using namespace linkcpp;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const ByteView bytes(reinterpret_cast<const std::byte*>(data), size);
    if (const auto request = wire::decode_compute_request(bytes)) {
        if (request->rows.size() != request->header.n_rows * request->header.row_bytes()) { __builtin_trap(); }
        for (std::size_t i = 0; i < request->header.n_pairs; ++i) {
            if (request->pair(i).row >= request->header.n_rows) { __builtin_trap(); }
        }
    }
    if (const auto answer = wire::decode_compute_answer(bytes)) {
        if (answer->header.payload_bytes() != size) { __builtin_trap(); }
    }
    // The same bytes as a stream, in two pieces.
    auto ends = net::socket_pair();
    if (!ends || size > 64u << 10) { return 0; }
    const auto near = net::Link::plain(std::move(ends->first), "near");
    const std::size_t half = size / 2;
    (void)!::write(ends->second.get(), data, half);
    for (int piece = 0; piece < 2; ++piece) {
        while (true) {
            const auto frame = near->receive();
            if (!frame || !*frame) { break; }
            if ((*frame)->payload.size() > wire::kMaxHelloBytes) { __builtin_trap(); }
        }
        if (piece == 0) { (void)!::write(ends->second.get(), data + half, size - half); }
    }
    return 0;
}
