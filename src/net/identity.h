// Who a process is: a key pair (ECDSA P-256) with a self-signed certificate. Peers know each other by the fingerprint
// of the key: SHA-256 over its SubjectPublicKeyInfo, what `curl --pinnedpubkey sha256//…` takes in base64.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "base/error.h"
#include "base/sha256.h"

struct evp_pkey_st;
struct x509_st;

namespace linkcpp::net {

class Identity {
  public:
    // Reads NAME.pem (key and certificate, mode 0600) from `dir`, or makes it. Errors: corrupt (not a key and its
    // certificate), failed (disk).
    static Result<Identity> load_or_make(const std::filesystem::path& dir, std::string_view name);
    // A key for this process alone.
    static Result<Identity> make();

    const Digest& fingerprint() const { return fingerprint_; }
    // What an operator compares and curl takes: "sha256//<base64>".
    std::string pin() const;
    evp_pkey_st* key() const { return key_.get(); }
    x509_st* certificate() const { return certificate_.get(); }

  private:
    struct Free {
        void operator()(evp_pkey_st* key) const;
        void operator()(x509_st* certificate) const;
    };
    static Result<Identity> from_pem(std::string_view pem);
    Result<std::string> to_pem() const;

    std::unique_ptr<evp_pkey_st, Free> key_;
    std::unique_ptr<x509_st, Free> certificate_;
    Digest fingerprint_;
};

// Errors: corrupt.
Result<Digest> fingerprint_of(x509_st* certificate);
std::string to_pin(const Digest& fingerprint);

// What OpenSSL's error queue of this thread says, emptied.
std::string openssl_error();

}  // namespace linkcpp::net
