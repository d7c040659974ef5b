// Files with holes, which take no space on disk and are zeros when read.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/bytes.h"
#include "base/error.h"

namespace linkcpp {

// Like read_at() (base/file.h), but holes are not read through the page cache: a large file that is mostly holes would
// push everything else out of it. The file's position moves.
Status read_sparse(int fd, std::span<std::byte> to, std::uint64_t offset, std::string_view name);

}  // namespace linkcpp
