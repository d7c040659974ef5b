#include "base/sha256.h"

#include <algorithm>
#include <new>

#include <openssl/evp.h>

namespace linkcpp {

std::optional<Digest> Digest::from_hex(std::string_view text) {
    const auto bytes = linkcpp::from_hex(text);
    if (!bytes || bytes->size() != 32) { return std::nullopt; }
    Digest digest;
    std::ranges::copy(*bytes, digest.bytes.begin());
    return digest;
}

void Sha256::Free::operator()(evp_md_ctx_st* context) const {
    EVP_MD_CTX_free(context);
}

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
    // EVP_DigestInit_ex fails only when memory is short or SHA-256 was configured away.
    if (!context_ || EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) != 1) { throw std::bad_alloc(); }
}

Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::add(ByteView bytes) {
    EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size());
}

Digest Sha256::finish() {
    Digest digest;
    EVP_DigestFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(digest.bytes.data()), nullptr);
    EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr);
    return digest;
}

Digest sha256(ByteView bytes) {
    Sha256 hash;
    hash.add(bytes);
    return hash.finish();
}

}  // namespace linkcpp
