// The record of a probe: what was computed, where, and what came out, as a small GGUF that machines exchange. It has
// all that is needed to repeat the probe, but for the slices themselves, which it names by their hashes.
//
// Metadata: "general.architecture" = "linkcpp-probe", and under "linkcpp.probe.":
//   version            uint32, 1
//   seed, n_tokens     uint64, uint32: of make_input()
//   experts            uint32 array: the experts that the input was made from, ids of the model, in that order
//   n_expert           uint32: experts the whole layer has
//   manifest           a manifest (model/manifest.h) of one layer whose experts are those used, in ascending order of
//                      their ids: shapes, types, activation, and the SHA-256 of each slice
//   device, description, backend, ggml_version, ggml_commit, release, machine   strings
//   driver, features   string arrays
//   rounding           string array: "PART INPUT INNER" for each part whose rounding was recognised (rounding.h)
// Tensors: for each part its name, F32, {n, n_rows}.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "expert/device.h"
#include "expert/rounding.h"
#include "model/manifest.h"
#include "trust/probe.h"
#include "trust/shard_file.h"

namespace linkcpp::trust {

// Where a probe was computed, for people and for the tolerance.
struct Place {
    std::string device;
    std::string description;
    std::string backend;
    std::string ggml_version;
    std::string ggml_commit;
    std::string release;
    std::string machine;  // "x86_64"
    std::vector<std::string> driver;
    std::vector<std::string> features;

    bool operator==(const Place&) const = default;
};

// Of a device on which something was computed just now.
Place place_of(const expert::Device& device);

// The device that is no device: the double-precision reference.
inline constexpr std::string_view kReferenceDevice = "reference";

struct Record {
    std::uint64_t seed = 0;
    std::uint32_t n_tokens = 0;
    std::vector<std::uint16_t> experts;
    std::uint32_t n_expert = 0;
    model::Manifest manifest;
    Place place;
    std::map<Part, expert::FfnRounding> roundings;
    ProbeRows rows;

    // As in the whole model.
    model::MoeLayer layer() const;
    // The same on every machine. Errors: those of make_input().
    Result<ProbeInput> input() const;
};

// Reads and hashes the slices that the input uses. What came out is left empty.
Result<Record> begin_record(const ShardFile& shard, const ProbeInput& input);

Status write_record(const Record& record, const std::filesystem::path& path);
// Everything in it is checked. Errors: those of GgufFile::open(), invalid (another kind of file), corrupt, unsupported
// (of a later version).
Result<Record> read_record(const std::filesystem::path& path);

}  // namespace linkcpp::trust
