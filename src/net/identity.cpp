#include "net/identity.h"

#include <array>

#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include "base/file.h"

namespace linkcpp::net {
namespace {

constexpr long kValidSeconds = 60l * 60 * 24 * 365 * 30;  // the key's fingerprint is what counts; 30 years

using BioPtr = std::unique_ptr<BIO, decltype([](BIO* bio) { BIO_free(bio); })>;

Status sign_own_certificate(X509* certificate, EVP_PKEY* key) {
    X509_set_version(certificate, X509_VERSION_3);
    ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
    X509_gmtime_adj(X509_getm_notBefore(certificate), -60l * 60 * 24);
    X509_gmtime_adj(X509_getm_notAfter(certificate), kValidSeconds);
    X509_NAME* name = X509_get_subject_name(certificate);
    X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>("linkcpp"), -1, -1, 0);
    if (X509_set_issuer_name(certificate, name) != 1 || X509_set_pubkey(certificate, key) != 1 ||
        X509_sign(certificate, key, EVP_sha256()) == 0) {
        return fail(ErrorKind::failed, "certificate: {}", openssl_error());
    }
    return {};
}

}  // namespace

std::string openssl_error() {
    std::string text;
    while (const unsigned long code = ERR_get_error()) {
        if (text.empty()) {
            const char* reason = ERR_reason_error_string(code);
            text = reason != nullptr ? reason : fmt::format("error {:#x}", code);
        }
    }
    return text.empty() ? "unknown TLS error" : text;
}

void Identity::Free::operator()(evp_pkey_st* key) const {
    EVP_PKEY_free(key);
}

void Identity::Free::operator()(x509_st* certificate) const {
    X509_free(certificate);
}

Result<Digest> fingerprint_of(x509_st* certificate) {
    unsigned char* der = nullptr;
    const int length = i2d_X509_PUBKEY(X509_get_X509_PUBKEY(certificate), &der);
    if (length <= 0) { return fail(ErrorKind::corrupt, "certificate: {}", openssl_error()); }
    const Digest digest = sha256({reinterpret_cast<const std::byte*>(der), static_cast<std::size_t>(length)});
    OPENSSL_free(der);
    return digest;
}

std::string to_pin(const Digest& fingerprint) {
    std::array<unsigned char, 64> text{};
    EVP_EncodeBlock(text.data(), reinterpret_cast<const unsigned char*>(fingerprint.bytes.data()),
                    static_cast<int>(fingerprint.bytes.size()));
    return fmt::format("sha256//{}", reinterpret_cast<const char*>(text.data()));
}

std::string Identity::pin() const {
    return to_pin(fingerprint_);
}

Result<Identity> Identity::make() {
    Identity identity;
    identity.key_.reset(EVP_EC_gen("P-256"));
    identity.certificate_.reset(X509_new());
    if (!identity.key_ || !identity.certificate_) { return fail(ErrorKind::failed, "key: {}", openssl_error()); }
    LINKCPP_CHECK(sign_own_certificate(identity.certificate_.get(), identity.key_.get()));
    LINKCPP_TRY(identity.fingerprint_, fingerprint_of(identity.certificate_.get()));
    return identity;
}

Result<Identity> Identity::from_pem(std::string_view pem) {
    const BioPtr bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
    Identity identity;
    identity.key_.reset(PEM_read_bio_PrivateKey(bio.get(), nullptr, nullptr, nullptr));
    identity.certificate_.reset(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
    if (!identity.key_ || !identity.certificate_ ||
        X509_check_private_key(identity.certificate_.get(), identity.key_.get()) != 1) {
        return fail(ErrorKind::corrupt, "expected a private key and its certificate: {}", openssl_error());
    }
    LINKCPP_TRY(identity.fingerprint_, fingerprint_of(identity.certificate_.get()));
    return identity;
}

Result<std::string> Identity::to_pem() const {
    const BioPtr bio(BIO_new(BIO_s_mem()));
    if (!bio || PEM_write_bio_PrivateKey(bio.get(), key_.get(), nullptr, nullptr, 0, nullptr, nullptr) != 1 ||
        PEM_write_bio_X509(bio.get(), certificate_.get()) != 1) {
        return fail(ErrorKind::failed, "key: {}", openssl_error());
    }
    char* text = nullptr;
    const long length = BIO_get_mem_data(bio.get(), &text);
    return std::string(text, static_cast<std::size_t>(length));
}

Result<Identity> Identity::load_or_make(const std::filesystem::path& dir, std::string_view name) {
    const std::filesystem::path path = dir / fmt::format("{}.pem", name);
    if (auto pem = read_file(path, 64u << 10)) {
        auto identity = from_pem(*pem);
        if (!identity) {
            return fail(ErrorKind::corrupt, "{}: {}; delete it to get a new key", path.string(),
                        identity.error().message);
        }
        return identity;
    } else if (pem.error().kind != ErrorKind::not_found) {
        return std::unexpected(pem.error());
    }
    LINKCPP_TRY(Identity identity, make());
    LINKCPP_TRY(const std::string pem, identity.to_pem());
    LINKCPP_CHECK(write_file_atomically(path, pem, 0600));
    return identity;
}

}  // namespace linkcpp::net
