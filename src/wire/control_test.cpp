#include "wire/control.h"

#include <random>

#include <gtest/gtest.h>

namespace linkcpp::wire {
namespace {

Bytes sample_hello() {
    fb::HelloT hello;
    hello.role = fb::Role::worker;
    hello.token = "token";
    hello.name = "a worker";
    hello.memory_bytes = 1ull << 40;
    hello.features = features();
    return encode_control(std::move(hello));
}

TEST(Control, hello_round_trips) {
    const auto control = decode_control(sample_hello());
    ASSERT_TRUE(control) << control.error().message;
    const fb::HelloT* hello = (*control)->body.AsHello();
    ASSERT_NE(hello, nullptr);
    EXPECT_EQ(hello->role, fb::Role::worker);
    EXPECT_EQ(hello->name, "a worker");
    EXPECT_EQ(hello->memory_bytes, 1ull << 40);
    EXPECT_EQ(hello->features, features());
    EXPECT_EQ((*control)->body.AsWelcome(), nullptr);
}

TEST(Control, slices_round_trip) {
    const SliceSet slices{{0, {0, 1, 5}}, {7, {65535}}};
    EXPECT_EQ(n_slices(slices), 4u);
    fb::AssignT assign;
    assign.epoch = 3;
    assign.model_id = encode_digest(sha256(as_bytes("model")));
    assign.slices = encode_slices(slices);
    const auto control = decode_control(encode_control(std::move(assign)));
    ASSERT_TRUE(control);
    const fb::AssignT* got = (*control)->body.AsAssign();
    ASSERT_NE(got, nullptr);
    EXPECT_EQ(decode_slices(got->slices).value(), slices);
    EXPECT_EQ(decode_digest(got->model_id).value(), sha256(as_bytes("model")));
}

TEST(Control, slices_out_of_order_are_corrupt) {
    for (const SliceSet& slices : {SliceSet{{1, {0}}, {0, {0}}}, SliceSet{{1, {0}}, {1, {1}}}, SliceSet{{1, {2, 1}}},
                                   SliceSet{{1, {1, 1}}}, SliceSet{{1u << 16, {0}}}}) {
        EXPECT_EQ(decode_slices(encode_slices(slices)).error().kind, ErrorKind::corrupt);
    }
}

TEST(Control, a_digest_of_another_length_is_corrupt) {
    EXPECT_EQ(decode_digest(std::vector<std::uint8_t>(31)).error().kind, ErrorKind::corrupt);
    EXPECT_EQ(decode_digest({}).error().kind, ErrorKind::corrupt);
}

TEST(Control, every_truncation_is_refused) {
    const Bytes message = sample_hello();
    static constexpr std::size_t kMaxPadding = 8;  // behind the last field, and of no consequence
    for (std::size_t n = 0; n < message.size(); ++n) {
        const auto control = decode_control(ByteView(message).first(n));
        EXPECT_TRUE(!control || n + kMaxPadding > message.size()) << n;
    }
}

TEST(Control, flipped_bits_never_crash) {
    std::mt19937 random(11);
    const Bytes message = sample_hello();
    for (int i = 0; i < 20'000; ++i) {
        Bytes bad = message;
        for (int flips = 0; flips < 4; ++flips) {
            bad[random() % bad.size()] ^= static_cast<std::byte>(1u << random() % 8);
        }
        if (const auto control = decode_control(bad)) { EXPECT_NE((*control)->body.value, nullptr); }
    }
}

TEST(Control, a_message_of_a_later_release_is_unsupported_not_corrupt) {
    flatbuffers::FlatBufferBuilder builder;
    const auto name = builder.CreateString("x");
    const auto hello = fb::CreateGoodbye(builder, name);
    fb::ControlBuilder control(builder);
    control.add_body_type(static_cast<fb::Body>(200));
    control.add_body(hello.Union());
    fb::FinishControlBuffer(builder, control.Finish());
    const auto* begin = reinterpret_cast<const std::byte*>(builder.GetBufferPointer());
    EXPECT_EQ(decode_control({begin, builder.GetSize()}).error().kind, ErrorKind::unsupported);
}

}  // namespace
}  // namespace linkcpp::wire
