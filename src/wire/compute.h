// The wire format, part 2: the two hot frames. Fixed little-endian headers, raw tensor bytes behind them.
//
// Compute request ("these rows through these experts of this layer of this model"), after the frame header:
//
//   byte 0  u64  request id, chosen by the coordinator, echoed
//        8  u64  model: the first 8 bytes of the model's id (the link's hello carried all 32)
//       16  u32  epoch of the worker's slice set that the coordinator has in mind
//       20  u32  layer
//       24  u32  n_rows: rows of hidden state below
//       28  u32  n_pairs
//       32  u32  n_in: numbers in a row
//       36  u8   mode (Mode)
//       37  u8   type of rows both ways (RowType)
//       38  u8   product: 0 for the experts' whole FFN; else the role of one weight, and the rows' products by it alone
//                come back (exact mode only): 1 gate, 2 up, 3 down, 4 gate and up merged
//       39  u8   0
//       40  u64  deadline: from when on nobody wants the answer, in µs of the worker's clock (byte 28 of its answers);
//       0
//                while that is not known
//       48  n_pairs × { u16 row, u16 expert, f32 weight }
//        .  n_rows × n_in numbers: {n_in, n_rows} in ggml order
//
// Compute answer, one or several to a request: in exact mode a worker may send the rows in parts, in order, each as
// soon as it is computed. It computes pairs of one expert together when they stand together in the request.
//
//   byte 0  u64  request id
//        8  u16  outcome (Outcome)
//       10  u8   type of rows (RowType)
//       11  u8   0
//       12  u32  n_rows: in exact mode a row a pair, in the pairs' order; in partial mode the request's n_rows; 0
//       unless
//                done
//       16  u32  n_out: numbers in a row; of a whole FFN n_in
//       20  u32  time spent computing, µs: of this part
//       24  u32  first: how many rows of this answer were in earlier parts
//       28  u64  the worker's clock when it sent this, µs from some moment of its own; it never runs backwards
//       36  n_rows × n_out numbers
//
// With 8 pairs a request takes 120 bytes besides its rows, frame header included.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/bytes.h"
#include "base/error.h"

namespace linkcpp::wire {

enum class Mode : std::uint8_t {
    exact = 1,    // one row a pair comes back, not weighted
    partial = 2,  // one row a token comes back: the weighted sum over the token's pairs in this request
};

enum class RowType : std::uint8_t { f32 = 1, f16 = 2 };
constexpr std::size_t bytes_per_value(RowType type) {
    return type == RowType::f16 ? 2 : 4;
}

enum class Outcome : std::uint16_t {
    done = 0,
    malformed = 1,      // the frame contradicts itself or the model
    unknown_model = 2,  // the worker serves another model
    stale_epoch = 3,    // the worker's slice set has changed
    not_held = 4,       // a layer or expert that this worker does not hold
    overloaded = 5,
    failed = 6,   // the device refused
    expired = 7,  // the request was too old when its turn came
};
std::string_view to_string(Outcome outcome);

struct Pair {
    std::uint16_t row = 0;     // index of the row in this request
    std::uint16_t expert = 0;  // the model's own expert id
    float weight = 0;          // the router's weight; used in partial mode only

    bool operator==(const Pair&) const = default;
};
static_assert(sizeof(Pair) == 8);

// How often a worker that owes an answer says that it lives (control message Pulse).
inline constexpr std::chrono::milliseconds kPulseEvery{100};

inline constexpr std::uint8_t kMaxProduct = 4;

inline constexpr std::uint32_t kMaxRows = 65'535;
inline constexpr std::uint32_t kMaxPairs = 1u << 20;

struct ComputeRequest {
    static constexpr std::size_t kHeaderBytes = 48;
    std::uint64_t id = 0;
    std::uint64_t model = 0;
    std::uint32_t epoch = 0;
    std::uint32_t layer = 0;
    std::uint32_t n_rows = 0;
    std::uint32_t n_pairs = 0;
    std::uint32_t n_in = 0;
    Mode mode = Mode::exact;
    RowType row_type = RowType::f32;
    std::uint8_t product = 0;
    std::uint64_t deadline_us = 0;

    std::size_t row_bytes() const { return n_in * bytes_per_value(row_type); }
    std::size_t payload_bytes() const { return kHeaderBytes + n_pairs * sizeof(Pair) + n_rows * row_bytes(); }
};

// Writes header and pairs (pairs.size() == request.n_pairs) to the front of `payload`, whose size is
// request.payload_bytes(); returns the place for the rows. The caller has checked the limits.
std::span<std::byte> encode(const ComputeRequest& request, std::span<const Pair> pairs, std::span<std::byte> payload);

struct DecodedRequest {
    ComputeRequest header;
    ByteView pairs;  // n_pairs × 8 bytes, not aligned; every row index is below n_rows
    ByteView rows;   // n_rows × row_bytes(), not aligned

    Pair pair(std::size_t i) const {
        Pair p;
        std::memcpy(&p, pairs.data() + i * sizeof(Pair), sizeof(Pair));
        return p;
    }
};
// The views point into `payload`. Errors: corrupt.
Result<DecodedRequest> decode_compute_request(ByteView payload);

struct ComputeAnswer {
    static constexpr std::size_t kHeaderBytes = 36;
    std::uint64_t id = 0;
    Outcome outcome = Outcome::done;
    RowType row_type = RowType::f32;
    std::uint32_t n_rows = 0;
    std::uint32_t n_out = 0;
    std::uint32_t compute_us = 0;
    std::uint32_t first = 0;
    std::uint64_t clock_us = 0;

    std::size_t payload_bytes() const { return kHeaderBytes + n_rows * std::size_t{n_out} * bytes_per_value(row_type); }
};

// Writes the header to the front of `payload` (kHeaderBytes or longer); returns what is behind it, the place for the
// rows.
std::span<std::byte> encode(const ComputeAnswer& answer, std::span<std::byte> payload);

struct DecodedAnswer {
    ComputeAnswer header;
    ByteView rows;  // not aligned
};
// The view points into `payload`. Errors: corrupt.
Result<DecodedAnswer> decode_compute_answer(ByteView payload);

}  // namespace linkcpp::wire
