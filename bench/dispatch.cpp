// What it costs to have one token's experts computed elsewhere, the computing itself left out: the dispatcher in one
// process, a worker's server in another, over a Unix socket, TCP, and TCP with TLS; beside it a blocking TCP echo of
// the same bytes between two processes. Prints JSON: median microseconds, and ratios.
//
//   bench_dispatch [n_embd] [n_pairs] [rounds] [unix|tcp|tls]

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include "base/platform.h"
#include "coordinator/dispatcher.h"
#include "expert/engine.h"
#include "model/manifest.h"
#include "model/synth.h"
#include "net/link.h"
#include "net/socket.h"
#include "wire/frame.h"
#include "worker/server.h"

namespace linkcpp {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point start) {
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
    std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
    return values[values.size() / 2];
}

template <class T>
T must(Result<T> result) {
    if (!result) {
        fmt::print(stderr, "bench_dispatch: {}\n", result.error().message);
        std::exit(1);
    }
    return *std::move(result);
}

struct Shape {
    std::uint32_t n_embd;
    std::uint32_t n_pairs;
    int rounds;
};

// ---- the limit: blocking TCP
// -----------------------------------------------------------------------------------------

void read_all(int fd, std::vector<char>& bytes, std::size_t n) {
    for (std::size_t done = 0; done < n;) {
        const ssize_t got = ::recv(fd, bytes.data() + done, n - done, 0);
        if (got <= 0) { std::exit(0); }
        done += static_cast<std::size_t>(got);
    }
}

void write_all(int fd, const std::vector<char>& bytes, std::size_t n) {
    for (std::size_t done = 0; done < n;) {
        const ssize_t sent = ::send(fd, bytes.data() + done, n - done, MSG_NOSIGNAL);
        if (sent <= 0) { std::exit(0); }
        done += static_cast<std::size_t>(sent);
    }
}

void make_blocking(int fd) {
    const int flags = ::fcntl(fd, F_GETFL);
    ::fcntl(fd, F_SETFL, flags & ~O_NONBLOCK);
}

double tcp_echo(const Shape& shape, std::size_t out_bytes, std::size_t back_bytes) {
    auto listener = must(net::Listener::tcp({"127.0.0.1", 0}));
    const net::Address address = listener.address();
    std::vector<char> buffer(std::max(out_bytes, back_bytes));
    const pid_t child = ::fork();
    if (child == 0) {
        const UniqueFd fd = must(net::connect_tcp(address, 5s));
        make_blocking(fd.get());
        while (true) {
            read_all(fd.get(), buffer, out_bytes);
            write_all(fd.get(), buffer, back_bytes);
        }
    }
    std::optional<net::Listener::Accepted> accepted;
    while (!accepted) { accepted = must(listener.accept()); }
    make_blocking(accepted->fd.get());
    std::vector<double> times;
    for (int i = 0; i < shape.rounds; ++i) {
        const auto start = Clock::now();
        write_all(accepted->fd.get(), buffer, out_bytes);
        read_all(accepted->fd.get(), buffer, back_bytes);
        times.push_back(us_since(start));
    }
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    return median(times);
}

// ---- the dispatcher
// --------------------------------------------------------------------------------------------------

enum class Kind { unix_socket, tcp, tls };

struct Ends {
    std::unique_ptr<net::Link> link;
    net::TlsContext context;
};

Ends make_end(Kind kind, UniqueFd fd, const net::Identity& own, const net::Identity& other, bool client) {
    Ends end{nullptr, must(net::TlsContext::make(own))};
    if (kind != Kind::tls) {
        end.link = net::Link::plain(std::move(fd), "peer");
    } else if (client) {
        end.link = must(net::Link::tls_client(std::move(fd), "peer", end.context, other.fingerprint()));
    } else {
        end.link = must(net::Link::tls_server(std::move(fd), "peer", end.context));
    }
    // A frame each way, so that the handshake is done before anything is measured.
    if (const Status sent = end.link->send(wire::FrameType::control, {as_bytes("hello")}); !sent) { std::exit(1); }
    must(net::receive_blocking(*end.link, 5s));
    return end;
}

[[noreturn]] void serve(Kind kind, UniqueFd fd, const net::Identity& own, const net::Identity& other,
                        const std::filesystem::path& path, const Digest& model_id) {
    expert::load_backends();
    const auto file = must(model::GgufFile::open(path));
    const model::MoeLayer layer = must(model::read_moe(file)).layers[0];
    const auto engine = must(expert::Engine::open(must(expert::choose_device(expert::devices(), "CPU")), 1));
    std::vector<std::uint16_t> experts(layer.n_expert);
    for (std::size_t i = 0; i < experts.size(); ++i) { experts[i] = static_cast<std::uint16_t>(i); }
    const auto source = [&](std::uint32_t, std::uint32_t e, std::span<std::byte> to) -> Status {
        std::ranges::copy(must(model::read_slice(file, layer, e)), to.begin());
        return {};
    };
    const Status held = engine->hold(model_id.prefix(), layer, experts, source);
    if (!held) { std::exit(1); }
    Ends end = make_end(kind, std::move(fd), own, other, true);
    worker::Server server(*engine);
    server.set_epochs({0});  // that of routes which name none
    server.add(std::move(end.link), std::make_shared<std::atomic<bool>>(true));
    pollfd closed{server.on_closed().fd(), POLLIN, 0};
    ::poll(&closed, 1, -1);
    std::exit(0);
}

double dispatch(Kind kind, const Shape& shape, const std::filesystem::path& path,
                const std::shared_ptr<const model::Manifest>& manifest) {
    const auto own = must(net::Identity::make());
    const auto other = must(net::Identity::make());
    const std::filesystem::path socket =
        std::filesystem::temp_directory_path() / fmt::format("bench-{}.sock", ::getpid());
    auto listener = kind == Kind::unix_socket ? must(net::Listener::unix_socket(socket))
                                              : must(net::Listener::tcp({"127.0.0.1", 0}));
    const pid_t child = ::fork();
    if (child == 0) {
        UniqueFd fd = kind == Kind::unix_socket ? must(net::connect_unix(socket))
                                                : must(net::connect_tcp(listener.address(), 5s));
        serve(kind, std::move(fd), other, own, path, manifest->id());
    }
    std::optional<net::Listener::Accepted> accepted;
    while (!accepted) { accepted = must(listener.accept()); }
    Ends end = make_end(kind, std::move(accepted->fd), own, other, false);

    auto dispatcher = std::make_unique<coordinator::Dispatcher>(coordinator::DispatchOptions{});
    wire::fb::RoutesT message;
    auto route = std::make_unique<wire::fb::RouteT>();
    route->worker = route->name = "worker";
    wire::LayerExperts all{manifest->model.layers[0].layer, {}};
    for (std::uint32_t e = 0; e < manifest->model.layers[0].n_expert; ++e) {
        all.experts.push_back(static_cast<std::uint16_t>(e));
    }
    route->slices = wire::encode_slices({all});
    message.workers.push_back(std::move(route));
    dispatcher->set_manifest(manifest, manifest->id());
    dispatcher->set_routes(
        std::make_shared<const coordinator::Routes>(must(coordinator::make_routes(message, manifest->model))));
    dispatcher->add_link("worker", std::move(end.link));

    const std::vector<float> h(shape.n_embd, 0.5f);
    std::vector<std::int32_t> ids(shape.n_pairs);
    for (std::size_t i = 0; i < ids.size(); ++i) { ids[i] = static_cast<std::int32_t>(i); }
    std::vector<float> out(std::size_t{shape.n_embd} * shape.n_pairs);
    const coordinator::Work work{.layer = all.layer,
                                 .n_in = shape.n_embd,
                                 .n_out = shape.n_embd,
                                 .n_tokens = 1,
                                 .n_used = shape.n_pairs,
                                 .rows = h.data(),
                                 .token_stride = shape.n_embd,
                                 .ids = ids.data(),
                                 .ids_stride = ids.size()};
    std::vector<double> times;
    std::uint64_t computed_before = 0;
    for (int i = 0; i < shape.rounds; ++i) {
        const auto start = Clock::now();
        if (const Status status = dispatcher->compute_rows(work, out); !status) {
            fmt::print(stderr, "bench_dispatch: {}\n", status.error().message);
            std::exit(1);
        }
        // Each answer says how long the worker computed.
        const std::uint64_t computed = dispatcher->stats().compute_us;
        times.push_back(us_since(start) - static_cast<double>(computed - computed_before));
        computed_before = computed;
    }
    dispatcher.reset();
    ::waitpid(child, nullptr, 0);
    return median(times);
}

int run(const Shape& shape, std::string_view only) {
    const std::filesystem::path path =
        std::filesystem::temp_directory_path() / fmt::format("bench-{}.gguf", ::getpid());
    // Experts as small as their type allows: little work, and that little is measured and subtracted.
    const model::SynthOptions options{.n_layer = 1,
                                      .n_expert = shape.n_pairs,
                                      .n_expert_used = shape.n_pairs,
                                      .n_embd = shape.n_embd,
                                      .n_ff = 32,
                                      .gate_type = GGML_TYPE_Q8_0,
                                      .up_type = GGML_TYPE_Q8_0,
                                      .down_type = GGML_TYPE_Q8_0,
                                      .experts_only = true};
    if (const Status status = model::write_synthetic_model(options, path); !status) {
        fmt::print(stderr, "bench_dispatch: {}\n", status.error().message);
        return 1;
    }
    const auto manifest =
        std::make_shared<const model::Manifest>(must(model::make_manifest(must(model::GgufFile::open(path)))));
    const wire::ComputeRequest request{.n_rows = 1, .n_pairs = shape.n_pairs, .n_in = shape.n_embd};
    const wire::ComputeAnswer answer{.n_rows = shape.n_pairs, .n_out = shape.n_embd};
    const std::size_t out_bytes = wire::FrameHeader::kBytes + request.payload_bytes();
    const std::size_t back_bytes = wire::FrameHeader::kBytes + answer.payload_bytes();
    const double echo = tcp_echo(shape, out_bytes, back_bytes);
    nlohmann::json result{{"n_embd", shape.n_embd},
                          {"n_pairs", shape.n_pairs},
                          {"bytes_out", out_bytes},
                          {"bytes_back", back_bytes},
                          {"tcp_echo_us", echo}};
    for (const auto& [kind, name] : {std::pair{Kind::unix_socket, "unix"}, {Kind::tcp, "tcp"}, {Kind::tls, "tls"}}) {
        if (!only.empty() && only != name) { continue; }
        const double us = dispatch(kind, shape, path, manifest);
        result[name] = {{"us", us}, {"ratio", us / echo}};
    }
    std::filesystem::remove(path);
    fmt::print("{}\n", result.dump());
    return 0;
}

}  // namespace
}  // namespace linkcpp

int main(int argc, char** argv) {
    const auto argument = [&](int i, int fallback) { return argc > i ? std::atoi(argv[i]) : fallback; };
    return linkcpp::run(
        {static_cast<std::uint32_t>(argument(1, 3072)), static_cast<std::uint32_t>(argument(2, 1)), argument(3, 5000)},
        argc > 4 ? argv[4] : "");
}
