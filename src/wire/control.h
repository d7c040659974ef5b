// The wire format, part 3: control messages (control.fbs), as plain structs with owned members (fb::HelloT, …).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/sha256.h"
#include "wire/control_generated.h"

namespace linkcpp::wire {

using fb::ControlT;

// Features that this release speaks, carried in hellos. Peers use what both sides name.
std::vector<std::string> features();

// One message as the payload of a `control` frame.
template <class Message>
Bytes encode_control(Message message);
Bytes encode_control(const ControlT& control);

// Verifies the buffer, then unpacks it. The result's body is never empty. Errors: corrupt, unsupported (a message that
// a later release has added: skip it).
Result<std::unique_ptr<ControlT>> decode_control(ByteView payload);

// Model ids travel as 32 bytes. Errors: corrupt.
Result<Digest> decode_digest(const std::vector<std::uint8_t>& bytes);
std::vector<std::uint8_t> encode_digest(const Digest& digest);

// A set of slices, layer by layer, both ascending.
struct LayerExperts {
    std::uint32_t layer = 0;
    std::vector<std::uint16_t> experts;
    bool operator==(const LayerExperts&) const = default;
};
using SliceSet = std::vector<LayerExperts>;
std::size_t n_slices(const SliceSet& slices);
// Errors: corrupt (not ascending, or over the limits of a model).
Result<SliceSet> decode_slices(const std::vector<std::unique_ptr<fb::LayerSlicesT>>& slices);
std::vector<std::unique_ptr<fb::LayerSlicesT>> encode_slices(const SliceSet& slices);

template <class Message>
Bytes encode_control(Message message) {
    ControlT control;
    control.body.Set(std::move(message));
    return encode_control(control);
}

}  // namespace linkcpp::wire
