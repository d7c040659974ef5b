#include "wire/frame.h"

#include <gtest/gtest.h>

namespace linkcpp::wire {
namespace {

TEST(Frame, header_has_golden_bytes) {
    EXPECT_EQ(to_hex(encode(FrameHeader{0x01020304, FrameType::compute_request})), "0403020102000000");
}

TEST(Frame, header_round_trips) {
    const auto bytes = encode(FrameHeader{77, FrameType::compute_answer});
    const auto header = decode_frame_header(bytes, 77);
    ASSERT_TRUE(header);
    EXPECT_EQ(header->payload_bytes, 77u);
    EXPECT_EQ(header->type, FrameType::compute_answer);
}

TEST(Frame, payload_over_the_limit_is_corrupt) {
    EXPECT_EQ(decode_frame_header(encode(FrameHeader{78, FrameType::control}), 77).error().kind, ErrorKind::corrupt);
}

TEST(Frame, unknown_type_or_flag_is_corrupt) {
    for (int type : {0, 5, 255}) {
        auto bytes = encode(FrameHeader{0, FrameType::control});
        bytes[4] = static_cast<std::byte>(type);
        EXPECT_EQ(decode_frame_header(bytes, 100).error().kind, ErrorKind::corrupt) << type;
    }
    auto bytes = encode(FrameHeader{0, FrameType::control});
    bytes[6] = std::byte{1};
    EXPECT_EQ(decode_frame_header(bytes, 100).error().kind, ErrorKind::corrupt);
}

}  // namespace
}  // namespace linkcpp::wire
