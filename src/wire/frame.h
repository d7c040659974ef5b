// The wire format, part 1: frames. docs/wire-format.md is the same in prose; the two change together.
//
//   byte 0  u32  payload length, without this header
//        4  u16  type (FrameType)
//        6  u16  flags, 0 for now: other bits are refused
//        8  ...  payload
//
// All numbers little-endian. Numbers are never reused.
#pragma once

#include <array>
#include <cstdint>

#include "base/bytes.h"
#include "base/error.h"

namespace linkcpp::wire {

enum class FrameType : std::uint16_t {
    control = 1,          // a FlatBuffers Control message (control.h)
    compute_request = 2,  // compute.h
    compute_answer = 3,   // compute.h
    slice_bytes = 4,      // bytes of a slice, as they are
};

struct FrameHeader {
    static constexpr std::size_t kBytes = 8;
    std::uint32_t payload_bytes = 0;
    FrameType type = FrameType::control;
};

// Upper bounds on payloads. A peer that has not said who it is gets the smallest.
inline constexpr std::uint32_t kMaxHelloBytes = 64u << 10;
inline constexpr std::uint32_t kMaxControlBytes = 32u << 20;
inline constexpr std::uint32_t kMaxComputeBytes = 256u << 20;
inline constexpr std::uint32_t kMaxSliceBytes = 256u << 10;   // of one frame between neighbours
inline constexpr std::uint32_t kMinComputeLimit = 32u << 20;  // nobody may take less on a data link

std::array<std::byte, FrameHeader::kBytes> encode(const FrameHeader& header);

// `limit`: the largest payload accepted now. Errors: corrupt (unknown type or flags, payload over the limit).
Result<FrameHeader> decode_frame_header(std::span<const std::byte, FrameHeader::kBytes> bytes, std::uint32_t limit);

}  // namespace linkcpp::wire
