#include "hub/http.h"

#include <chrono>

#include <httplib.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include "base/log.h"
#include "base/platform.h"
#include "base/text.h"

namespace linkcpp::hub {
namespace {

// A peer that has not sent its next bytes by then loses its connection.
constexpr int kReadTimeoutS = 5;
constexpr std::size_t kRequestsPerConnection = 1'000'000;
// An idle connection holds a thread for this long, and the end of the program too.
constexpr time_t kIdleS = 1;
constexpr std::size_t kMaxRequestBody = 64u << 10;
// httplib looks at a Range header of 8 KiB with a recursion of up to 5 MB, before anybody is asked for a token. The
// system's own idea of a thread's stack may be 2 MiB.
constexpr std::size_t kThreadStack = 8u << 20;
// Bytes that wait for the line of one connection, beyond what is on its way.
constexpr int kUnsent = 256 << 10;
// An answer is one stretch of bytes.
constexpr std::size_t kMaxRanges = 1;

// Threads for requests, and places for connections that wait for one; whoever finds none is turned away by the thread
// that accepts.
class Pool : public httplib::TaskQueue {
  public:
    explicit Pool(std::size_t n_threads) : most_(kWaitingPerThread * n_threads), threads_(n_threads) {}

    void enqueue(std::function<void()> work) override {
        if (n_waiting_.load() >= most_) {
            const HttpsGuests::TurningAway turning_away;
            work();
            return;
        }
        ++n_waiting_;
        threads_.enqueue([this, work = std::move(work)] {
            --n_waiting_;
            work();
            release_unused_stack();
        });
    }
    void shutdown() override { threads_.shutdown(); }

  private:
    static constexpr std::size_t kWaitingPerThread = 4;
    std::size_t most_;
    std::atomic<std::size_t> n_waiting_{0};
    httplib::ThreadPool threads_;
};

std::string_view bearer_token(const httplib::Request& request, std::string& storage) {
    static constexpr std::string_view kPrefix = "Bearer ";
    storage = request.get_header_value("Authorization");
    const std::string_view value = storage;
    return value.starts_with(kPrefix) ? value.substr(kPrefix.size()) : std::string_view();
}

}  // namespace

void Tokens::add(std::string token) {
    const std::lock_guard lock(mutex_);
    tokens_.insert(std::move(token));
}

void Tokens::remove(const std::string& token) {
    const std::lock_guard lock(mutex_);
    tokens_.erase(token);
}

bool Tokens::accept(std::string_view token) const {
    const std::lock_guard lock(mutex_);
    bool accepted = false;
    for (const std::string& known : tokens_) {
        accepted = equal_in_constant_time(as_bytes(known), as_bytes(token)) || accepted;
    }
    return accepted;
}

HttpServer::HttpServer() = default;

HttpServer::~HttpServer() {
    // stop() does nothing before the server runs.
    while (thread_.joinable() && !server_->is_running() && !ended_) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (server_) { server_->stop(); }
    if (thread_.joinable()) { thread_.join(); }
}

Result<std::unique_ptr<HttpServer>> HttpServer::make(const net::Address& address, const net::Identity& identity,
                                                     const Limits& limits, Source source) {
    std::unique_ptr<HttpServer> http(new HttpServer);
    http->files_ = std::make_unique<ModelFiles>(source.file, source.manifest);
    http->guests_ = std::make_unique<HttpsGuests>(limits.per_address, limits.hello_time, source.refused);
    http->server_ = std::make_unique<httplib::SSLServer>(identity.certificate(), identity.key());
    httplib::SSLServer& server = *http->server_;
    if (!server.is_valid()) { return fail(ErrorKind::failed, "HTTPS: {}", net::openssl_error()); }
    SSL_CTX_set_min_proto_version(server.ssl_context(), TLS1_3_VERSION);
    http->guests_->watch(server.ssl_context());
    // A kept-alive connection holds a thread; each worker keeps one while it loads.
    server.new_task_queue = [n = limits.requests] { return new Pool(n); };
    server.set_keep_alive_max_count(kRequestsPerConnection);
    server.set_keep_alive_timeout(kIdleS);
    server.set_read_timeout(kReadTimeoutS);
    server.set_tcp_nodelay(true);
    server.set_payload_max_length(kMaxRequestBody);
    // httplib's default also sets SO_REUSEPORT, which would let two hubs share a port unnoticed.
    server.set_socket_options([](socket_t socket) {
        const int on = 1;
        ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        // What waits here when its receiver has ended was read and encrypted in vain.
        ::setsockopt(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsent, sizeof kUnsent);
    });

    server.set_pre_routing_handler(
        [source, guests = http->guests_.get()](const httplib::Request& request, httplib::Response& response) {
            std::string storage;
            const std::string_view token = bearer_token(request, storage);
            const bool known = source.tokens.accept(token);
            const bool is_operator = source.operator_tokens.accept(token);
            if (is_operator || known) { guests->let_in(request.ssl); }
            const bool reads = request.method == "GET" || request.method == "HEAD";
            if (is_operator || (known && reads)) {
                if (request.ranges.size() <= kMaxRanges) { return httplib::Server::HandlerResponse::Unhandled; }
                response.status = 416;
                source.refused("HTTPS: several ranges", fmt::format("HTTPS: {} asked for {} ranges of one answer",
                                                                    request.remote_addr, request.ranges.size()));
                return httplib::Server::HandlerResponse::Handled;
            }
            response.status = known ? 403 : 401;
            response.set_content(known ? "this needs the operator's token, which lies where the hub runs\n"
                                       : "send a token: Authorization: Bearer TOKEN, the last part of a join line\n",
                                 "text/plain");
            source.refused(known ? "HTTPS: not the operator" : "HTTPS: no valid token",
                           fmt::format("HTTPS: {} asked for {} {} without a token for that", request.remote_addr,
                                       one_line(request.method.substr(0, 16)), one_line(request.path.substr(0, 80))));
            response.set_header("WWW-Authenticate", "Bearer");
            return httplib::Server::HandlerResponse::Handled;
        });
    server.Get("/status", [status = source.status](const httplib::Request&, httplib::Response& response) {
        response.set_content(status(), "application/json");
    });
    http->files_->serve(server);
    const auto operate = [run = source.operate](Command command) {
        // What is wanted stands in the address. Without a length no body is waited for; one that is announced is read,
        // or it would be taken for the next request.
        return [run, command](const httplib::Request& request, httplib::Response& response,
                              const httplib::ContentReader& body) {
            if (request.has_header("Content-Length") || request.has_header("Transfer-Encoding")) {
                if (!body([](const char*, std::size_t) { return true; })) {
                    response.status = 400;  // whoever could not say all of it may not have meant it
                    return;
                }
            }
            Arguments arguments;
            for (const auto& [name, value] : request.params) { arguments[name] = value; }
            const Result<std::string> done = run(command, arguments);
            if (!done) { response.status = done.error().kind == ErrorKind::not_found ? 404 : 400; }
            response.set_content(done ? *done : done.error().message, "text/plain");
        };
    };
    server.Delete("/quarantine", operate(Command::clear));
    server.Put("/drain", operate(Command::drain));
    server.Delete("/drain", operate(Command::undrain));
    server.Put("/tokens", operate(Command::list_tokens));
    server.Put("/token", operate(Command::make_token));
    server.Put("/token/secret", operate(Command::rotate_token));
    server.Delete("/token", operate(Command::revoke_token));
    server.Delete("/member", operate(Command::revoke));
    server.Put("/member", operate(Command::unrevoke));
    server.set_exception_handler(
        [](const httplib::Request&, httplib::Response& response, const std::exception_ptr&) { response.status = 500; });

    const int port = address.port == 0 ? server.bind_to_any_port(address.host)
                                       : (server.bind_to_port(address.host, address.port) ? address.port : -1);
    if (port < 0) {
        return fail(ErrorKind::invalid,
                    "HTTPS: cannot listen on {}; the port is in use, or the host is not this machine: "
                    "choose another with --https-port",
                    address.text());
    }
    http->port_ = static_cast<std::uint16_t>(port);
    return http;
}

void HttpServer::start() {
    set_thread_stack(kThreadStack);
    thread_ = std::thread([this] {
        try {
            server_->listen_after_bind();
        } catch (const std::exception& error) { log_error("HTTPS has ended: {}", error.what()); }
        ended_ = true;
    });
}

}  // namespace linkcpp::hub
