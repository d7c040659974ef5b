#include "net/link.h"

#include <algorithm>
#include <cerrno>

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>

namespace linkcpp::net {
namespace {

constexpr std::size_t kFirstBuffer = 64u << 10;
// A buffer that one large frame has stretched is given back when the frames are small again.
constexpr std::size_t kKeepBuffer = 4u << 20;

// Where a client's SSL keeps the fingerprint it expects.
int expected_index() {
    static const int index = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
    return index;
}

// Replaces chain building: self-signed certificates carry no chain, the key's fingerprint decides. TLS itself has
// proved that the peer owns the key.
int verify_by_fingerprint(X509_STORE_CTX* store, void* /*unused*/) {
    const auto* ssl = static_cast<SSL*>(X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx()));
    const auto* expected = static_cast<const Digest*>(SSL_get_ex_data(ssl, expected_index()));
    if (expected == nullptr) { return 1; }
    const auto actual = fingerprint_of(X509_STORE_CTX_get0_cert(store));
    if (actual && *actual == *expected) { return 1; }
    X509_STORE_CTX_set_error(store, X509_V_ERR_APPLICATION_VERIFICATION);
    return 0;
}

// OpenSSL's own socket BIO writes with write(2), which raises SIGPIPE when the peer is gone. The process may not be
// ours, so its signals are left alone and this BIO asks for none.
int bio_fd(BIO* bio) {
    return static_cast<int>(reinterpret_cast<std::intptr_t>(BIO_get_data(bio)));
}

int bio_result(BIO* bio, ssize_t n, int retry_flag) {
    BIO_clear_retry_flags(bio);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ENOTCONN)) {
        BIO_set_flags(bio, retry_flag | BIO_FLAGS_SHOULD_RETRY);
    }
    return static_cast<int>(n);
}

int bio_write(BIO* bio, const char* data, int length) {
    return bio_result(bio, ::send(bio_fd(bio), data, static_cast<std::size_t>(length), MSG_NOSIGNAL | MSG_DONTWAIT),
                      BIO_FLAGS_WRITE);
}

int bio_read(BIO* bio, char* data, int length) {
    return bio_result(bio, ::recv(bio_fd(bio), data, static_cast<std::size_t>(length), MSG_DONTWAIT), BIO_FLAGS_READ);
}

long bio_control(BIO* /*bio*/, int command, long /*number*/, void* /*data*/) {
    return command == BIO_CTRL_FLUSH ? 1 : 0;
}

BIO* make_bio(int fd) {
    static BIO_METHOD* const method = [] {
        BIO_METHOD* m = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "quiet socket");
        BIO_meth_set_write(m, bio_write);
        BIO_meth_set_read(m, bio_read);
        BIO_meth_set_ctrl(m, bio_control);
        return m;
    }();
    BIO* bio = BIO_new(method);
    BIO_set_data(bio, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)));
    BIO_set_init(bio, 1);
    return bio;
}

}  // namespace

void TlsContext::Free::operator()(ssl_ctx_st* context) const {
    SSL_CTX_free(context);
}

Result<TlsContext> TlsContext::make(const Identity& identity) {
    TlsContext tls;
    tls.context_.reset(SSL_CTX_new(TLS_method()));
    SSL_CTX* context = tls.context_.get();
    if (context == nullptr || SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 ||
        SSL_CTX_use_certificate(context, identity.certificate()) != 1 ||
        SSL_CTX_use_PrivateKey(context, identity.key()) != 1 ||
        SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256") != 1) {
        return fail(ErrorKind::failed, "TLS: {}", openssl_error());
    }
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
    SSL_CTX_set_cert_verify_callback(context, verify_by_fingerprint, nullptr);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_read_ahead(context, 1);
    // No resumption: a link lives long, and a ticket would be a second secret to guard.
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_num_tickets(context, 0);
    return tls;
}

void Link::FreeSsl::operator()(ssl_st* ssl) const {
    SSL_free(ssl);
}

Link::~Link() = default;

std::unique_ptr<Link> Link::plain(UniqueFd fd, std::string name) {
    return std::unique_ptr<Link>(new Link(std::move(fd), std::move(name)));
}

Result<std::unique_ptr<Link>> Link::tls(UniqueFd fd, std::string name, const TlsContext& context) {
    auto link = plain(std::move(fd), std::move(name));
    link->ssl_.reset(SSL_new(context.get()));
    if (!link->ssl_) { return fail(ErrorKind::failed, "TLS: {}", openssl_error()); }
    BIO* bio = make_bio(link->fd());
    SSL_set_bio(link->ssl_.get(), bio, bio);
    link->established_ = false;
    return link;
}

Result<std::unique_ptr<Link>> Link::tls_client(UniqueFd fd, std::string name, const TlsContext& context,
                                               const Digest& expected) {
    LINKCPP_TRY(std::unique_ptr<Link> link, tls(std::move(fd), std::move(name), context));
    link->expected_ = std::make_unique<Digest>(expected);
    SSL_set_ex_data(link->ssl_.get(), expected_index(), link->expected_.get());
    SSL_set_connect_state(link->ssl_.get());
    link->want_write_ = true;
    return link;
}

Result<std::unique_ptr<Link>> Link::tls_server(UniqueFd fd, std::string name, const TlsContext& context) {
    LINKCPP_TRY(std::unique_ptr<Link> link, tls(std::move(fd), std::move(name), context));
    SSL_set_accept_state(link->ssl_.get());
    return link;
}

short Link::events() const {
    return static_cast<short>(POLLIN | (want_write_ || (established_ && !out_.empty()) ? POLLOUT : 0));
}

std::unexpected<Error> Link::tls_error(int code, std::string_view what) {
    if (code == SSL_ERROR_ZERO_RETURN) { return fail(ErrorKind::disconnected, "{}: closed by the peer", name_); }
    if (code == SSL_ERROR_SYSCALL) {
        const int error = errno;
        ERR_clear_error();
        if (error == 0) { return fail(ErrorKind::disconnected, "{}: closed by the peer", name_); }
        return fail_errno(error, name_);
    }
    const bool wrong_key = ssl_ && SSL_get_verify_result(ssl_.get()) == X509_V_ERR_APPLICATION_VERIFICATION;
    const std::string reason = openssl_error();
    if (wrong_key) {
        return fail(ErrorKind::invalid,
                    "{}: it has another key than expected; if it was set up anew, use its new join line", name_);
    }
    // OpenSSL 3 reports a peer that vanished without a farewell as a protocol error.
    if (reason.find("unexpected eof") != std::string::npos) {
        return fail(ErrorKind::disconnected, "{}: closed by the peer", name_);
    }
    return fail(ErrorKind::corrupt, "{}: TLS {}: {}", name_, what, reason);
}

Result<bool> Link::handshake() {
    if (established_) { return true; }
    ERR_clear_error();
    errno = 0;
    const int done = SSL_do_handshake(ssl_.get());
    if (done != 1) {
        const int code = SSL_get_error(ssl_.get(), done);
        want_write_ = code == SSL_ERROR_WANT_WRITE;
        if (code == SSL_ERROR_WANT_READ || code == SSL_ERROR_WANT_WRITE) { return false; }
        return tls_error(code, "handshake");
    }
    want_write_ = false;
    LINKCPP_TRY(const Digest fingerprint, fingerprint_of(SSL_get0_peer_certificate(ssl_.get())));
    peer_ = fingerprint;
    established_ = true;
    return true;
}

Result<std::size_t> Link::write_some(ByteView bytes) {
    if (!ssl_) {
        while (true) {
            const ssize_t n = ::send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
            if (n >= 0) { return static_cast<std::size_t>(n); }
            if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOTCONN) { return 0; }
            if (errno != EINTR) { return fail_errno(errno, name_); }
        }
    }
    ERR_clear_error();
    errno = 0;
    std::size_t n = 0;
    const int done = SSL_write_ex(ssl_.get(), bytes.data(), bytes.size(), &n);
    if (done == 1) { return n; }
    const int code = SSL_get_error(ssl_.get(), done);
    if (code == SSL_ERROR_WANT_READ || code == SSL_ERROR_WANT_WRITE) { return 0; }
    return tls_error(code, "write");
}

Result<std::size_t> Link::read_some(std::span<std::byte> to) {
    if (!ssl_) {
        while (true) {
            const ssize_t n = ::recv(fd(), to.data(), to.size(), MSG_DONTWAIT);
            if (n > 0) { return static_cast<std::size_t>(n); }
            if (n == 0) { return fail(ErrorKind::disconnected, "{}: closed by the peer", name_); }
            if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOTCONN) { return 0; }
            if (errno != EINTR) { return fail_errno(errno, name_); }
        }
    }
    ERR_clear_error();
    errno = 0;
    std::size_t n = 0;
    const int done = SSL_read_ex(ssl_.get(), to.data(), to.size(), &n);
    if (done == 1) { return n; }
    const int code = SSL_get_error(ssl_.get(), done);
    want_write_ = code == SSL_ERROR_WANT_WRITE;
    if (code == SSL_ERROR_WANT_READ || code == SSL_ERROR_WANT_WRITE) { return 0; }
    return tls_error(code, "read");
}

void Link::enqueue(ByteView bytes) {
    out_.insert(out_.end(), bytes.begin(), bytes.end());
}

Status Link::send(wire::FrameType type, std::initializer_list<ByteView> parts) {
    std::size_t payload = 0;
    for (const ByteView part : parts) { payload += part.size(); }
    if (out_.size() - out_begin_ + payload > kMaxQueuedBytes) {
        return fail(ErrorKind::overloaded, "{}: {} bytes wait to be written already", name_, out_.size() - out_begin_);
    }
    const auto header = encode(wire::FrameHeader{static_cast<std::uint32_t>(payload), type});
    ++counters_.frames_out;
    counters_.bytes_out += header.size() + payload;
    // Small frames go out in one write. Of a large one only what the socket does not take at once is copied.
    static constexpr std::size_t kSmall = 64u << 10;
    if (!out_.empty() || !established_ || payload <= kSmall) {
        enqueue(header);
        for (const ByteView part : parts) { enqueue(part); }
        return flush();
    }
    std::array<std::byte, wire::FrameHeader::kBytes> head = header;
    bool blocked = false;
    const auto write_or_queue = [&](ByteView bytes) -> Status {
        while (!bytes.empty() && !blocked) {
            LINKCPP_TRY(const std::size_t n, write_some(bytes));
            bytes = bytes.subspan(n);
            blocked = n == 0;
        }
        enqueue(bytes);
        return {};
    };
    LINKCPP_CHECK(write_or_queue(head));
    for (const ByteView part : parts) { LINKCPP_CHECK(write_or_queue(part)); }
    return {};
}

Status Link::flush() {
    LINKCPP_TRY(const bool ready, handshake());
    if (!ready) { return {}; }
    while (out_begin_ < out_.size()) {
        LINKCPP_TRY(const std::size_t n, write_some(ByteView(out_).subspan(out_begin_)));
        if (n == 0) { return {}; }
        out_begin_ += n;
    }
    out_begin_ = 0;
    out_.clear();
    if (out_.capacity() > kKeepBuffer) { Bytes().swap(out_); }
    return {};
}

Result<std::optional<Frame>> Link::receive() {
    LINKCPP_TRY(const bool ready, handshake());
    if (!ready) { return std::nullopt; }
    if (in_begin_ == in_end_) {
        in_begin_ = in_end_ = 0;
        if (in_.size() > kKeepBuffer) { Bytes().swap(in_); }
    }
    while (true) {
        std::size_t needed = wire::FrameHeader::kBytes;
        if (in_end_ - in_begin_ >= needed) {
            const std::span<const std::byte, wire::FrameHeader::kBytes> bytes(in_.data() + in_begin_,
                                                                              wire::FrameHeader::kBytes);
            auto header = wire::decode_frame_header(bytes, limit_);
            if (!header) { return fail_with(name_, header.error()); }
            needed += header->payload_bytes;
            if (in_end_ - in_begin_ >= needed) {
                const ByteView payload =
                    ByteView(in_).subspan(in_begin_ + wire::FrameHeader::kBytes, header->payload_bytes);
                in_begin_ += needed;
                ++counters_.frames_in;
                counters_.bytes_in += needed;
                return Frame{header->type, payload};
            }
        }
        // Room for the rest of this frame, at the front of the buffer when it does not fit behind.
        if (in_begin_ + std::max(needed, kFirstBuffer) > in_.size()) {
            if (in_begin_ > 0) {
                std::memmove(in_.data(), in_.data() + in_begin_, in_end_ - in_begin_);
                in_end_ -= in_begin_;
                in_begin_ = 0;
            }
            if (std::max(needed, kFirstBuffer) > in_.size()) { in_.resize(std::max(needed, kFirstBuffer)); }
        }
        LINKCPP_TRY(const std::size_t n, read_some(std::span(in_).subspan(in_end_)));
        if (n == 0) { return std::nullopt; }
        in_end_ += n;
    }
}

void wait(const Link& link, Duration timeout) {
    pollfd entry{link.fd(), link.events(), 0};
    ::poll(&entry, 1, to_poll_ms(timeout));
}

Result<Frame> receive_blocking(Link& link, Duration timeout) {
    const TimePoint deadline = std::chrono::steady_clock::now() + timeout;
    while (true) {
        LINKCPP_CHECK(link.flush());
        LINKCPP_TRY(std::optional<Frame> frame, link.receive());
        if (frame) { return *frame; }
        const Duration left = deadline - std::chrono::steady_clock::now();
        if (left <= Duration::zero()) { return fail(ErrorKind::timeout, "{}: no answer in time", link.name()); }
        wait(link, left);
    }
}

Status flush_blocking(Link& link, Duration timeout) {
    const TimePoint deadline = std::chrono::steady_clock::now() + timeout;
    while (true) {
        LINKCPP_CHECK(link.flush());
        if (link.established() && link.idle()) { return {}; }
        const Duration left = deadline - std::chrono::steady_clock::now();
        if (left <= Duration::zero()) { return fail(ErrorKind::timeout, "{}: not written in time", link.name()); }
        wait(link, left);
    }
}

}  // namespace linkcpp::net
