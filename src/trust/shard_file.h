// What a probe can be made of: some experts of one layer, from a file of slices or from a whole model.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "model/moe.h"
#include "trust/truth.h"

namespace linkcpp::trust {

struct ShardFile {
    std::string architecture;
    std::string name;                    // of the model, may be empty
    model::MoeLayer layer;               // as in the whole model
    std::vector<std::uint16_t> experts;  // ids of the model
    SliceReader read;                    // one thread at a time; keeps the file open
};

// `layer`: of a whole model, its first by default. Errors: those of GgufFile::open(), open_slices() and read_moe(),
// not_found (no such layer).
Result<ShardFile> open_shard(const std::filesystem::path& path, std::optional<std::uint32_t> layer = {});

}  // namespace linkcpp::trust
