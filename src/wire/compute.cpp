#include "wire/compute.h"

#include "wire/frame.h"

namespace linkcpp::wire {
namespace {

// Limits that keep every product below far from 2^64, whatever a peer writes.
constexpr std::uint32_t kMaxWidth = 1u << 18;

Result<RowType> decode_row_type(std::byte value) {
    const auto type = static_cast<RowType>(value);
    if (type == RowType::f32 || type == RowType::f16) { return type; }
    return fail(ErrorKind::corrupt, "row type: expected 1 or 2, got {}", std::to_integer<int>(value));
}

Status check_rows(std::uint64_t n_rows, std::uint64_t width) {
    if (width == 0 || width > kMaxWidth) {
        return fail(ErrorKind::corrupt, "numbers in a row: expected 1 to {}, got {}", kMaxWidth, width);
    }
    if (n_rows > kMaxPairs) { return fail(ErrorKind::corrupt, "rows: expected at most {}, got {}", kMaxPairs, n_rows); }
    return {};
}

Status check_length(std::uint64_t expected, std::size_t got) {
    if (expected == got) { return {}; }
    return fail(ErrorKind::corrupt, "compute frame length: expected {}, got {}", expected, got);
}

}  // namespace

std::string_view to_string(Outcome outcome) {
    switch (outcome) {
        case Outcome::done: return "done";
        case Outcome::malformed: return "malformed request";
        case Outcome::unknown_model: return "unknown model";
        case Outcome::stale_epoch: return "stale epoch";
        case Outcome::not_held: return "expert not held";
        case Outcome::overloaded: return "overloaded";
        case Outcome::failed: return "device failed";
        case Outcome::expired: return "request too old";
    }
    return "unknown outcome";
}

std::span<std::byte> encode(const ComputeRequest& request, std::span<const Pair> pairs, std::span<std::byte> payload) {
    std::byte* p = payload.data();
    store_le(p, request.id);
    store_le(p + 8, request.model);
    store_le(p + 16, request.epoch);
    store_le(p + 20, request.layer);
    store_le(p + 24, request.n_rows);
    store_le(p + 28, request.n_pairs);
    store_le(p + 32, request.n_in);
    store_le(p + 36, static_cast<std::uint8_t>(request.mode));
    store_le(p + 37, static_cast<std::uint8_t>(request.row_type));
    store_le(p + 38, request.product);
    store_le<std::uint8_t>(p + 39, 0);
    store_le(p + 40, request.deadline_us);
    std::memcpy(p + ComputeRequest::kHeaderBytes, pairs.data(), pairs.size_bytes());
    return payload.subspan(ComputeRequest::kHeaderBytes + pairs.size_bytes());
}

Result<DecodedRequest> decode_compute_request(ByteView payload) {
    if (payload.size() < ComputeRequest::kHeaderBytes) {
        return fail(ErrorKind::corrupt, "compute request: expected at least {} bytes, got {}",
                    ComputeRequest::kHeaderBytes, payload.size());
    }
    const std::byte* p = payload.data();
    DecodedRequest request;
    ComputeRequest& header = request.header;
    header.id = load_le<std::uint64_t>(p);
    header.model = load_le<std::uint64_t>(p + 8);
    header.epoch = load_le<std::uint32_t>(p + 16);
    header.layer = load_le<std::uint32_t>(p + 20);
    header.n_rows = load_le<std::uint32_t>(p + 24);
    header.n_pairs = load_le<std::uint32_t>(p + 28);
    header.n_in = load_le<std::uint32_t>(p + 32);
    header.mode = static_cast<Mode>(p[36]);
    if (header.mode != Mode::exact && header.mode != Mode::partial) {
        return fail(ErrorKind::corrupt, "mode: expected 1 or 2, got {}", std::to_integer<int>(p[36]));
    }
    LINKCPP_TRY(header.row_type, decode_row_type(p[37]));
    header.product = load_le<std::uint8_t>(p + 38);
    if (header.product > kMaxProduct || (header.product != 0 && header.mode != Mode::exact)) {
        return fail(ErrorKind::corrupt, "product: expected 0, or 1 to {} in exact mode, got {}", kMaxProduct,
                    header.product);
    }
    if (p[39] != std::byte{0}) { return fail(ErrorKind::corrupt, "compute request: byte 39 is not 0"); }
    header.deadline_us = load_le<std::uint64_t>(p + 40);
    LINKCPP_CHECK(check_rows(header.n_rows, header.n_in));
    if (header.n_rows == 0 || header.n_rows > kMaxRows || header.n_pairs < header.n_rows ||
        header.n_pairs > kMaxPairs) {
        return fail(ErrorKind::corrupt,
                    "compute request: expected 1 to {} rows with at least one pair each, got {} and {}", kMaxRows,
                    header.n_rows, header.n_pairs);
    }
    LINKCPP_CHECK(check_length(header.payload_bytes(), payload.size()));
    request.pairs = payload.subspan(ComputeRequest::kHeaderBytes, header.n_pairs * sizeof(Pair));
    request.rows = payload.subspan(ComputeRequest::kHeaderBytes + request.pairs.size());
    for (std::size_t i = 0; i < header.n_pairs; ++i) {
        const std::uint32_t row = request.pair(i).row;
        if (row < header.n_rows) { continue; }
        return fail(ErrorKind::corrupt, "pair {}: expected a row below {}, got {}", i, header.n_rows, row);
    }
    return request;
}

std::span<std::byte> encode(const ComputeAnswer& answer, std::span<std::byte> payload) {
    std::byte* p = payload.data();
    store_le(p, answer.id);
    store_le(p + 8, static_cast<std::uint16_t>(answer.outcome));
    store_le(p + 10, static_cast<std::uint8_t>(answer.row_type));
    store_le<std::uint8_t>(p + 11, 0);
    store_le(p + 12, answer.n_rows);
    store_le(p + 16, answer.n_out);
    store_le(p + 20, answer.compute_us);
    store_le(p + 24, answer.first);
    store_le(p + 28, answer.clock_us);
    return payload.subspan(ComputeAnswer::kHeaderBytes);
}

Result<DecodedAnswer> decode_compute_answer(ByteView payload) {
    if (payload.size() < ComputeAnswer::kHeaderBytes) {
        return fail(ErrorKind::corrupt, "compute answer: expected at least {} bytes, got {}",
                    ComputeAnswer::kHeaderBytes, payload.size());
    }
    const std::byte* p = payload.data();
    DecodedAnswer answer;
    ComputeAnswer& header = answer.header;
    header.id = load_le<std::uint64_t>(p);
    const auto outcome = load_le<std::uint16_t>(p + 8);
    constexpr auto kLast = static_cast<std::uint16_t>(Outcome::expired);
    if (outcome > kLast) { return fail(ErrorKind::corrupt, "outcome: expected 0 to {}, got {}", kLast, outcome); }
    header.outcome = static_cast<Outcome>(outcome);
    LINKCPP_TRY(header.row_type, decode_row_type(p[10]));
    if (p[11] != std::byte{0}) { return fail(ErrorKind::corrupt, "compute answer: byte 11 is not 0"); }
    header.n_rows = load_le<std::uint32_t>(p + 12);
    header.n_out = load_le<std::uint32_t>(p + 16);
    header.compute_us = load_le<std::uint32_t>(p + 20);
    header.first = load_le<std::uint32_t>(p + 24);
    header.clock_us = load_le<std::uint64_t>(p + 28);
    LINKCPP_CHECK(check_rows(header.n_rows, header.n_out));
    if (header.first > kMaxPairs) {
        return fail(ErrorKind::corrupt, "compute answer: row {} of at most {}", header.first, kMaxPairs);
    }
    if (header.outcome != Outcome::done && header.n_rows != 0) {
        return fail(ErrorKind::corrupt, "compute answer: '{}' with {} rows", to_string(header.outcome), header.n_rows);
    }
    LINKCPP_CHECK(check_length(header.payload_bytes(), payload.size()));
    answer.rows = payload.subspan(ComputeAnswer::kHeaderBytes);
    return answer;
}

}  // namespace linkcpp::wire
