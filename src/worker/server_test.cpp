#include "worker/server.h"

#include <thread>

#include <gtest/gtest.h>
#include <poll.h>

#include "expert/device.h"
#include "model/manifest.h"
#include "model/synth.h"
#include "model/test_model.h"
#include "net/socket.h"
#include "wire/control.h"

namespace linkcpp::worker {
namespace {

using namespace std::chrono_literals;

constexpr std::uint32_t kEmbd = 64;
constexpr std::uint64_t kModel = 17;

// A server on the CPU with the two experts of a small layer, and a coordinator's end of a link to it.
class ServerTest : public testing::Test {
  protected:
    void SetUp() override {
        model::SynthOptions options;
        options.n_layer = 1;
        options.n_expert = 2;
        options.n_expert_used = 1;
        options.n_embd = kEmbd;
        options.n_ff = 32;
        options.gate_type = options.up_type = options.down_type = GGML_TYPE_F32;
        options.experts_only = true;
        ASSERT_TRUE(model::write_synthetic_model(options, folder_ / "m.gguf"));
        const model::GgufFile file = model::GgufFile::open(folder_ / "m.gguf").value();
        const model::MoeLayer layer = model::read_moe(file)->layers.at(0);
        engine_ = expert::Engine::open(expert::cpu_device().value(), 1).value();
        const std::vector<std::uint16_t> experts{0, 1};
        ASSERT_TRUE(engine_->hold(kModel, layer, experts,
                                  [&](std::uint32_t, std::uint32_t expert, std::span<std::byte> to) -> Status {
                                      LINKCPP_TRY(const Bytes slice, model::read_slice(file, layer, expert));
                                      std::ranges::copy(slice, to.begin());
                                      return {};
                                  }));
        server_ = std::make_unique<Server>(*engine_);
        server_->set_epochs({3, 4});
        auto ends = net::socket_pair().value();
        link_ = net::Link::plain(std::move(ends.first), "worker");
        link_->set_limit(wire::kMaxComputeBytes);
        server_->add(net::Link::plain(std::move(ends.second), "coordinator"),
                     std::make_shared<std::atomic<bool>>(true));
    }

    void ask(std::uint64_t id, std::uint32_t epoch, std::uint64_t deadline_us = 0) {
        const wire::ComputeRequest header{.id = id,
                                          .model = kModel,
                                          .epoch = epoch,
                                          .n_rows = 1,
                                          .n_pairs = 1,
                                          .n_in = kEmbd,
                                          .deadline_us = deadline_us};
        const wire::Pair pair{0, 1, 0};
        const std::vector<float> row(kEmbd, 0.5f);
        Bytes payload(header.payload_bytes());
        std::ranges::copy(std::as_bytes(std::span(row)), wire::encode(header, std::span(&pair, 1), payload).begin());
        ASSERT_TRUE(link_->send(wire::FrameType::compute_request, {payload}));
    }
    // The next answer; counts the pulses before it.
    wire::ComputeAnswer answer() {
        while (true) {
            const auto frame = net::receive_blocking(*link_, 10s);
            if (!frame) {
                ADD_FAILURE() << frame.error().message;
                return {};
            }
            if (frame->type == wire::FrameType::compute_answer) {
                return wire::decode_compute_answer(frame->payload).value().header;
            }
            const auto message = wire::decode_control(frame->payload);
            n_pulses_ += message && (*message)->body.AsPulse() != nullptr ? 1 : 0;
        }
    }

    TestFolder folder_;
    std::unique_ptr<expert::Engine> engine_;
    std::unique_ptr<Server> server_;
    std::unique_ptr<net::Link> link_;
    int n_pulses_ = 0;
};

TEST_F(ServerTest, answers_for_the_epochs_that_it_was_given_and_no_others) {
    for (const std::uint32_t epoch : {3u, 4u}) {
        ask(epoch, epoch);
        const wire::ComputeAnswer done = answer();
        EXPECT_EQ(done.outcome, wire::Outcome::done);
        EXPECT_EQ(done.id, epoch);
        EXPECT_GT(done.clock_us, 0u);
    }
    for (const std::uint32_t epoch : {0u, 2u, 5u}) {
        ask(10, epoch);
        EXPECT_EQ(answer().outcome, wire::Outcome::stale_epoch) << epoch;
    }
    EXPECT_EQ(server_->stats().stale, 3u);
    EXPECT_EQ(server_->stats().refused, 3u);
    EXPECT_EQ(server_->stats().requests, 2u);
    server_->set_epochs({4, 5});
    ask(11, 5);
    EXPECT_EQ(answer().outcome, wire::Outcome::done) << "set before it was asked";
    ask(12, 3);
    EXPECT_EQ(answer().outcome, wire::Outcome::stale_epoch);
    for (std::uint32_t epoch = 6; epoch < 100; ++epoch) {
        server_->set_epochs({epoch});
        ask(epoch, epoch);
        ASSERT_EQ(answer().outcome, wire::Outcome::done) << "set before it was asked";
    }
}

TEST_F(ServerTest, refuses_what_is_beyond_its_deadline_by_its_own_clock) {
    ask(1, 3);
    const std::uint64_t clock = answer().clock_us;
    ask(2, 3, clock + 60'000'000);
    EXPECT_EQ(answer().outcome, wire::Outcome::done);
    ask(3, 3, clock);
    EXPECT_EQ(answer().outcome, wire::Outcome::expired);
    // It waits in line behind something long.
    server_->post([] { std::this_thread::sleep_for(200ms); });
    std::this_thread::sleep_for(20ms);
    ask(4, 3, clock + 100'000);  // 100 ms after the first answer

    EXPECT_EQ(answer().outcome, wire::Outcome::expired);
    EXPECT_EQ(server_->stats().expired, 2u);
}

TEST_F(ServerTest, tells_those_who_wait_that_it_lives_and_nobody_else) {
    auto ends = net::socket_pair().value();
    const auto idle = net::Link::plain(std::move(ends.first), "worker");
    server_->add(net::Link::plain(std::move(ends.second), "another"), std::make_shared<std::atomic<bool>>(true));
    ask(1, 3);
    answer();
    n_pulses_ = 0;
    server_->post([] { std::this_thread::sleep_for(650ms); });
    std::this_thread::sleep_for(50ms);
    ask(2, 3);
    EXPECT_EQ(answer().outcome, wire::Outcome::done);
    EXPECT_GE(n_pulses_, 3) << "ten a second";
    EXPECT_LE(n_pulses_, 8);
    pollfd entry{idle->fd(), POLLIN, 0};
    EXPECT_EQ(::poll(&entry, 1, 300), 0) << "who waits for nothing hears nothing";
}

TEST_F(ServerTest, says_so_too_while_a_request_has_come_only_by_half) {
    ask(1, 3);
    answer();
    std::this_thread::sleep_for(1200ms);  // its pulse thread sleeps by now
    const std::array<std::byte, 12> half{std::byte{200}, {}, {}, {}, std::byte{2}};
    ASSERT_EQ(::write(link_->fd(), half.data(), half.size()), static_cast<ssize_t>(half.size()));
    for (int i = 0; i < 2; ++i) {
        const auto frame = net::receive_blocking(*link_, 2s);
        ASSERT_TRUE(frame);
        EXPECT_EQ(frame->type, wire::FrameType::control);
    }
}

}  // namespace
}  // namespace linkcpp::worker
