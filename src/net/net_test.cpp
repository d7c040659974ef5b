#include <algorithm>
#include <filesystem>
#include <random>

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/platform.h"
#include "base/test_folder.h"
#include "net/identity.h"
#include "net/join_line.h"
#include "net/link.h"
#include "net/socket.h"

namespace linkcpp::net {
namespace {

using namespace std::chrono_literals;
using wire::FrameType;

Bytes random_bytes(std::size_t n, unsigned seed) {
    std::mt19937 random(seed);
    Bytes bytes(n);
    std::ranges::generate(bytes, [&] { return static_cast<std::byte>(random()); });
    return bytes;
}

// Runs both ends until `b` has a frame.
Result<Frame> pump(Link& a, Link& b) {
    for (int i = 0; i < 200'000; ++i) {
        LINKCPP_CHECK(a.flush());
        if (auto other = a.receive(); !other) { return std::unexpected(other.error()); }
        LINKCPP_CHECK(b.flush());
        LINKCPP_TRY(std::optional<Frame> frame, b.receive());
        if (frame) { return *frame; }
    }
    return fail(ErrorKind::timeout, "no frame");
}

struct Pair {
    Identity a_identity = Identity::make().value();
    Identity b_identity = Identity::make().value();
    TlsContext a_context = TlsContext::make(a_identity).value();
    TlsContext b_context = TlsContext::make(b_identity).value();
    std::unique_ptr<Link> a;
    std::unique_ptr<Link> b;

    explicit Pair(bool tls) {
        auto fds = socket_pair();
        if (tls) {
            a = Link::tls_client(std::move(fds->first), "b", a_context, b_identity.fingerprint()).value();
            b = Link::tls_server(std::move(fds->second), "a", b_context).value();
        } else {
            a = Link::plain(std::move(fds->first), "b");
            b = Link::plain(std::move(fds->second), "a");
        }
    }
};

class EveryLink : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(PlainAndTls, EveryLink, testing::Bool(),
                         [](const auto& param_info) { return param_info.param ? "tls" : "plain"; });

// Frames written into the queue while it is being sent piece by piece: what has been sent makes room in between.
TEST_P(EveryLink, a_queue_that_never_runs_empty_stays_in_order) {
    Pair pair(GetParam());
    pair.b->set_limit(wire::kMaxComputeBytes);
    constexpr int kFrames = 60;
    int sent = 0;
    for (int received = 0; received < kFrames; ++received) {
        while (sent < kFrames && sent < received + 3) {
            const Bytes bytes = random_bytes(400'000, static_cast<unsigned>(sent++));
            const auto place = pair.a->append(FrameType::compute_answer, bytes.size());
            ASSERT_TRUE(place) << place.error().message;
            std::ranges::copy(bytes, place->begin());
        }
        const auto frame = pump(*pair.a, *pair.b);
        ASSERT_TRUE(frame) << frame.error().message;
        EXPECT_TRUE(std::ranges::equal(frame->payload, random_bytes(400'000, static_cast<unsigned>(received))));
    }
    EXPECT_EQ(pair.a->counters().frames_out, kFrames);
    EXPECT_EQ(pair.a->counters().bytes_out, pair.b->counters().bytes_in);
}

TEST_P(EveryLink, a_full_queue_pushes_back) {
    Pair pair(GetParam());
    Status status;
    for (int i = 0; i < 10 && status; ++i) {
        const auto place = pair.a->append(FrameType::control, Link::kMaxQueuedBytes / 4);
        if (!place) { status = std::unexpected(place.error()); }
    }
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().kind, ErrorKind::overloaded);
}

TEST_P(EveryLink, frames_arrive_whole_and_in_order) {
    Pair pair(GetParam());
    pair.b->set_limit(wire::kMaxComputeBytes);
    const Bytes big = random_bytes(9'000'000, 1);
    ASSERT_TRUE(pair.a->send(FrameType::control, {as_bytes("one"), as_bytes(" two")}));
    ASSERT_TRUE(pair.a->send(FrameType::compute_request, {big}));
    ASSERT_TRUE(pair.a->send(FrameType::compute_answer, {}));
    auto frame = pump(*pair.a, *pair.b);
    ASSERT_TRUE(frame) << frame.error().message;
    EXPECT_EQ(frame->type, FrameType::control);
    EXPECT_EQ(as_text(frame->payload), "one two");
    frame = pump(*pair.a, *pair.b);
    ASSERT_TRUE(frame) << frame.error().message;
    EXPECT_TRUE(std::ranges::equal(frame->payload, big));
    frame = pump(*pair.a, *pair.b);
    ASSERT_TRUE(frame) << frame.error().message;
    EXPECT_EQ(frame->type, FrameType::compute_answer);
    EXPECT_TRUE(frame->payload.empty());
    EXPECT_EQ(pair.a->counters().bytes_out, pair.b->counters().bytes_in);
}

TEST_P(EveryLink, large_frames_both_ways_at_once_do_not_deadlock) {
    Pair pair(GetParam());
    const Bytes big = random_bytes(20'000'000, 2);
    pair.a->set_limit(wire::kMaxComputeBytes);
    pair.b->set_limit(wire::kMaxComputeBytes);
    ASSERT_TRUE(pair.a->send(FrameType::compute_request, {big}));
    ASSERT_TRUE(pair.b->send(FrameType::compute_answer, {big}));
    bool at_a = false;
    bool at_b = false;
    for (int i = 0; i < 200'000 && !(at_a && at_b); ++i) {
        ASSERT_TRUE(pair.a->flush());
        ASSERT_TRUE(pair.b->flush());
        at_a = at_a || pair.a->receive().value();
        at_b = at_b || pair.b->receive().value();
    }
    EXPECT_TRUE(at_a && at_b);
}

TEST_P(EveryLink, a_frame_over_the_limit_is_corrupt) {
    Pair pair(GetParam());
    ASSERT_TRUE(pair.a->send(FrameType::control, {random_bytes(wire::kMaxHelloBytes + 1, 3)}));
    EXPECT_EQ(pump(*pair.a, *pair.b).error().kind, ErrorKind::corrupt);
}

TEST_P(EveryLink, a_peer_that_is_gone_is_disconnected) {
    Pair pair(GetParam());
    ASSERT_TRUE(pair.a->send(FrameType::control, {as_bytes("x")}));
    ASSERT_TRUE(pump(*pair.a, *pair.b));
    pair.a.reset();
    const auto frame = pair.b->receive();
    ASSERT_FALSE(frame);
    EXPECT_EQ(frame.error().kind, ErrorKind::disconnected) << frame.error().message;
}

TEST_P(EveryLink, a_frame_cut_short_is_disconnected_not_delivered) {
    Pair pair(GetParam());
    ASSERT_TRUE(pair.a->send(FrameType::control, {as_bytes("x")}));
    ASSERT_TRUE(pump(*pair.a, *pair.b));
    pair.b->set_limit(wire::kMaxComputeBytes);
    ASSERT_TRUE(pair.a->send(FrameType::control, {random_bytes(50'000'000, 4)}));  // more than the socket takes
    pair.a.reset();
    while (true) {
        const auto frame = pair.b->receive();
        if (!frame) {
            EXPECT_EQ(frame.error().kind, ErrorKind::disconnected) << frame.error().message;
            break;
        }
        ASSERT_FALSE(frame->has_value());
    }
}

TEST(Link, both_sides_of_a_tls_link_know_each_other_by_key) {
    Pair pair(true);
    ASSERT_TRUE(pair.a->send(FrameType::control, {as_bytes("x")}));
    ASSERT_TRUE(pump(*pair.a, *pair.b));
    EXPECT_EQ(pair.a->peer(), pair.b_identity.fingerprint());
    EXPECT_EQ(pair.b->peer(), pair.a_identity.fingerprint());
}

TEST(Link, a_hub_with_another_key_gets_nothing) {
    Pair pair(true);
    auto fds = socket_pair();
    auto client = Link::tls_client(std::move(fds->first), "hub", pair.a_context, Identity::make()->fingerprint());
    auto server = Link::tls_server(std::move(fds->second), "client", pair.b_context);
    ASSERT_TRUE((*client)->send(FrameType::control, {as_bytes("the secret token")}));
    Status client_status;
    for (int i = 0; i < 1000 && client_status; ++i) {
        (void)(*server)->flush();
        const auto frame = (*server)->receive();
        ASSERT_FALSE(frame && frame->has_value());
        client_status = (*client)->flush();
    }
    ASSERT_FALSE(client_status);
    EXPECT_EQ(client_status.error().kind, ErrorKind::invalid);
}

TEST(Link, garbage_instead_of_tls_is_corrupt) {
    Pair pair(true);
    auto fds = socket_pair();
    auto server = Link::tls_server(std::move(fds->second), "client", pair.b_context);
    const Bytes garbage = random_bytes(4096, 5);
    ASSERT_EQ(::send(fds->first.get(), garbage.data(), garbage.size(), 0), 4096);
    EXPECT_EQ((*server)->receive().error().kind, ErrorKind::corrupt);
}

TEST(Link, nothing_comes_in_time) {
    Pair pair(false);
    EXPECT_EQ(receive_blocking(*pair.a, 1ms).error().kind, ErrorKind::timeout);
}

TEST(Identity, is_the_same_after_a_restart) {
    const TestFolder folder;
    const auto& dir = folder.path();
    const auto first = Identity::load_or_make(dir, "hub");
    ASSERT_TRUE(first) << first.error().message;
    EXPECT_EQ(Identity::load_or_make(dir, "hub")->fingerprint(), first->fingerprint());
    EXPECT_EQ(std::filesystem::status(dir / "hub.pem").permissions(), std::filesystem::perms(0600));
    ASSERT_TRUE(write_file_atomically(dir / "hub.pem", "garbage"));
    EXPECT_EQ(Identity::load_or_make(dir, "hub").error().kind, ErrorKind::corrupt);
}

TEST(JoinLine, round_trips) {
    for (const std::uint16_t https_port : std::initializer_list<std::uint16_t>{7071, 9000}) {
        const JoinLine line{{"192.168.1.5", 7070}, sha256(as_bytes("key")), "abc-DEF_123", https_port};
        const auto parsed = parse_join_line(line.text() + "\n");
        ASSERT_TRUE(parsed) << parsed.error().message;
        EXPECT_EQ(parsed->hub, line.hub);
        EXPECT_EQ(parsed->fingerprint, line.fingerprint);
        EXPECT_EQ(parsed->token, line.token);
        EXPECT_EQ(parsed->https_port, https_port);
        EXPECT_EQ(line.redacted().find(line.token), std::string::npos);
    }
}

TEST(JoinLine, bad_lines_are_refused_without_repeating_the_secret) {
    const std::string good = JoinLine{{"h", 1}, sha256({}), "s3cret", 2}.text();
    const std::string fingerprint = sha256({}).hex();
    for (const std::string& bad :
         {std::string(), std::string("http://h:1/x/s3cret"), good.substr(0, good.size() - 6),
          "linkcpp://h:1/" + fingerprint.substr(1) + "/s3cret", "linkcpp://h/" + fingerprint + "/s3cret",
          "linkcpp://h:99999/" + fingerprint + "/s3cret", good + "/../x", good + "%00",
          good + "?https=", good + "?https=0"}) {
        const auto parsed = parse_join_line(bad);
        ASSERT_FALSE(parsed) << bad;
        EXPECT_EQ(parsed.error().kind, ErrorKind::invalid);
        EXPECT_EQ(parsed.error().message.find("s3cret"), std::string::npos);
    }
}

TEST(Socket, addresses_as_people_write_them) {
    EXPECT_EQ(parse_address("host:80").value(), (Address{"host", 80}));
    EXPECT_EQ(parse_address("[::1]:80").value(), (Address{"::1", 80}));
    EXPECT_EQ(parse_address("host", 7).value(), (Address{"host", 7}));
    EXPECT_EQ((Address{"::1", 80}).text(), "[::1]:80");
    for (const char* bad :
         {"", ":80", "h:x", "h:70000", "[::1", "[::1]x", "x[::1]:70", "a b:7", "::1", "h/x:7", "\xff:7", "[h/]:7"}) {
        EXPECT_FALSE(parse_address(bad)) << bad;
    }
}

TEST(Socket, a_port_in_use_is_said_to_be) {
    const auto first = Listener::tcp({"127.0.0.1", 0});
    ASSERT_TRUE(first);
    const auto second = Listener::tcp(first->address());
    ASSERT_FALSE(second);
    EXPECT_NE(second.error().message.find("in use"), std::string::npos) << second.error().message;
}

TEST(Socket, nobody_there_is_disconnected) {
    Address address;
    { address = Listener::tcp({"127.0.0.1", 0})->address(); }
    EXPECT_EQ(connect_tcp(address, 1s).error().kind, ErrorKind::disconnected);
}

TEST(Socket, tcp_and_unix_connect) {
    auto tcp = Listener::tcp({"127.0.0.1", 0});
    ASSERT_TRUE(connect_tcp(tcp->address(), 1s));
    EXPECT_TRUE(tcp->accept().value().has_value());
    EXPECT_FALSE(tcp->accept().value().has_value());
    const TestFolder folder;
    const auto path = folder / "socket";
    {
        auto listener = Listener::unix_socket(path);
        ASSERT_TRUE(listener) << listener.error().message;
        EXPECT_FALSE(Listener::unix_socket(path));  // alive: not replaced
        const auto client = connect_unix(path);
        ASSERT_TRUE(client);
        auto accepted = listener->accept();
        bool found = false;
        while (accepted && *accepted) {  // the refused second listener has knocked too
            found = (*accepted)->uid == ::getuid();
            accepted = listener->accept();
        }
        EXPECT_TRUE(found);
    }
    EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace linkcpp::net
