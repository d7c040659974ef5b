// Who was given what, kept across starts of the hub, so that workers that come back find their slices where they were:
// JSON in its state folder, one file for a model and a port. It is no secret and no authority: without it slices are
// placed anew.
#pragma once

#include <filesystem>
#include <vector>

#include "base/error.h"
#include "hub/swarm.h"

namespace linkcpp::hub {

// `dir`/placement-…json
std::filesystem::path placement_path(const std::filesystem::path& dir, const Digest& model_id, std::uint16_t port);

// Empty when there is no file. Errors: corrupt, failed.
Result<std::vector<RememberedWorker>> read_placement(const std::filesystem::path& path, const model::MoeModel& model,
                                                     const Digest& model_id);
// Those of `workers` that were given something, or are to get nothing. Replaces the file.
Status write_placement(const std::map<std::string, WorkerRecord>& workers, const std::filesystem::path& path,
                       const model::MoeModel& model, const Digest& model_id);

}  // namespace linkcpp::hub
