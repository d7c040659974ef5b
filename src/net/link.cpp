#include "net/link.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

namespace linkcpp::net {
namespace {

constexpr std::size_t kFirstBuffer = 64u << 10;
// A buffer that one large frame has stretched is given back when the frames are small again.
constexpr std::size_t kKeepBuffer = 8u << 20;
// So many parts of a frame go to the socket in one call.
constexpr std::size_t kMaxParts = 7;

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

}  // namespace

// OpenSSL's own socket BIO reads and writes record by record, each a system call that wakes the other side, and
// write(2) raises SIGPIPE when the peer is gone: the process may not be ours, so its signals are left alone. Here
// records gather in memory, and the socket sees few large calls that raise nothing.
struct Link::Wire {
    static constexpr std::size_t kChunk = 32u << 10;

    explicit Wire(int fd) : socket(fd) { in.resize(kChunk); }

    int socket;
    RawBytes in;  // received, not decrypted: [in_begin, in_end)
    std::size_t in_begin = 0;
    std::size_t in_end = 0;
    RawBytes out;  // encrypted, not sent: from out_begin on
    std::size_t out_begin = 0;
    std::uint64_t moved = 0;

    std::size_t pending() const { return out.size() - out_begin; }

    // False on an error other than "not now"; errno says which.
    bool send() {
        while (out_begin < out.size()) {
            const ssize_t n =
                ::send(socket, out.data() + out_begin, out.size() - out_begin, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (n < 0 && errno == EINTR) { continue; }
            if (n < 0) {
                const bool later = errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOTCONN;
                out.drop_front(out_begin);
                out_begin = 0;
                return later;
            }
            out_begin += static_cast<std::size_t>(n);
            moved += static_cast<std::uint64_t>(n);
        }
        out.clear();
        out_begin = 0;
        return true;
    }

    static Wire& of(BIO* bio) { return *static_cast<Wire*>(BIO_get_data(bio)); }

    static int write(BIO* bio, const char* data, int length) {
        Wire& wire = of(bio);
        wire.out.append({reinterpret_cast<const std::byte*>(data), static_cast<std::size_t>(length)});
        if (wire.pending() >= kChunk && !wire.send()) { return -1; }
        return length;
    }

    static int read(BIO* bio, char* data, int length) {
        Wire& wire = of(bio);
        BIO_clear_retry_flags(bio);
        if (wire.in_begin == wire.in_end) {
            const ssize_t n = ::recv(wire.socket, wire.in.data(), wire.in.size(), MSG_DONTWAIT);
            if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ENOTCONN)) {
                BIO_set_retry_read(bio);
            }
            if (n <= 0) { return static_cast<int>(n); }
            wire.in_begin = 0;
            wire.in_end = static_cast<std::size_t>(n);
            wire.moved += static_cast<std::uint64_t>(n);
        }
        const std::size_t n = std::min(static_cast<std::size_t>(length), wire.in_end - wire.in_begin);
        std::memcpy(data, wire.in.data() + wire.in_begin, n);
        wire.in_begin += n;
        return static_cast<int>(n);
    }

    static long control(BIO* /*bio*/, int command, long /*number*/, void* /*data*/) {
        return command == BIO_CTRL_FLUSH ? 1 : 0;
    }

    BIO* make_bio() {
        static BIO_METHOD* const method = [] {
            BIO_METHOD* m = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "link");
            BIO_meth_set_write(m, write);
            BIO_meth_set_read(m, read);
            BIO_meth_set_ctrl(m, control);
            return m;
        }();
        BIO* bio = BIO_new(method);
        BIO_set_data(bio, this);
        BIO_set_init(bio, 1);
        return bio;
    }
};

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
    // No resumption: a link lives long, and a ticket would be a second secret to guard.
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_num_tickets(context, 0);
    return tls;
}

void Link::FreeSsl::operator()(ssl_st* ssl) const {
    SSL_free(ssl);
}

Link::Link(UniqueFd fd, std::string name) : fd_(std::move(fd)), name_(std::move(name)) {}

Link::~Link() = default;

bool Link::idle() const {
    return out_.empty() && (!wire_ || wire_->pending() == 0);
}

std::uint64_t Link::moved() const {
    return wire_ ? wire_->moved : moved_;
}

Status Link::flush_wire() {
    if (!wire_ || wire_->send()) { return {}; }
    return fail_errno(errno, name_);
}

std::unique_ptr<Link> Link::plain(UniqueFd fd, std::string name) {
    return std::unique_ptr<Link>(new Link(std::move(fd), std::move(name)));
}

Result<std::unique_ptr<Link>> Link::tls(UniqueFd fd, std::string name, const TlsContext& context) {
    auto link = plain(std::move(fd), std::move(name));
    link->ssl_.reset(SSL_new(context.get()));
    if (!link->ssl_) { return fail(ErrorKind::failed, "TLS: {}", openssl_error()); }
    link->wire_ = std::make_unique<Wire>(link->fd());
    BIO* bio = link->wire_->make_bio();
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
    const bool waits = want_write_ || (wire_ && wire_->pending() > 0) || (established_ && !out_.empty());
    return static_cast<short>(waits ? POLLIN | POLLOUT : POLLIN);
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
    want_write_ = false;
    const int done = SSL_do_handshake(ssl_.get());
    const int code = done == 1 ? SSL_ERROR_NONE : SSL_get_error(ssl_.get(), done);
    if (done != 1 && code != SSL_ERROR_WANT_READ) {
        auto error = tls_error(code, "handshake");
        (void)flush_wire();  // the alert that tells the peer why
        return error;
    }
    LINKCPP_CHECK(flush_wire());
    if (done != 1) { return false; }
    LINKCPP_TRY(const Digest fingerprint, fingerprint_of(SSL_get0_peer_certificate(ssl_.get())));
    peer_ = fingerprint;
    established_ = true;
    return true;
}

Result<std::size_t> Link::write_some(ByteView bytes) {
    if (!ssl_) {
        ByteView left = bytes;
        LINKCPP_CHECK(write_now(std::span(&left, 1)));
        return bytes.size() - left.size();
    }
    // No more is encrypted than the socket will take soon: what must wait for longer waits in out_, whose size is
    // bounded.
    if (wire_->pending() >= Wire::kChunk) {
        LINKCPP_CHECK(flush_wire());
        if (wire_->pending() >= Wire::kChunk) { return 0; }
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
            if (n > 0) {
                moved_ += static_cast<std::uint64_t>(n);
                return static_cast<std::size_t>(n);
            }
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
    if (code == SSL_ERROR_WANT_READ) { return 0; }
    return tls_error(code, "read");
}

Status Link::check_queue(std::size_t payload_bytes) const {
    const std::size_t waiting = out_.size() - out_begin_;
    if (waiting + payload_bytes <= queue_limit_) { return {}; }
    return fail(ErrorKind::overloaded, "{}: {} bytes wait to be written already", name_, waiting);
}

void Link::enqueue(ByteView bytes) {
    out_.append(bytes);
}

Result<std::span<std::byte>> Link::append(wire::FrameType type, std::size_t payload_bytes) {
    LINKCPP_CHECK(check_queue(payload_bytes));
    // What has been written makes room once it is the larger part: then moving the rest costs less than was written.
    if (out_begin_ > out_.size() / 2) {
        out_.drop_front(out_begin_);
        out_begin_ = 0;
    }
    const auto header = encode(wire::FrameHeader{static_cast<std::uint32_t>(payload_bytes), type});
    ++counters_.frames_out;
    counters_.bytes_out += header.size() + payload_bytes;
    enqueue(header);
    out_.resize(out_.size() + payload_bytes);
    return std::span(out_).last(payload_bytes);
}

// Writes what the socket takes of `parts` in one call; each part is left as what remains of it.
Status Link::write_now(std::span<ByteView> parts) {
    std::array<iovec, 8> vectors{};
    std::size_t n_vectors = 0;
    for (const ByteView part : parts) { vectors.at(n_vectors++) = {const_cast<std::byte*>(part.data()), part.size()}; }
    msghdr message{};
    message.msg_iov = vectors.data();
    message.msg_iovlen = n_vectors;
    ssize_t n = 0;
    do { n = ::sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT); } while (n < 0 && errno == EINTR);
    if (n < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOTCONN) { return {}; }
        return fail_errno(errno, name_);
    }
    moved_ += static_cast<std::uint64_t>(n);
    for (ByteView& part : parts) {
        const std::size_t taken = std::min(part.size(), static_cast<std::size_t>(n));
        part = part.subspan(taken);
        n -= static_cast<ssize_t>(taken);
    }
    return {};
}

Status Link::send(wire::FrameType type, std::initializer_list<ByteView> parts) {
    std::size_t payload = 0;
    for (const ByteView part : parts) { payload += part.size(); }
    if (ssl_ || !out_.empty() || parts.size() > kMaxParts) {
        LINKCPP_TRY(std::span<std::byte> place, append(type, payload));
        for (const ByteView part : parts) {
            if (!part.empty()) { std::memcpy(place.data(), part.data(), part.size()); }
            place = place.subspan(part.size());
        }
        return flush();
    }
    LINKCPP_CHECK(check_queue(payload));
    const auto header = encode(wire::FrameHeader{static_cast<std::uint32_t>(payload), type});
    ++counters_.frames_out;
    counters_.bytes_out += header.size() + payload;
    std::array<ByteView, kMaxParts + 1> all{ByteView(header)};
    std::ranges::copy(parts, all.begin() + 1);
    const std::span<ByteView> left = std::span(all).first(parts.size() + 1);
    LINKCPP_CHECK(write_now(left));
    for (const ByteView part : left) { enqueue(part); }
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
    LINKCPP_CHECK(flush_wire());
    out_begin_ = 0;
    out_.clear();
    if (out_.capacity() > kKeepBuffer) { out_.release(); }
    return {};
}

Result<std::optional<Frame>> Link::receive() {
    LINKCPP_TRY(const bool ready, handshake());
    if (!ready) { return std::nullopt; }
    if (in_begin_ == in_end_) {
        in_begin_ = in_end_ = 0;
        if (in_.size() > kKeepBuffer) { in_.release(); }
    }
    // A socket that gave less than there was room for has no more: poll() tells when it does.
    bool drained = false;
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
        const std::span<std::byte> room = std::span(in_).subspan(in_end_);
        if (drained) { return std::nullopt; }
        LINKCPP_TRY(const std::size_t n, read_some(room));
        if (n == 0) { return std::nullopt; }
        in_end_ += n;
        drained = !ssl_ && n < room.size();
    }
}

void wait(const Link& link, Duration timeout) {
    pollfd entry{link.fd(), link.events(), 0};
    ::poll(&entry, 1, to_poll_ms(timeout));
}

Result<Frame> receive_blocking(Link& link, Duration timeout) {
    const TimePoint deadline = steady_now() + timeout;
    while (true) {
        LINKCPP_CHECK(link.flush());
        LINKCPP_TRY(std::optional<Frame> frame, link.receive());
        if (frame) { return *frame; }
        const Duration left = deadline - steady_now();
        if (left <= Duration::zero()) { return fail(ErrorKind::timeout, "{}: no answer in time", link.name()); }
        wait(link, left);
    }
}

Status flush_blocking(Link& link, Duration timeout) {
    const TimePoint deadline = steady_now() + timeout;
    while (true) {
        LINKCPP_CHECK(link.flush());
        if (link.established() && link.idle()) { return {}; }
        const Duration left = deadline - steady_now();
        if (left <= Duration::zero()) { return fail(ErrorKind::timeout, "{}: not written in time", link.name()); }
        wait(link, left);
    }
}

}  // namespace linkcpp::net
