#include "base/sparse.h"

#include <algorithm>

#include <unistd.h>

#include "base/file.h"

namespace linkcpp {

Status read_sparse(int fd, std::span<std::byte> to, std::uint64_t offset, std::string_view name) {
    const off_t data = ::lseek(fd, static_cast<off_t>(offset), SEEK_DATA);
    // Behind the last data there may be a hole, or the end of the file, which read_at() finds.
    const bool in_hole = data > 0 && static_cast<std::uint64_t>(data) > offset;
    const std::size_t n_zeros =
        in_hole ? std::min<std::uint64_t>(static_cast<std::uint64_t>(data) - offset, to.size()) : 0;
    std::ranges::fill(to.first(n_zeros), std::byte{0});
    return read_at(fd, to.subspan(n_zeros), offset + n_zeros, name);
}

}  // namespace linkcpp
