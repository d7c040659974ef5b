#include "store/neighbour.h"

#include <gtest/gtest.h>

#include "base/test_folder.h"
#include "net/identity.h"
#include "store/neighbour_server.h"
#include "store/slice_store.h"

namespace linkcpp::store {
namespace {

using namespace std::chrono_literals;

class Neighbours : public testing::Test {
  protected:
    void SetUp() override {
        inventory_->set_here(1);
        inventory_->set_coming(2, true);
        ASSERT_TRUE(store_.put(hash_, slice_));
        auto server = NeighbourServer::start(
            {"127.0.0.1", 0}, server_tls_, store_, {.links = 8, .strangers = 3, .hello_time = 300ms}, refusals_,
            [this](const Digest& id) { return id == model_ ? inventory_ : std::shared_ptr<Inventory>(); });
        ASSERT_TRUE(server) << server.error().message;
        server_ = *std::move(server);
        server_->admit({client_key_.fingerprint()});
        there_ = {.key = server_key_.fingerprint(), .name = "there", .address = server_->address()};
    }

    Result<std::unique_ptr<NeighbourLink>> dial(const net::TlsContext& tls) {
        return NeighbourLink::dial(there_, tls, {});
    }

    Result<Bytes> fetch(NeighbourLink& link, const Digest& hash, std::uint64_t from, std::uint64_t n_bytes) {
        Bytes got;
        LINKCPP_CHECK(link.fetch(hash, from, n_bytes, [&](ByteView piece) -> Status {
            got.insert(got.end(), piece.begin(), piece.end());
            return {};
        }));
        return got;
    }

    static Bytes make_slice() {
        Bytes bytes(1'000'003);
        for (std::size_t i = 0; i < bytes.size(); ++i) { bytes[i] = static_cast<std::byte>(i * 31 + i / 1009); }
        return bytes;
    }

    TestFolder folder_;
    SliceStore store_ = SliceStore::open(folder_ / "store").value();
    Bytes slice_ = make_slice();
    Digest hash_ = sha256(slice_);
    Digest model_ = sha256(as_bytes("a model"));
    std::shared_ptr<Inventory> inventory_ = std::make_shared<Inventory>(model_, 11);
    Refusals refusals_;
    net::Identity server_key_ = net::Identity::make().value();
    net::Identity client_key_ = net::Identity::make().value();
    net::Identity stranger_key_ = net::Identity::make().value();
    net::TlsContext server_tls_ = net::TlsContext::make(server_key_).value();
    net::TlsContext client_tls_ = net::TlsContext::make(client_key_).value();
    net::TlsContext stranger_tls_ = net::TlsContext::make(stranger_key_).value();
    std::unique_ptr<NeighbourServer> server_;
    Neighbour there_;
};

TEST_F(Neighbours, say_what_they_have_and_what_is_coming) {
    const auto link = dial(client_tls_).value();
    const auto has = link->ask(model_);
    ASSERT_TRUE(has) << has.error().message;
    for (std::size_t i = 0; i < 20; ++i) {
        EXPECT_EQ(has->bits.here.get(i), i == 1) << i;
        EXPECT_EQ(has->bits.coming.get(i), i == 2) << i;
    }
    const auto unknown = link->ask(sha256(as_bytes("another model")));
    ASSERT_TRUE(unknown);
    EXPECT_FALSE(unknown->bits.here.get(1));
}

TEST_F(Neighbours, send_slices_whole_or_from_anywhere_on) {
    const auto link = dial(client_tls_).value();
    EXPECT_EQ(fetch(*link, hash_, 0, slice_.size()).value(), slice_);
    const Bytes end = fetch(*link, hash_, 700'001, slice_.size()).value();
    EXPECT_TRUE(std::ranges::equal(end, ByteView(slice_).subspan(700'001)));
    EXPECT_EQ(server_->bytes_sent(), 2 * slice_.size() - 700'001);
}

TEST_F(Neighbours, that_do_not_have_it_say_so_and_the_link_stands) {
    const auto link = dial(client_tls_).value();
    EXPECT_EQ(fetch(*link, sha256(as_bytes("nothing")), 0, 7).error().kind, ErrorKind::not_found);
    EXPECT_EQ(fetch(*link, hash_, 0, 7).error().kind, ErrorKind::not_found);  // of another length
    EXPECT_EQ(fetch(*link, hash_, 0, slice_.size()).value(), slice_);
}

TEST_F(Neighbours, hang_up_on_who_is_no_worker_of_the_swarm) {
    const auto link = dial(stranger_tls_).value();
    const auto has = link->ask(model_);
    ASSERT_FALSE(has);
    EXPECT_EQ(has.error().kind, ErrorKind::disconnected);
    EXPECT_EQ(refusals_.counts().at("neighbours: no worker of this swarm"), 1u);
    // Nor on who is not any more.
    const auto known = dial(client_tls_).value();
    ASSERT_TRUE(known->ask(model_));
    server_->admit({});
    EXPECT_FALSE(known->ask(model_));
}

TEST_F(Neighbours, are_not_held_up_by_strangers) {
    std::vector<UniqueFd> silent;
    for (int i = 0; i < 10; ++i) { silent.push_back(net::connect_tcp(server_->address(), 2s).value()); }
    const auto link = dial(client_tls_).value();
    EXPECT_EQ(fetch(*link, hash_, 0, slice_.size()).value(), slice_);
    const TimePoint begin = steady_now();
    while (!refusals_.counts().contains("neighbours: no hello in time") && steady_now() - begin < 10s) {
        std::this_thread::sleep_for(20ms);
    }
    const auto counts = refusals_.counts();
    EXPECT_GE(counts.at("neighbours: too many strangers"), 7u);
    EXPECT_GE(counts.at("neighbours: no hello in time"), 1u);
}

TEST_F(Neighbours, with_another_key_are_not_talked_to) {
    Neighbour wrong = there_;
    wrong.key = stranger_key_.fingerprint();
    const auto link = NeighbourLink::dial(wrong, client_tls_, {});
    ASSERT_TRUE(link);
    EXPECT_FALSE((*link)->ask(model_));
}

TEST_F(Neighbours, are_left_as_soon_as_nobody_waits_for_them) {
    server_.reset();
    const auto listener = net::Listener::tcp({"127.0.0.1", 0}).value();  // accepts and never answers
    std::stop_source stop;
    const auto link = NeighbourLink::dial({.key = Digest(), .name = "mute", .address = listener.address()}, client_tls_,
                                          stop.get_token())
                          .value();
    stop.request_stop();
    const TimePoint begin = steady_now();
    EXPECT_FALSE(link->ask(model_));
    EXPECT_LT(steady_now() - begin, 3s);
}

}  // namespace
}  // namespace linkcpp::store
