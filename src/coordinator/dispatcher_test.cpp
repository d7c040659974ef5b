#include "coordinator/dispatcher.h"

#include <atomic>
#include <functional>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include "net/socket.h"
#include "net/wakeup.h"
#include "wire/frame.h"

namespace linkcpp::coordinator {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kEmbd = 8;
constexpr std::uint32_t kExperts = 6;
constexpr std::size_t kUsed = 2;
constexpr std::uint32_t kLayer = 3;

// The experts of these tests: y = h × (expert + 1). Sums of a few such numbers are exact.
float expert_times(std::uint16_t expert) {
    return static_cast<float>(expert + 1);
}

struct Request {
    wire::ComputeRequest header;
    std::vector<wire::Pair> pairs;
    std::vector<float> rows;
};

// The far end of a data link: a thread that answers requests as `behave` says.
class Peer {
  public:
    using Behaviour = std::function<Status(net::Link&, const Request&)>;

    Peer(UniqueFd fd, Behaviour behave) : link_(net::Link::plain(std::move(fd), "coordinator")) {
        link_->set_limit(wire::kMaxComputeBytes);
        thread_ = std::jthread([this, behave = std::move(behave)](const std::stop_token& stop) {
            while (!stop.stop_requested() && serve(behave)) {
                std::array<pollfd, 2> entries{pollfd{link_->fd(), link_->events(), 0}, pollfd{wake_.fd(), POLLIN, 0}};
                ::poll(entries.data(), entries.size(), -1);
            }
            link_.reset();
        });
    }
    ~Peer() {
        thread_.request_stop();
        wake_.signal();
    }

    std::atomic<int> n_requests{0};

  private:
    // Answers what is there; false: hang up.
    bool serve(const Behaviour& behave) {
        if (!link_->flush()) { return false; }
        while (true) {
            const auto frame = link_->receive();
            if (!frame) { return false; }
            if (!*frame) { return true; }
            ++n_requests;
            if (!behave(*link_, decode((*frame)->payload))) { return false; }
        }
    }

    static Request decode(ByteView payload) {
        const wire::DecodedRequest decoded = wire::decode_compute_request(payload).value();
        Request request{decoded.header, {}, std::vector<float>(decoded.rows.size() / sizeof(float))};
        for (std::size_t i = 0; i < decoded.header.n_pairs; ++i) { request.pairs.push_back(decoded.pair(i)); }
        std::memcpy(request.rows.data(), decoded.rows.data(), decoded.rows.size());
        return request;
    }

    net::Wakeup wake_;
    std::unique_ptr<net::Link> link_;
    std::jthread thread_;
};

std::vector<float> results_of(const Request& request) {
    std::vector<float> rows;
    if (request.header.mode == wire::Mode::partial) { rows.resize(request.rows.size()); }
    for (const wire::Pair& pair : request.pairs) {
        for (std::uint32_t i = 0; i < kEmbd; ++i) {
            const float y = request.rows[pair.row * kEmbd + i] * expert_times(pair.expert);
            if (request.header.mode == wire::Mode::exact) {
                rows.push_back(y);
            } else {
                rows[pair.row * kEmbd + i] += y * pair.weight;
            }
        }
    }
    return rows;
}

Status send_answer(net::Link& link, const wire::ComputeAnswer& header, std::span<const float> rows) {
    std::array<std::byte, wire::ComputeAnswer::kHeaderBytes> head{};
    wire::encode(header, head);
    return link.send(wire::FrameType::compute_answer, {head, std::as_bytes(rows)});
}

// Answers in parts of `n_rows` rows.
Status answer_in_parts(net::Link& link, const Request& request, std::uint32_t n_rows) {
    const std::vector<float> rows = results_of(request);
    std::uint32_t first = 0;
    for (std::span<const float> left = rows; !left.empty();) {
        const auto part = left.first(std::min<std::size_t>(left.size(), n_rows * kEmbd));
        const auto n = static_cast<std::uint32_t>(part.size() / kEmbd);
        LINKCPP_CHECK(send_answer(
            link, {.id = request.header.id, .n_rows = n, .n_out = kEmbd, .compute_us = 5, .first = first}, part));
        first += n;
        left = left.subspan(part.size());
    }
    return {};
}

Status honest(net::Link& link, const Request& request) {
    return answer_in_parts(link, request, 1u << 20);
}

Status refuse(net::Link& link, const Request& request) {
    return send_answer(link,
                       {.id = request.header.id,
                        .outcome = wire::Outcome::overloaded,
                        .row_type = request.header.row_type,
                        .n_out = kEmbd},
                       {});
}

Status silent(net::Link& /*link*/, const Request& /*request*/) {
    return {};
}

Status hang_up(net::Link& /*link*/, const Request& /*request*/) {
    return fail(ErrorKind::failed, "gone");
}

class DispatcherTest : public testing::Test {
  protected:
    // `audit`: none by default, or a few random requests would come on top.
    void make(DispatchOptions options, double audit = 0) {
        options.audit = audit;
        auto manifest = std::make_shared<model::Manifest>();
        model::MoeLayer layer;
        layer.layer = kLayer;
        layer.n_expert = kExperts;
        layer.n_embd = kEmbd;
        manifest->model.layers.push_back(layer);
        manifest_ = manifest;
        options.patience.hang = 200ms;
        options.patience.coverage = 100ms;
        dispatcher_ = std::make_unique<Dispatcher>(options);
        dispatcher_->set_manifest(manifest_, {});
    }

    // A worker that holds `experts`, and takes requests of at most so many bytes.
    Peer& add(const std::vector<std::uint16_t>& experts, Peer::Behaviour behave,
              std::uint32_t max_frame = wire::kMaxComputeBytes) {
        const std::string name = "worker-" + std::to_string(peers_.size());
        auto route = std::make_unique<wire::fb::RouteT>();
        route->worker = route->name = name;
        route->slices = wire::encode_slices({{kLayer, experts}});
        routes_.workers.push_back(std::move(route));
        dispatcher_->set_routes(std::make_shared<const Routes>(make_routes(routes_, manifest_->model).value()));
        auto fds = net::socket_pair().value();
        peers_.push_back(std::make_unique<Peer>(std::move(fds.second), std::move(behave)));
        auto link = net::Link::plain(std::move(fds.first), name);
        link->set_peer_limit(max_frame);
        dispatcher_->add_link(name, std::move(link));
        return *peers_.back();
    }

    // Random tokens through random experts. True when every pair's row, or every token's sum, is right.
    // `own_rows`: each pair has a row of its own, with some room between tokens.
    testing::AssertionResult works(std::uint32_t n_tokens, wire::Mode mode = wire::Mode::exact, bool own_rows = false) {
        const std::size_t token_stride = own_rows ? kUsed * kEmbd + 8 : kEmbd;
        std::vector<float> h(n_tokens * token_stride);
        std::vector<std::int32_t> ids(std::size_t{n_tokens} * kUsed);
        std::vector<float> weights(ids.size());
        for (float& x : h) { x = static_cast<float>(random_() % 100); }
        for (std::size_t i = 0; i < ids.size(); ++i) {
            ids[i] = static_cast<std::int32_t>((random_() % 3 * 2 + i) % kExperts);
            weights[i] = 0.25f * static_cast<float>(1 + random_() % 4);
        }
        const Work work{.layer = kLayer,
                        .n_in = kEmbd,
                        .n_out = kEmbd,
                        .n_tokens = n_tokens,
                        .n_used = kUsed,
                        .rows = h.data(),
                        .token_stride = token_stride,
                        .slot_stride = own_rows ? kEmbd : 0u,
                        .ids = ids.data(),
                        .ids_stride = kUsed,
                        .weights = weights.data(),
                        .weights_stride = kUsed,
                        .n_summed = kUsed};
        const bool exact = mode == wire::Mode::exact;
        std::vector<float> expected(std::size_t{n_tokens} * kEmbd * (exact ? kUsed : 1));
        for (std::size_t i = 0; i < ids.size(); ++i) {
            const float times = expert_times(static_cast<std::uint16_t>(ids[i]));
            for (std::size_t j = 0; j < kEmbd; ++j) {
                const float y = h[i / kUsed * token_stride + (own_rows ? i % kUsed * kEmbd : 0) + j] * times;
                if (exact) {
                    expected[i * kEmbd + j] = y;
                } else {
                    expected[i / kUsed * kEmbd + j] += y * weights[i];
                }
            }
        }
        std::vector<float> out(expected.size(), -1);
        const Status status = exact ? dispatcher_->compute_rows(work, out) : dispatcher_->compute_sums(work, out);
        if (!status) { return testing::AssertionFailure() << status.error().message; }
        return out == expected ? testing::AssertionSuccess() : testing::AssertionFailure() << "other numbers";
    }

    std::mt19937 random_{1};
    std::shared_ptr<const model::Manifest> manifest_;
    wire::fb::RoutesT routes_;
    std::unique_ptr<Dispatcher> dispatcher_;
    std::vector<std::unique_ptr<Peer>> peers_;
};

const std::vector<std::uint16_t> kAll{0, 1, 2, 3, 4, 5};

TEST_F(DispatcherTest, every_pair_comes_from_a_holder_and_lands_in_its_place) {
    make({});
    add({0, 1, 2}, honest);
    add({3, 4}, honest);
    add({4, 5}, honest);
    std::size_t missing = 1;
    EXPECT_TRUE(dispatcher_->covered(&missing));
    EXPECT_EQ(missing, 0u);
    std::uint64_t pairs = 0;
    for (const std::uint32_t n : {1u, 2u, 7u, 16u, 17u, 300u}) {
        EXPECT_TRUE(works(n)) << n;
        pairs += n * kUsed;
    }
    EXPECT_EQ(dispatcher_->stats().pairs, pairs);
    EXPECT_EQ(dispatcher_->stats().retries, 0u);
}

// Weights before the experts, or products one at a time: the rows of a token's experts differ.
TEST_F(DispatcherTest, rows_that_differ_by_expert_are_sent_with_their_pairs) {
    make({});
    add({0, 1, 2}, honest);
    add({3, 4, 5}, honest);
    for (const std::uint32_t n : {1u, 2u, 16u, 300u}) { EXPECT_TRUE(works(n, wire::Mode::exact, true)) << n; }
}

TEST_F(DispatcherTest, partial_sums_are_added_up) {
    make({.mode = wire::Mode::partial});
    add({0, 2, 4}, honest);
    add({1, 3, 5}, [](net::Link& link, const Request& request) { return answer_in_parts(link, request, 1); });
    for (const std::uint32_t n : {1u, 5u, 100u}) { EXPECT_TRUE(works(n, wire::Mode::partial)) << n; }
}

TEST_F(DispatcherTest, answers_in_parts_are_put_together) {
    for (const std::uint32_t n_rows : {1u, 3u, 10u}) {
        make({});
        routes_ = {};
        add(kAll, [n_rows](net::Link& link, const Request& request) { return answer_in_parts(link, request, n_rows); });
        EXPECT_TRUE(works(60)) << n_rows;
    }
}

TEST_F(DispatcherTest, a_holder_that_fails_costs_a_resend_and_no_number) {
    const auto dies_half_way = [](net::Link& link, const Request& request) -> Status {
        const std::vector<float> rows = results_of(request);
        LINKCPP_CHECK(
            send_answer(link, {.id = request.header.id, .n_rows = 1, .n_out = kEmbd}, std::span(rows).first(kEmbd)));
        return fail(ErrorKind::failed, "gone");
    };
    const std::vector<std::pair<const char*, Peer::Behaviour>> failures{
        {"hangs up", hang_up}, {"refuses", refuse}, {"is silent", silent}, {"dies half-way", dies_half_way}};
    for (const auto& [what, behave] : failures) {
        make({});
        routes_ = {};
        add(kAll, behave);
        Peer& other = add(kAll, honest);
        EXPECT_TRUE(works(40)) << what;
        EXPECT_GT(dispatcher_->stats().retries, 0u) << what;
        EXPECT_GE(other.n_requests, 1) << what;
        EXPECT_TRUE(works(1)) << what;
    }
}

TEST_F(DispatcherTest, an_answer_that_contradicts_its_request_costs_the_peer_its_link) {
    const auto with = [](auto change) {
        return [change](net::Link& link, const Request& request) -> Status {
            wire::ComputeAnswer header{.id = request.header.id, .n_rows = request.header.n_pairs, .n_out = kEmbd};
            std::vector<float> rows = results_of(request);
            change(header);
            rows.resize(std::size_t{header.n_rows} * header.n_out * bytes_per_value(header.row_type) / sizeof(float));
            return send_answer(link, header, rows);
        };
    };
    using Answer = wire::ComputeAnswer;
    const std::vector<std::pair<const char*, Peer::Behaviour>> lies{
        {"too many rows", with([](Answer& a) { ++a.n_rows; })},
        {"no rows", with([](Answer& a) { a.n_rows = 0; })},
        {"a part out of order", with([](Answer& a) {
             a.n_rows -= 1;
             a.first = 1;
         })},
        {"rows of another length", with([](Answer& a) { a.n_out *= 2; })},
        {"another type of rows", with([](Answer& a) { a.row_type = wire::RowType::f16; })},
    };
    for (const auto& [what, behave] : lies) {
        make({});
        routes_ = {};
        Peer& liar = add(kAll, behave);
        add(kAll, honest);
        EXPECT_TRUE(works(20)) << what;
        EXPECT_TRUE(works(20)) << what;
        EXPECT_EQ(liar.n_requests, 1) << what;
    }
}

TEST_F(DispatcherTest, answers_that_nobody_waits_for_are_dropped_and_counted) {
    make({});
    add(kAll, [](net::Link& link, const Request& request) -> Status {
        Request stale = request;
        stale.header.id += 1000;
        LINKCPP_CHECK(honest(link, stale));
        return honest(link, request);
    });
    EXPECT_TRUE(works(3));
    EXPECT_EQ(dispatcher_->stats().late, 1u);
}

TEST_F(DispatcherTest, without_a_holder_the_call_fails_within_its_time_and_the_next_one_works) {
    make({});
    add({0, 1, 2, 3, 4}, honest);
    std::size_t missing = 0;
    EXPECT_FALSE(dispatcher_->covered(&missing));
    EXPECT_EQ(missing, 1u);
    const auto start = steady_now();
    EXPECT_FALSE(works(50));
    EXPECT_LT(steady_now() - start, 5s);
    EXPECT_EQ(dispatcher_->stats().failures, 1u);
    add({5}, honest);
    EXPECT_TRUE(works(50));
}

TEST_F(DispatcherTest, what_the_model_does_not_have_is_refused) {
    make({});
    add(kAll, honest);
    const std::vector<float> h(kEmbd);
    std::vector<float> out(kEmbd);
    Work work{.layer = kLayer,
              .n_in = kEmbd,
              .n_out = kEmbd,
              .n_tokens = 1,
              .n_used = 1,
              .rows = h.data(),
              .token_stride = kEmbd};
    for (const std::int32_t id : {-1, static_cast<std::int32_t>(kExperts), 1 << 30}) {
        work.ids = &id;
        work.ids_stride = 1;
        EXPECT_EQ(dispatcher_->compute_rows(work, out).error().kind, ErrorKind::invalid);
    }
    const std::int32_t id = 0;
    work.ids = &id;
    work.layer = 99;
    EXPECT_EQ(dispatcher_->compute_rows(work, out).error().kind, ErrorKind::invalid);
    work.layer = kLayer;
    work.n_tokens = 1u << 17;
    EXPECT_EQ(dispatcher_->compute_rows(work, out).error().kind, ErrorKind::invalid);
}

TEST_F(DispatcherTest, a_worker_is_sent_nothing_that_it_would_not_take) {
    make({});
    Peer& small = add(kAll, honest, 64);
    EXPECT_FALSE(works(2)) << "nobody takes it";
    Peer& large = add(kAll, honest);
    EXPECT_TRUE(works(2));
    EXPECT_EQ(small.n_requests, 0);
    EXPECT_GT(large.n_requests, 0);
}

TEST_F(DispatcherTest, a_worker_that_comes_back_is_used_again) {
    make({});
    Peer& first = add(kAll, hang_up);
    EXPECT_FALSE(works(2));
    EXPECT_EQ(first.n_requests, 1);
    auto fds = net::socket_pair().value();
    peers_.push_back(std::make_unique<Peer>(std::move(fds.second), honest));
    dispatcher_->add_link("worker-0", net::Link::plain(std::move(fds.first), "worker-0"));
    EXPECT_TRUE(works(2));
}

TEST_F(DispatcherTest, a_peer_that_is_silent_costs_its_time_once_not_in_every_layer) {
    make({});
    Peer& silent_peer = add(kAll, silent);
    add(kAll, honest);
    EXPECT_TRUE(works(20));
    const auto start = steady_now();
    for (int i = 0; i < 10; ++i) {  // it comes back each time
        auto fds = net::socket_pair().value();
        peers_.push_back(std::make_unique<Peer>(std::move(fds.second), silent));
        dispatcher_->add_link("worker-0", net::Link::plain(std::move(fds.first), "worker-0"));
        EXPECT_TRUE(works(20));
    }
    EXPECT_LT(steady_now() - start, 5 * 200ms);
    EXPECT_EQ(silent_peer.n_requests, 1);
}

TEST_F(DispatcherTest, a_peer_that_hangs_up_whenever_it_is_asked_fails_the_call_in_time) {
    make({});
    add(kAll, hang_up);
    std::atomic<bool> done{false};
    std::jthread reconnect([&] {
        std::vector<std::unique_ptr<Peer>> again;
        while (!done) {
            auto fds = net::socket_pair().value();
            again.push_back(std::make_unique<Peer>(std::move(fds.second), hang_up));
            dispatcher_->add_link("worker-0", net::Link::plain(std::move(fds.first), "worker-0"));
            std::this_thread::sleep_for(10ms);
        }
    });
    const auto start = steady_now();
    EXPECT_FALSE(works(5));
    EXPECT_LT(steady_now() - start, 3s);
    done = true;
}

TEST_F(DispatcherTest, what_is_late_is_given_to_another_and_the_first_answer_counts) {
    for (const wire::Mode mode : {wire::Mode::exact, wire::Mode::partial}) {
        make({.mode = mode});
        routes_ = {};
        std::atomic<bool> slow{false};
        add(kAll, [&](net::Link& link, const Request& request) -> Status {
            if (slow) { std::this_thread::sleep_for(150ms); }
            return honest(link, request);
        });
        add(kAll, [](net::Link& link, const Request& request) -> Status {
            std::this_thread::sleep_for(2ms);  // so that the other is preferred
            return honest(link, request);
        });
        for (int i = 0; i < 20; ++i) { ASSERT_TRUE(works(4, mode)); }  // measured
        EXPECT_EQ(dispatcher_->stats().twice, 0u);
        slow = true;
        const auto start = steady_now();
        for (int i = 0; i < 5; ++i) { EXPECT_TRUE(works(4, mode)); }
        EXPECT_LT(steady_now() - start, 150ms) << "nobody waits for it";
        EXPECT_GE(dispatcher_->stats().twice, 1u);
        EXPECT_EQ(dispatcher_->stats().twice_first, dispatcher_->stats().twice);
        EXPECT_EQ(dispatcher_->stats().retries, 0u);
        slow = false;
        std::this_thread::sleep_for(200ms);
        for (int i = 0; i < 20; ++i) { EXPECT_TRUE(works(4, mode)); }
        EXPECT_GE(dispatcher_->stats().late, 1u) << "its answer came, and nobody wanted it";
        EXPECT_EQ(dispatcher_->stats().pairs, 45u * 4 * kUsed) << "each once";
        peers_.clear();
    }
}

TEST_F(DispatcherTest, what_is_late_and_nobody_else_can_do_is_waited_for) {
    make({});
    std::atomic<bool> slow{false};
    add(kAll, [&](net::Link& link, const Request& request) -> Status {
        if (slow) { std::this_thread::sleep_for(150ms); }
        return honest(link, request);
    });
    for (int i = 0; i < 20; ++i) { ASSERT_TRUE(works(4)); }
    slow = true;
    EXPECT_TRUE(works(4));
    EXPECT_EQ(dispatcher_->stats().twice, 0u);
    EXPECT_EQ(dispatcher_->stats().retries, 0u);
}

TEST_F(DispatcherTest, a_part_that_comes_twice_is_dropped) {
    make({});
    add(kAll, [](net::Link& link, const Request& request) -> Status {
        const std::vector<float> rows = results_of(request);
        const auto n = static_cast<std::uint32_t>(request.pairs.size());
        const auto part = [&](std::uint32_t first, std::uint32_t count) {
            return send_answer(
                link, {.id = request.header.id, .n_rows = count, .n_out = kEmbd, .compute_us = 5, .first = first},
                std::span(rows).subspan(first * kEmbd, count * kEmbd));
        };
        LINKCPP_CHECK(part(0, 2));
        LINKCPP_CHECK(part(0, 2));
        LINKCPP_CHECK(part(1, 1));
        return part(2, n - 2);
    });
    EXPECT_TRUE(works(10));
    EXPECT_EQ(dispatcher_->stats().late, 2u);
    EXPECT_EQ(dispatcher_->stats().pairs, 10 * kUsed);
}

// As while slices move: it refuses until it has what it was given.
TEST_F(DispatcherTest, who_did_not_hold_it_a_moment_ago_is_asked_again_under_its_new_epoch) {
    make({});
    add(kAll, [](net::Link& link, const Request& request) -> Status {
        if (request.header.epoch == 7) { return honest(link, request); }
        return send_answer(link, {.id = request.header.id, .outcome = wire::Outcome::not_held, .n_out = kEmbd}, {});
    });
    std::jthread hub([&] {
        std::this_thread::sleep_for(40ms);
        routes_.workers[0]->epoch = 7;
        dispatcher_->set_routes(std::make_shared<const Routes>(make_routes(routes_, manifest_->model).value()));
    });
    EXPECT_TRUE(works(10));
    EXPECT_EQ(dispatcher_->stats().failures, 0u);
    hub.join();
    EXPECT_TRUE(works(10));
}

TEST_F(DispatcherTest, a_worker_that_dials_again_while_it_owes_an_answer_is_the_same_one) {
    make({});
    Peer& first = add(kAll, silent);
    std::jthread again([&] {
        while (first.n_requests == 0) { std::this_thread::sleep_for(1ms); }
        auto fds = net::socket_pair().value();
        peers_.push_back(std::make_unique<Peer>(std::move(fds.second), honest));
        dispatcher_->add_link("worker-0", net::Link::plain(std::move(fds.first), "worker-0"));
    });
    EXPECT_TRUE(works(10));
    again.join();
    EXPECT_EQ(dispatcher_->stats().pairs, 10 * kUsed);
    EXPECT_EQ(dispatcher_->links().size(), 1u);
}

// ---- audit

class AuditTest : public DispatcherTest {
  protected:
    // Of every request's rows one number has the wrong sign.
    static Status lie(net::Link& link, const Request& request) {
        std::vector<float> rows = results_of(request);
        rows[rows.size() / 2] = -rows[rows.size() / 2] - 1;
        return send_answer(link, {.id = request.header.id, .n_rows = request.header.n_pairs, .n_out = kEmbd}, rows);
    }
    // A hub that knows the truth. With `wait` 0 it rules later, that is to say never.
    void hub_rules() {
        dispatcher_->set_ask_hub(
            [this](const wire::fb::DisputeT& dispute, Duration wait) -> Result<wire::fb::VerdictT> {
                ++n_disputes_;
                n_awaited_ += wait > 0ns ? 1 : 0;
                wire::fb::VerdictT verdict;
                for (const auto& claim : dispute.claims) {
                    bool right = true;
                    for (std::size_t i = 0; i < kEmbd; ++i) {
                        right = right && claim->row[i] == dispute.input[i] * expert_times(dispute.expert);
                    }
                    verdict.right.push_back(right);
                    verdict.input_rounding.push_back(0);
                    verdict.inner_rounding.push_back(0);
                    verdict.why.emplace_back(right ? "" : "a sign");
                }
                return wait > 0ns ? verdict : wire::fb::VerdictT{};
            });
    }
    // Why it does not work; empty when it does.
    std::string failure(std::uint32_t n_tokens) {
        const auto result = works(n_tokens);
        return result ? "" : result.message();
    }
    std::uint64_t wrong(const std::string& worker) const {
        const auto audits = dispatcher_->audits();
        const auto found = audits.find(worker);
        return found == audits.end() ? 0 : found->second.wrong;
    }

    std::atomic<int> n_disputes_{0};
    std::atomic<int> n_awaited_{0};
};

TEST_F(AuditTest, honest_holders_agree_and_nobody_is_asked) {
    make({}, 1);
    hub_rules();
    add(kAll, honest);
    add(kAll, honest);
    for (int i = 0; i < 20; ++i) { EXPECT_TRUE(works(5)); }
    EXPECT_EQ(n_disputes_, 0);
    EXPECT_EQ(dispatcher_->stats().audits, 200u);
    EXPECT_EQ(dispatcher_->stats().pairs, 200u) << "checks are no work that was asked for";
    EXPECT_EQ(dispatcher_->stats().unchecked, 0u);
}

TEST_F(AuditTest, a_liar_is_used_no_more_and_all_it_did_for_the_layer_is_done_again) {
    make({}, 1);
    hub_rules();
    Peer& liar = add(kAll, lie);
    add(kAll, honest);
    add(kAll, honest);
    for (int i = 0; i < 20; ++i) { EXPECT_TRUE(works(20)); }
    EXPECT_LE(liar.n_requests, 2) << "its work and its check in the first call";
    EXPECT_EQ(wrong("worker-1"), 0u);
    EXPECT_EQ(wrong("worker-2"), 0u);
    EXPECT_EQ(dispatcher_->stats().failures, 0u);
}

TEST_F(AuditTest, at_a_small_share_a_liar_is_found_in_time) {
    make({}, 0.05);
    hub_rules();
    Peer& liar = add(kAll, lie);
    add(kAll, honest);
    int n_wrong = 0;
    for (int i = 0; i < 2000; ++i) { n_wrong += works(2) ? 0 : 1; }
    // Each audit of its work finds it one time in a few, and there is an audit every five calls.
    EXPECT_LT(n_wrong, 400);
    EXPECT_LT(liar.n_requests, 800);
    EXPECT_EQ(wrong("worker-0"), 1u);
    EXPECT_EQ(wrong("worker-1"), 0u);
}

TEST_F(AuditTest, without_anybody_to_rule_the_call_fails_and_says_so) {
    make({}, 1);
    add(kAll, lie);
    add(kAll, honest);
    EXPECT_THAT(failure(3), testing::HasSubstr("have computed different results"));
    dispatcher_->set_ask_hub([](const auto&, Duration) -> Result<wire::fb::VerdictT> {
        wire::fb::VerdictT verdict;
        verdict.error = "the file is gone";
        return verdict;
    });
    EXPECT_THAT(failure(3), testing::HasSubstr("the file is gone"));
    dispatcher_->set_ask_hub([](const auto&, Duration) -> Result<wire::fb::VerdictT> { return wire::fb::VerdictT{}; });
    EXPECT_FALSE(works(3)) << "a verdict about nobody";
}

TEST_F(AuditTest, what_nobody_else_can_compute_the_hub_rules_on) {
    make({}, 1);
    hub_rules();
    add(kAll, honest);
    EXPECT_TRUE(works(3));
    EXPECT_EQ(n_awaited_, 6) << "every pair, before it is used";
    EXPECT_EQ(dispatcher_->stats().audits, 6u);

    make({}, 0.5);
    routes_ = {};
    hub_rules();
    n_disputes_ = n_awaited_ = 0;
    add(kAll, honest);
    for (int i = 0; i < 20; ++i) { EXPECT_TRUE(works(3)); }
    EXPECT_GT(n_disputes_, 20);
    EXPECT_EQ(n_awaited_, 0) << "at a share it rules afterwards";
}

TEST_F(AuditTest, what_nobody_can_check_is_counted_and_with_all_to_be_checked_not_used) {
    make({}, 0.5);
    add(kAll, honest);
    for (int i = 0; i < 20; ++i) { EXPECT_TRUE(works(3)); }
    EXPECT_GT(dispatcher_->stats().unchecked, 20u);
    make({}, 1);
    routes_ = {};
    add(kAll, honest);
    EXPECT_THAT(failure(3), testing::HasSubstr("nobody else can check"));
}

TEST_F(AuditTest, a_liar_that_is_alone_makes_the_call_fail) {
    make({}, 1);
    hub_rules();
    add(kAll, lie);
    EXPECT_THAT(failure(3), testing::HasSubstr("no worker holds expert"));
}

TEST_F(AuditTest, numbers_that_are_none_are_no_agreement) {
    const auto nan = [](net::Link& link, const Request& request) -> Status {
        std::vector<float> rows = results_of(request);
        rows.back() = std::numeric_limits<float>::quiet_NaN();
        return send_answer(link, {.id = request.header.id, .n_rows = request.header.n_pairs, .n_out = kEmbd}, rows);
    };
    make({}, 1);
    hub_rules();
    add(kAll, nan);
    add(kAll, honest);
    add(kAll, honest);
    EXPECT_TRUE(works(8));
    EXPECT_TRUE(works(8));
}

TEST_F(AuditTest, who_was_found_wrong_is_used_again_when_the_hub_gives_it_another_set) {
    make({}, 1);
    hub_rules();
    std::atomic<bool> mended{false};
    Peer& liar = add(kAll, [&](net::Link& link, const Request& request) {
        return mended ? honest(link, request) : lie(link, request);
    });
    add(kAll, honest);
    add(kAll, honest);
    EXPECT_TRUE(works(20));
    const int before = liar.n_requests;
    mended = true;
    dispatcher_->set_routes(std::make_shared<const Routes>(make_routes(routes_, manifest_->model).value()));
    EXPECT_TRUE(works(20));
    EXPECT_EQ(liar.n_requests, before) << "the same routes say nothing new";
    ++routes_.workers[0]->epoch;
    dispatcher_->set_routes(std::make_shared<const Routes>(make_routes(routes_, manifest_->model).value()));
    EXPECT_TRUE(works(20));
    EXPECT_GT(liar.n_requests, before);
}

TEST_F(AuditTest, one_that_checks_and_is_lost_costs_nothing_but_its_check) {
    make({}, 1);
    hub_rules();
    add(kAll, honest);
    add(kAll, hang_up);
    EXPECT_TRUE(works(8));
    EXPECT_TRUE(works(8));
    EXPECT_EQ(wrong("worker-0"), 0u);
}

}  // namespace
}  // namespace linkcpp::coordinator
