#include "trust/record.h"

#include <random>

#include <gtest/gtest.h>

#include "model/slicer.h"
#include "trust/test_layer.h"

namespace linkcpp::trust {
namespace {

using testing::TestLayer;

Record make(const TestLayer& layer) {
    const ProbeInput input = layer.input(9, 3);
    Record record = begin_record(layer.shard, input).value();
    record.rows = layer.rows(input);
    record.place = {.device = "CPU",
                    .description = "a processor",
                    .backend = "CPU",
                    .ggml_version = "1",
                    .ggml_commit = "c",
                    .release = "r",
                    .machine = "x86_64",
                    .driver = {"libdriver.so 01234567"},
                    .features = {}};
    record.roundings = {{Part::batch, {expert::Rounding::q8_k, expert::Rounding::f16}}};
    return record;
}

TEST(Record, comes_back_as_it_was_written) {
    const TestLayer layer(TestLayer::small(GGML_TYPE_Q8_0));
    const Record record = make(layer);
    ASSERT_TRUE(write_record(record, layer.folder / "r.gguf"));
    const auto back = read_record(layer.folder / "r.gguf");
    ASSERT_TRUE(back) << back.error().message;
    EXPECT_EQ(back->seed, 9u);
    EXPECT_EQ(back->n_tokens, 3u);
    EXPECT_EQ(back->experts, record.experts);
    EXPECT_EQ(back->manifest.slices, record.manifest.slices);
    EXPECT_EQ(back->manifest.slices[0][0], sha256(layer.slice(used_experts(layer.input(9, 3))[0])));
    EXPECT_EQ(back->layer(), layer.shard.layer);
    EXPECT_EQ(back->place, record.place);
    EXPECT_EQ(back->roundings, record.roundings);
    EXPECT_EQ(back->rows, record.rows);
    EXPECT_EQ(back->input()->rows, layer.input(9, 3).rows);
}

TEST(Record, of_a_slice_file_that_lacks_most_experts) {
    const TestLayer layer(TestLayer::small(GGML_TYPE_Q8_0));
    const model::GgufFile file = model::GgufFile::open(layer.folder / "m.gguf").value();
    const std::vector<std::uint32_t> some{4, 1};
    ASSERT_TRUE(model::write_slices(file, 0, some, layer.folder / "s.gguf"));
    const ShardFile shard = open_shard(layer.folder / "s.gguf").value();
    EXPECT_EQ(shard.experts, (std::vector<std::uint16_t>{4, 1}));
    EXPECT_EQ(shard.layer, layer.shard.layer);
    EXPECT_EQ(shard.read(4).value(), layer.slice(4));
    EXPECT_EQ(shard.read(0).error().kind, ErrorKind::not_found);
    EXPECT_EQ(open_shard(layer.folder / "s.gguf", 3).error().kind, ErrorKind::not_found);
    EXPECT_EQ(open_shard(layer.folder / "m.gguf", 3).error().kind, ErrorKind::not_found);
    const ProbeInput input = make_input(shard.layer, shard.experts, 1, 4).value();
    Record record = begin_record(shard, input).value();
    record.rows = run_reference(shard.layer, shard.read, input, {}, 1).value();
    ASSERT_TRUE(write_record(record, layer.folder / "r.gguf"));
    EXPECT_EQ(read_record(layer.folder / "r.gguf")->rows, record.rows);
}

// Whatever happens to the bytes: an error or a record, never a crash.
TEST(Record, damaged_files) {
    const TestLayer layer(TestLayer::small(GGML_TYPE_Q8_0));
    ASSERT_TRUE(write_record(make(layer), layer.folder / "r.gguf"));
    const Bytes good = model::testing::read_bytes(layer.folder / "r.gguf");
    for (const std::size_t n : {std::size_t{0}, std::size_t{10}, good.size() / 2, good.size() - 1}) {
        EXPECT_FALSE(read_record(layer.folder.write("cut.gguf", ByteView(good).first(n))));
    }
    std::mt19937 random(1);  // NOLINT: the same damage each time
    const std::size_t header = 4096;
    int refused = 0;
    for (int i = 0; i < 300; ++i) {
        Bytes bad = good;
        bad[random() % header] ^= static_cast<std::byte>(1 + random() % 255);
        refused += read_record(layer.folder.write("bad.gguf", bad)) ? 0 : 1;
    }
    EXPECT_GT(refused, 100);
    EXPECT_EQ(read_record(layer.folder / "m.gguf").error().kind, ErrorKind::invalid);
    EXPECT_EQ(read_record(layer.folder / "none.gguf").error().kind, ErrorKind::not_found);
}

}  // namespace
}  // namespace linkcpp::trust
