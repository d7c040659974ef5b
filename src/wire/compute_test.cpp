#include "wire/compute.h"

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

#include "wire/frame.h"

namespace linkcpp::wire {
namespace {

// Two rows of two numbers, three pairs.
Bytes sample_request() {
    const ComputeRequest request{.id = 0x0807060504030201,
                                 .model = 0x18,
                                 .epoch = 5,
                                 .layer = 7,
                                 .n_rows = 2,
                                 .n_pairs = 3,
                                 .n_in = 2,
                                 .mode = Mode::partial,
                                 .row_type = RowType::f32,
                                 .deadline_us = 0x0a0b};
    const std::array pairs{Pair{0, 258, 1.0f}, Pair{0, 3, 0.5f}, Pair{1, 4, -2.0f}};
    Bytes payload(request.payload_bytes());
    const auto rows = encode(request, pairs, payload);
    const std::array values{1.0f, 2.0f, 3.0f, 4.0f};
    std::ranges::copy(std::as_bytes(std::span(values)), rows.begin());
    return payload;
}

Bytes sample_answer() {
    const ComputeAnswer answer{.id = 0x0807060504030201,
                               .outcome = Outcome::done,
                               .row_type = RowType::f16,
                               .n_rows = 2,
                               .n_out = 3,
                               .compute_us = 9,
                               .first = 11,
                               .clock_us = 0x0c0d};
    Bytes payload(answer.payload_bytes());
    std::ranges::fill(encode(answer, payload), std::byte{0xab});
    return payload;
}

TEST(ComputeRequest, has_golden_bytes) {
    EXPECT_EQ(to_hex(sample_request()),
              "0102030405060708"
              "1800000000000000"
              "05000000"
              "07000000"
              "02000000"
              "03000000"
              "02000000"
              "02"
              "01"
              "0000"
              "0b0a000000000000"
              "00000201"
              "0000803f"
              "00000300"
              "0000003f"
              "01000400"
              "000000c0"
              "0000803f"
              "00000040"
              "00004040"
              "00008040");
}

TEST(ComputeRequest, round_trips) {
    const Bytes payload = sample_request();
    const auto request = decode_compute_request(payload);
    ASSERT_TRUE(request) << request.error().message;
    EXPECT_EQ(request->header.id, 0x0807060504030201u);
    EXPECT_EQ(request->header.layer, 7u);
    EXPECT_EQ(request->header.deadline_us, 0x0a0bu);
    EXPECT_EQ(request->header.mode, Mode::partial);
    EXPECT_EQ(request->pair(0), (Pair{0, 258, 1.0f}));
    EXPECT_EQ(request->pair(2), (Pair{1, 4, -2.0f}));
    EXPECT_EQ(request->rows.size(), 16u);
}

TEST(ComputeRequest, eight_pairs_fit_in_128_bytes_besides_the_row) {
    const ComputeRequest request{.n_rows = 1, .n_pairs = 8, .n_in = 3072};
    EXPECT_LE(FrameHeader::kBytes + request.payload_bytes(), 4 * 3072 + 128u);
}

TEST(ComputeRequest, every_truncation_and_extension_is_corrupt) {
    Bytes payload = sample_request();
    for (std::size_t n = 0; n < payload.size(); ++n) {
        EXPECT_EQ(decode_compute_request(ByteView(payload).first(n)).error().kind, ErrorKind::corrupt) << n;
    }
    payload.push_back({});
    EXPECT_EQ(decode_compute_request(payload).error().kind, ErrorKind::corrupt);
}

TEST(ComputeRequest, rows_that_do_not_exist_are_corrupt) {
    Bytes payload = sample_request();
    payload[ComputeRequest::kHeaderBytes + 16] = std::byte{2};  // row 2 of 2
    EXPECT_EQ(decode_compute_request(payload).error().kind, ErrorKind::corrupt);
}

TEST(ComputeRequest, one_product_is_asked_for_in_exact_mode_alone) {
    Bytes payload = sample_request();
    payload[38] = std::byte{3};
    EXPECT_EQ(decode_compute_request(payload).error().kind, ErrorKind::corrupt);
    payload[36] = std::byte{1};
    EXPECT_EQ(decode_compute_request(payload)->header.product, 3);
    payload[38] = std::byte{5};
    EXPECT_EQ(decode_compute_request(payload).error().kind, ErrorKind::corrupt);
    payload[38] = std::byte{0};
    payload[39] = std::byte{1};
    EXPECT_EQ(decode_compute_request(payload).error().kind, ErrorKind::corrupt);
}

TEST(ComputeRequest, absurd_counts_are_corrupt) {
    for (const std::size_t field : {24u, 28u, 32u}) {
        for (const std::uint32_t value : {0u, 0x7fffffffu, 0xffffffffu, 0x40000000u}) {
            Bytes payload = sample_request();
            store_le(payload.data() + field, value);
            EXPECT_EQ(decode_compute_request(payload).error().kind, ErrorKind::corrupt) << field << ' ' << value;
        }
    }
}

TEST(ComputeAnswer, round_trips) {
    const Bytes payload = sample_answer();
    const auto answer = decode_compute_answer(payload);
    ASSERT_TRUE(answer) << answer.error().message;
    EXPECT_EQ(answer->header.n_rows, 2u);
    EXPECT_EQ(answer->header.compute_us, 9u);
    EXPECT_EQ(answer->header.first, 11u);
    EXPECT_EQ(answer->header.clock_us, 0x0c0du);
    EXPECT_EQ(answer->rows.size(), 12u);
    EXPECT_EQ(to_hex(payload).substr(0, 72),
              "0102030405060708"
              "0000"
              "02"
              "00"
              "02000000"
              "03000000"
              "09000000"
              "0b000000"
              "0d0c000000000000");
}

TEST(ComputeAnswer, every_truncation_is_corrupt) {
    const Bytes payload = sample_answer();
    for (std::size_t n = 0; n < payload.size(); ++n) {
        EXPECT_EQ(decode_compute_answer(ByteView(payload).first(n)).error().kind, ErrorKind::corrupt) << n;
    }
}

TEST(ComputeAnswer, a_part_beyond_all_pairs_is_corrupt) {
    Bytes payload = sample_answer();
    store_le(payload.data() + 24, kMaxPairs + 1);
    EXPECT_EQ(decode_compute_answer(payload).error().kind, ErrorKind::corrupt);
}

TEST(ComputeAnswer, a_refusal_with_rows_is_corrupt) {
    Bytes payload = sample_answer();
    payload[8] = std::byte{4};
    EXPECT_EQ(decode_compute_answer(payload).error().kind, ErrorKind::corrupt);
}

TEST(Compute, random_bytes_never_decode_past_their_end) {
    std::mt19937 random(7);
    for (int i = 0; i < 20'000; ++i) {
        Bytes payload = i % 2 == 0 ? sample_request() : sample_answer();
        for (int flips = 0; flips < 3; ++flips) {
            payload[random() % payload.size()] ^= static_cast<std::byte>(1u << random() % 8);
        }
        if (const auto request = decode_compute_request(payload)) {
            EXPECT_EQ(ComputeRequest::kHeaderBytes + request->pairs.size() + request->rows.size(), payload.size());
        }
        if (const auto answer = decode_compute_answer(payload)) {
            EXPECT_EQ(ComputeAnswer::kHeaderBytes + answer->rows.size(), payload.size());
        }
    }
}

}  // namespace
}  // namespace linkcpp::wire
