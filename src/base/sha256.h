// SHA-256 (FIPS 180-4), by OpenSSL, which uses the processor's own instructions where it has them.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/bytes.h"

struct evp_md_ctx_st;

namespace linkcpp {

struct Digest {
    std::array<std::byte, 32> bytes{};

    auto operator<=>(const Digest&) const = default;
    std::string hex() const { return to_hex(bytes); }
    // The first 8 bytes as a little-endian number: a short name, never proof of identity on its own.
    std::uint64_t prefix() const { return load_le<std::uint64_t>(bytes.data()); }
    static std::optional<Digest> from_hex(std::string_view text);
};

// One hash in the making. Movable, not copyable; one thread at a time.
class Sha256 {
  public:
    Sha256();
    ~Sha256();
    Sha256(Sha256&&) noexcept;
    Sha256& operator=(Sha256&&) noexcept;

    void add(ByteView bytes);
    // The digest of all that was added; the object then starts anew.
    Digest finish();

  private:
    struct Free {
        void operator()(evp_md_ctx_st* context) const;
    };
    std::unique_ptr<evp_md_ctx_st, Free> context_;
};

Digest sha256(ByteView bytes);

}  // namespace linkcpp

template <>
struct std::hash<linkcpp::Digest> {
    std::size_t operator()(const linkcpp::Digest& digest) const noexcept { return digest.prefix(); }
};
