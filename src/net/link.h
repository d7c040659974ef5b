// A link: an ordered channel of frames over a connected socket, with or without TLS 1.3. Above it nobody can tell
// which.
//
// Everything is non-blocking; the owner polls fd() for events(). One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/raw_buffer.h"
#include "net/identity.h"
#include "wire/frame.h"

struct ssl_st;
struct ssl_ctx_st;

namespace linkcpp::net {

// TLS settings shared by many links: TLS 1.3 only, both sides show a certificate. Keep it alive as long as its links.
class TlsContext {
  public:
    static Result<TlsContext> make(const Identity& identity);
    ssl_ctx_st* get() const { return context_.get(); }

  private:
    struct Free {
        void operator()(ssl_ctx_st* context) const;
    };
    std::unique_ptr<ssl_ctx_st, Free> context_;
};

struct Frame {
    wire::FrameType type = wire::FrameType::control;
    ByteView payload;  // valid until the link's next receive()
};

struct LinkCounters {
    std::uint64_t bytes_in = 0;
    std::uint64_t bytes_out = 0;
    std::uint64_t frames_in = 0;
    std::uint64_t frames_out = 0;
};

class Link {
  public:
    // Takes a connected, non-blocking socket. `name` is for messages ("worker alice at 10.0.0.3:41234").
    static std::unique_ptr<Link> plain(UniqueFd fd, std::string name);
    // The dialling side: the peer's key must have the fingerprint `expected`, or nothing is sent.
    static Result<std::unique_ptr<Link>> tls_client(UniqueFd fd, std::string name, const TlsContext& context,
                                                    const Digest& expected);
    // The accepting side: any key is let through the handshake; the caller looks at peer() before it answers.
    static Result<std::unique_ptr<Link>> tls_server(UniqueFd fd, std::string name, const TlsContext& context);

    ~Link();
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    // Queues a frame made of `parts` and writes what the socket takes. `parts` are copied when they cannot be written
    // at once. Errors: disconnected, corrupt (TLS), overloaded (too much waits already).
    Status send(wire::FrameType type, std::initializer_list<ByteView> parts);
    // Queues a frame and returns the place for its payload, to be filled at once; the next flush() writes it. Errors:
    // overloaded.
    Result<std::span<std::byte>> append(wire::FrameType type, std::size_t payload_bytes);
    // Writes what is queued as far as the socket takes it. Errors as for send().
    Status flush();
    // The next whole frame, or nothing if it is not there yet. Call until it gives nothing before polling again.
    // Errors: disconnected (closed by the peer), corrupt (broken frame or TLS).
    Result<std::optional<Frame>> receive();

    // Largest payload accepted from now on (wire::kMaxHelloBytes until it is raised).
    void set_limit(std::uint32_t max_payload_bytes) { limit_ = max_payload_bytes; }

    // Largest payload that the peer takes, as it has said (wire::kMaxComputeBytes until it has).
    void set_peer_limit(std::uint32_t bytes) { peer_limit_ = bytes; }
    std::uint32_t peer_limit() const { return peer_limit_; }

    // How many bytes may wait to be written (kMaxQueuedBytes until it is set).
    void set_queue_limit(std::size_t bytes) { queue_limit_ = bytes; }

    int fd() const { return fd_.get(); }
    // What to poll for: POLLIN, and POLLOUT while something waits to be written.
    short events() const;
    bool idle() const;
    // The peer's key once the handshake is done; nothing before, and never on a plain link.
    const std::optional<Digest>& peer() const { return peer_; }
    bool encrypted() const { return ssl_ != nullptr; }
    // True once frames can pass: at once on a plain link, after the handshake on another.
    bool established() const { return established_; }
    const std::string& name() const { return name_; }
    void rename(std::string name) { name_ = std::move(name); }
    const LinkCounters& counters() const { return counters_; }
    // A part of a frame is here, and the rest is to come.
    bool in_frame() const { return in_begin_ != in_end_; }
    // Bytes that have gone through the socket either way, parts of frames too: it moves, so somebody is there.
    std::uint64_t moved() const;

    static constexpr std::size_t kMaxQueuedBytes = 256u << 20;

  private:
    struct FreeSsl {
        void operator()(ssl_st* ssl) const;
    };
    struct Wire;  // encrypted bytes between OpenSSL and the socket
    Link(UniqueFd fd, std::string name);
    static Result<std::unique_ptr<Link>> tls(UniqueFd fd, std::string name, const TlsContext& context);

    // Bytes moved, 0 when the socket would block.
    Result<std::size_t> write_some(ByteView bytes);
    Result<std::size_t> read_some(std::span<std::byte> to);
    Result<bool> handshake();
    Status flush_wire();
    std::unexpected<Error> tls_error(int code, std::string_view what);
    Status check_queue(std::size_t payload_bytes) const;
    void enqueue(ByteView bytes);
    Status write_now(std::span<ByteView> parts);

    UniqueFd fd_;
    std::string name_;
    std::unique_ptr<Wire> wire_;  // before ssl_, which reads and writes it
    std::unique_ptr<ssl_st, FreeSsl> ssl_;
    std::unique_ptr<Digest> expected_;  // owned here, read by OpenSSL's verify callback
    std::optional<Digest> peer_;
    bool established_ = true;
    bool want_write_ = false;  // the handshake has not begun: a connect may still be under way
    std::uint32_t limit_ = wire::kMaxHelloBytes;
    std::uint32_t peer_limit_ = wire::kMaxComputeBytes;
    std::size_t queue_limit_ = kMaxQueuedBytes;

    RawBytes out_;  // queued bytes from out_begin_ on
    std::size_t out_begin_ = 0;
    RawBytes in_;  // received bytes [in_begin_, in_end_); in_.size() is the capacity
    std::size_t in_begin_ = 0;
    std::size_t in_end_ = 0;
    LinkCounters counters_;
    std::uint64_t moved_ = 0;  // of a plain link
};

// Waits until `link` has something to do or `timeout` has passed; for callers that have one link and all the time.
void wait(const Link& link, Duration timeout);

// Waits for the next frame. Errors: those of receive(), timeout.
Result<Frame> receive_blocking(Link& link, Duration timeout);
// Waits until everything queued is with the kernel. Errors: those of flush(), timeout.
Status flush_blocking(Link& link, Duration timeout);

}  // namespace linkcpp::net
