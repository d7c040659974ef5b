#include "wire/frame.h"

namespace linkcpp::wire {

std::array<std::byte, FrameHeader::kBytes> encode(const FrameHeader& header) {
    std::array<std::byte, FrameHeader::kBytes> bytes{};
    store_le<std::uint32_t>(bytes.data(), header.payload_bytes);
    store_le<std::uint16_t>(bytes.data() + 4, static_cast<std::uint16_t>(header.type));
    return bytes;
}

Result<FrameHeader> decode_frame_header(std::span<const std::byte, FrameHeader::kBytes> bytes, std::uint32_t limit) {
    const auto payload_bytes = load_le<std::uint32_t>(bytes.data());
    const auto type = load_le<std::uint16_t>(bytes.data() + 4);
    const auto flags = load_le<std::uint16_t>(bytes.data() + 6);
    if (type < static_cast<std::uint16_t>(FrameType::control) ||
        type > static_cast<std::uint16_t>(FrameType::slice_bytes)) {
        return fail(ErrorKind::corrupt, "frame type: expected 1 to 4, got {}", type);
    }
    if (flags != 0) { return fail(ErrorKind::corrupt, "frame flags: expected 0, got {:#x}", flags); }
    if (payload_bytes > limit) {
        return fail(ErrorKind::corrupt, "frame length: expected at most {}, got {}", limit, payload_bytes);
    }
    return FrameHeader{payload_bytes, static_cast<FrameType>(type)};
}

}  // namespace linkcpp::wire
