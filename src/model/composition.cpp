#include "model/composition.h"

#include <algorithm>
#include <cerrno>

#include <unistd.h>

#include "base/platform.h"
#include "base/sparse.h"

namespace linkcpp::model {
namespace {

// Copied at once: enough for full speed, little enough to draw progress.
constexpr std::uint64_t kCopyBytes = 64u << 20;
// Read at once, and hashed while it is still in the caches.
constexpr std::uint64_t kHashBytes = 256u << 10;

}  // namespace

void Composition::append(std::uint64_t n_bytes, std::variant<Bytes, Stretch, Hole> what) {
    if (n_bytes == 0) { return; }
    if (!std::holds_alternative<Hole>(what)) { data_bytes_ += n_bytes; }
    pieces_.push_back({.begin = n_bytes_, .n_bytes = n_bytes, .what = std::move(what)});
    n_bytes_ += n_bytes;
}

void Composition::add(Bytes bytes) {
    const std::uint64_t n_bytes = bytes.size();
    append(n_bytes, std::move(bytes));
}

void Composition::add(const TensorInfo& tensor, std::uint64_t offset, std::uint64_t n_bytes) {
    append(n_bytes, Stretch{.split = tensor.split, .offset = tensor.offset + offset});
}

void Composition::add_hole(std::uint64_t n_bytes) {
    append(n_bytes, Hole{});
}

Bytes Composition::own_bytes() const {
    Bytes all;
    for (const Piece& piece : pieces_) {
        if (const auto* bytes = std::get_if<Bytes>(&piece.what)) {
            all.insert(all.end(), bytes->begin(), bytes->end());
        }
    }
    return all;
}

Status Composition::read(std::uint64_t offset, std::span<std::byte> to) const {
    auto piece = std::ranges::upper_bound(pieces_, offset, {}, &Piece::begin);
    if (piece != pieces_.begin()) { --piece; }
    for (; !to.empty(); ++piece) {
        const std::uint64_t skipped = offset - piece->begin;
        const std::span<std::byte> part = to.first(std::min<std::uint64_t>(to.size(), piece->n_bytes - skipped));
        if (const auto* bytes = std::get_if<Bytes>(&piece->what)) {
            std::ranges::copy(ByteView(*bytes).subspan(skipped, part.size()), part.begin());
        } else if (const auto* stretch = std::get_if<Stretch>(&piece->what)) {
            LINKCPP_CHECK(read_sparse(source_->fd(stretch->split), part, stretch->offset + skipped,
                                      source_->path(stretch->split).string()));
        } else {
            std::ranges::fill(part, std::byte{0});
        }
        to = to.subspan(part.size());
        offset += part.size();
    }
    return {};
}

Result<Digest> Composition::hash(std::uint64_t n_bytes) const {
    Sha256 hash;
    Bytes buffer(std::min(kHashBytes, n_bytes));
    for (std::uint64_t at = 0; at < n_bytes; at += buffer.size()) {
        const auto piece = std::span(buffer).first(std::min<std::uint64_t>(buffer.size(), n_bytes - at));
        LINKCPP_CHECK(read(at, piece));
        hash.add(piece);
    }
    return hash.finish();
}

Status Composition::write(const AtomicFile& to, Progress& progress) const {
    // Whatever is not written afterwards stays a hole.
    if (::ftruncate(to.fd(), static_cast<off_t>(n_bytes_)) != 0) { return fail_errno(errno, to.name()); }
    for (const Piece& piece : pieces_) {
        if (const auto* bytes = std::get_if<Bytes>(&piece.what)) {
            LINKCPP_CHECK(write_at(to.fd(), *bytes, piece.begin, to.name()));
            progress.add(bytes->size());
        }
        const auto* stretch = std::get_if<Stretch>(&piece.what);
        for (std::uint64_t at = 0; stretch != nullptr && at < piece.n_bytes; at += kCopyBytes) {
            const std::uint64_t n = std::min(kCopyBytes, piece.n_bytes - at);
            LINKCPP_CHECK(copy_range(source_->fd(stretch->split), stretch->offset + at, to.fd(), piece.begin + at, n,
                                     source_->path(stretch->split).string(), to.name()));
            progress.add(n);
        }
    }
    return {};
}

}  // namespace linkcpp::model
