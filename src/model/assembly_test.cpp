#include "model/assembly.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "model/backbone_stamp.h"
#include "model/composition.h"
#include "model/manifest.h"
#include "model/slicer.h"
#include "model/synth.h"
#include "model/test_model.h"

namespace linkcpp::model {
namespace {

using testing::read_bytes;
using testing::TinyModel;

class Assembly : public ::testing::Test {
  protected:
    GgufFile open(std::string_view name) const { return GgufFile::open(folder_ / std::string(name)).value(); }

    // Backbone and slices of `source` put together again.
    Result<std::vector<std::filesystem::path>> round_trip(const GgufFile& source) const {
        LINKCPP_CHECK(write_backbone(source, folder_ / "backbone.gguf"));
        LINKCPP_TRY(const GgufFile backbone, GgufFile::open(folder_ / "backbone.gguf"));
        return assemble(
            backbone, [&](const MoeLayer& layer, std::uint32_t expert) { return read_slice(source, layer, expert); },
            folder_ / "again.gguf");
    }

    void expect_the_same_again(std::string_view name) const {
        const GgufFile source = open(name);
        const auto paths = round_trip(source);
        ASSERT_TRUE(paths) << paths.error().message;
        ASSERT_EQ(paths->size(), source.n_splits());
        for (std::size_t i = 0; i < paths->size(); ++i) {
            EXPECT_TRUE(read_bytes((*paths)[i]) == read_bytes(source.path(i))) << (*paths)[i];
        }
    }

    TestFolder folder_;
};

TEST_F(Assembly, gives_the_model_s_bytes_also_between_its_tensors_and_behind_them) {
    for (const bool merged : {false, true}) {
        for (const std::uint64_t alignment : {32u, 128u}) {
            for (const std::size_t n_behind : {0u, 1u, 5000u}) {
                TinyModel model;  // its padding is no zeros
                model.merged = merged;
                model.alignment = alignment;
                Bytes bytes = model.bytes();
                bytes.resize(bytes.size() + n_behind, std::byte{7});
                folder_.write("m.gguf", bytes);
                expect_the_same_again("m.gguf");
            }
        }
    }
}

TEST_F(Assembly, gives_every_type_s_bytes) {
    std::size_t n_types = 0;
    for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
        SynthOptions options;
        options.n_layer = 1;
        options.n_expert = options.n_expert_used = 2;
        options.n_embd = options.n_ff = 256;
        options.gate_type = options.up_type = options.down_type = static_cast<ggml_type>(type);
        const Status made = write_synthetic_model(options, folder_ / "m.gguf");
        if (!made) {
            EXPECT_TRUE(made.error().kind == ErrorKind::unsupported || made.error().kind == ErrorKind::invalid)
                << made.error().message;
            continue;
        }
        ++n_types;
        SCOPED_TRACE(ggml_type_name(static_cast<ggml_type>(type)));
        expect_the_same_again("m.gguf");
    }
    EXPECT_GE(n_types, 20);
}

TEST_F(Assembly, gives_all_files_of_a_split_model) {
    folder_.write("m.gguf", TinyModel{}.bytes());
    for (const std::size_t n : {1u, 4u, 8u}) {
        ASSERT_TRUE(testing::write_two_splits(open("m.gguf"), folder_, n));
        expect_the_same_again("s-00001-of-00002.gguf");
        EXPECT_TRUE(std::filesystem::exists(folder_ / "again-00002-of-00002.gguf"));
    }
}

TEST_F(Assembly, of_a_backbone_s_backbone_is_the_model_too) {
    folder_.write("m.gguf", TinyModel{}.bytes());
    const GgufFile source = open("m.gguf");
    ASSERT_TRUE(write_backbone(source, folder_ / "one.gguf"));
    ASSERT_TRUE(write_backbone(open("one.gguf"), folder_ / "two.gguf"));
    const auto paths = assemble(
        open("two.gguf"),
        [&](const MoeLayer& layer, std::uint32_t expert) { return read_slice(source, layer, expert); },
        folder_ / "again.gguf");
    ASSERT_TRUE(paths) << paths.error().message;
    EXPECT_TRUE(read_bytes(folder_ / "again.gguf") == read_bytes(folder_ / "m.gguf"));
}

TEST_F(Assembly, leaves_no_file_when_a_slice_cannot_be_had) {
    folder_.write("m.gguf", TinyModel{}.bytes());
    ASSERT_TRUE(write_backbone(open("m.gguf"), folder_ / "backbone.gguf"));
    const auto with = [&](const SliceReader& slice) {
        const auto paths = assemble(open("backbone.gguf"), slice, folder_ / "again.gguf");
        EXPECT_FALSE(paths);
        EXPECT_FALSE(std::filesystem::exists(folder_ / "again.gguf"));
        return paths ? ErrorKind::failed : paths.error().kind;
    };
    EXPECT_EQ(with([](const MoeLayer&, std::uint32_t) { return fail(ErrorKind::not_found, "none"); }),
              ErrorKind::not_found);
    EXPECT_EQ(with([](const MoeLayer&, std::uint32_t) -> Result<Bytes> { return Bytes(3); }), ErrorKind::corrupt);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_.path()), {}), 2);
}

TEST_F(Assembly, asks_for_a_backbone_and_does_not_write_over_it) {
    folder_.write("m.gguf", TinyModel{}.bytes());
    const SliceReader none = [](const MoeLayer&, std::uint32_t) { return fail(ErrorKind::not_found, "none"); };
    EXPECT_EQ(assemble(open("m.gguf"), none, folder_ / "again.gguf").error().kind, ErrorKind::invalid);
    ASSERT_TRUE(write_backbone(open("m.gguf"), folder_ / "backbone.gguf"));
    EXPECT_EQ(assemble(open("backbone.gguf"), none, folder_ / "backbone.gguf").error().kind, ErrorKind::invalid);
}

// A backbone whose rest is any bytes: an error, never more.
TEST_F(Assembly, a_rest_that_does_not_fit_is_refused) {
    folder_.write("m.gguf", TinyModel{}.bytes());
    const GgufFile source = open("m.gguf");
    ASSERT_TRUE(write_backbone(source, folder_ / "backbone.gguf"));
    const Bytes good = read_bytes(folder_ / "backbone.gguf");
    const GgufFile backbone = open("backbone.gguf");
    const auto rest = std::ranges::find(backbone.keys(), "linkcpp.backbone.rest.0", &RawKey::key);
    ASSERT_NE(rest, backbone.keys().end());
    std::size_t n_refused = 0;
    constexpr std::size_t kArrayHead = 16;  // the array's type, its elements' and their number
    for (std::size_t at = rest->offset + kArrayHead; at < rest->offset + rest->n_bytes; at += 7) {
        Bytes bad = good;
        bad[at] ^= std::byte{0x41};
        const auto file = GgufFile::open(folder_.write("bad.gguf", bad));
        ASSERT_TRUE(file);
        const auto paths = assemble(
            *file, [&](const MoeLayer& layer, std::uint32_t expert) { return read_slice(source, layer, expert); },
            folder_ / "again.gguf");
        n_refused += paths ? 0 : 1;  // what is padding, or a text, may be anything
    }
    EXPECT_GT(n_refused, 20);
}

TEST_F(Assembly, a_composition_reads_like_what_it_writes) {
    TinyModel model;
    folder_.write("m.gguf", model.bytes());
    const GgufFile source = open("m.gguf");
    const MoeModel moe = read_moe(source).value();
    const Composition backbone = compose_backbone(source).value().content;
    const Composition slices = compose_slices(source, moe, 1, std::vector<std::uint32_t>{3, 0, 1}).value();
    ASSERT_TRUE(write_backbone(source, folder_ / "backbone.gguf"));
    ASSERT_TRUE(write_slices(source, 1, std::vector<std::uint32_t>{3, 0, 1}, folder_ / "slices.gguf"));
    for (const auto& [composition, name] : {std::pair(&backbone, "backbone.gguf"), std::pair(&slices, "slices.gguf")}) {
        const Bytes written = read_bytes(folder_ / name);
        ASSERT_EQ(composition->n_bytes(), written.size());
        std::mt19937 random(11);  // NOLINT: the same places each time
        for (int i = 0; i < 500; ++i) {
            const std::size_t begin = i == 0 ? 0 : random() % written.size();
            const std::size_t n =
                i == 0 ? written.size() : random() % std::min<std::size_t>(5000, written.size() - begin);
            Bytes read(n, std::byte{0x55});
            ASSERT_TRUE(composition->read(begin, read));
            ASSERT_TRUE(std::ranges::equal(read, ByteView(written).subspan(begin, n))) << begin << " " << n;
        }
    }
    std::filesystem::resize_file(folder_ / "m.gguf", 2000);
    Bytes all(slices.n_bytes());
    EXPECT_EQ(slices.read(0, all).error().kind, ErrorKind::corrupt);
}

}  // namespace
}  // namespace linkcpp::model
