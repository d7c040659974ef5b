#include "model/slicer.h"

#include <algorithm>

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "model/backbone_stamp.h"
#include "model/manifest.h"
#include "model/test_model.h"

namespace linkcpp::model {
namespace {

using testing::TinyModel;

std::uint64_t disk_bytes(const std::filesystem::path& path) {
    struct stat info{};
    EXPECT_EQ(::stat(path.c_str(), &info), 0);
    return static_cast<std::uint64_t>(info.st_blocks) * 512;
}

Bytes tensor_bytes_of(const GgufFile& file, std::string_view name) {
    const TensorInfo* tensor = file.find(name);
    EXPECT_NE(tensor, nullptr) << name;
    Bytes bytes(tensor->n_bytes);
    EXPECT_TRUE(file.read(*tensor, 0, bytes));
    return bytes;
}

class Slicer : public ::testing::Test {
  protected:
    GgufFile open(const TinyModel& model, std::string_view name = "m.gguf") const {
        return GgufFile::open(folder.write(name, model.bytes())).value();
    }

    Error slice_error(const GgufFile& file, std::uint32_t layer, std::vector<std::uint32_t> experts) const {
        const Status status = write_slices(file, layer, experts, folder / "bad.gguf");
        EXPECT_FALSE(status);
        EXPECT_FALSE(std::filesystem::exists(folder / "bad.gguf"));
        return status ? Error{} : status.error();
    }

    TestFolder folder;
};

TEST_F(Slicer, slices_are_the_source_s_bytes) {
    for (const bool merged : {false, true}) {
        TinyModel model;
        model.architecture = "qwen35moe";
        model.merged = merged;
        const GgufFile file = open(model);
        const Manifest manifest = make_manifest(file).value();
        for (const std::vector<std::uint32_t>& experts :
             {std::vector<std::uint32_t>{0, 1, 2, 3}, {2}, {3, 1}, {1, 2}, {3, 0, 1}}) {
            ASSERT_TRUE(write_slices(file, 1, experts, folder / "part.gguf"));
            const auto part = open_slices(folder / "part.gguf");
            ASSERT_TRUE(part) << part.error().message;
            EXPECT_EQ(part->experts, experts);
            EXPECT_EQ(part->layer, *manifest.model.find(1));
            for (std::size_t i = 0; i < experts.size(); ++i) {
                EXPECT_EQ(sha256(part->read(i).value()), *manifest.slice(1, experts[i]));
            }
            EXPECT_EQ(part->read(experts.size()).error().kind, ErrorKind::not_found);
        }
    }
}

TEST_F(Slicer, the_part_has_the_model_s_keys_and_original_counts) {
    TinyModel model;
    model.more_keys = [](GgufWriter& writer) {
        writer.add("qwen3moe.large", std::vector<std::uint32_t>(10000));
        writer.add("tokenizer.ggml.model", "gpt2");
    };
    ASSERT_TRUE(write_slices(open(model), 0, std::vector<std::uint32_t>{1, 3}, folder / "part.gguf"));
    const auto part = GgufFile::open(folder / "part.gguf");
    ASSERT_TRUE(part) << part.error().message;
    EXPECT_EQ(part->architecture(), "qwen3moe");
    EXPECT_EQ(part->text("general.name"), "tiny");
    EXPECT_EQ(part->number("qwen3moe.expert_count"), 4);
    EXPECT_EQ(part->number("qwen3moe.block_count"), 2);
    EXPECT_EQ(part->number(kSliceLayerKey), 0);
    EXPECT_EQ(part->number(kSliceNExpertKey), 4);
    EXPECT_EQ(part->numbers(kSliceExpertsKey), (std::vector<std::uint64_t>{1, 3}));
    EXPECT_EQ(part->numbers("qwen3moe.large"), std::nullopt);
    EXPECT_EQ(part->text("tokenizer.ggml.model"), std::nullopt);
    EXPECT_EQ(part->tensors().size(), 3);
    EXPECT_EQ(part->find("blk.0.ffn_gate_exps.weight")->ne[2], 2);
}

TEST_F(Slicer, wrong_layers_and_experts_are_refused) {
    TinyModel model;
    model.first_moe_layer = 1;
    const GgufFile file = open(model);
    EXPECT_EQ(slice_error(file, 0, {0}).kind, ErrorKind::not_found);
    EXPECT_EQ(slice_error(file, 2, {0}).kind, ErrorKind::not_found);
    EXPECT_EQ(slice_error(file, 1, {4}).kind, ErrorKind::not_found);
    EXPECT_EQ(slice_error(file, 1, {}).kind, ErrorKind::invalid);
    EXPECT_EQ(slice_error(file, 1, {1, 1}).kind, ErrorKind::invalid);
}

TEST_F(Slicer, a_source_cut_short_leaves_no_file) {
    const Bytes bytes = TinyModel{}.bytes();
    const auto file = GgufFile::open(folder.write("m.gguf", std::span(bytes).first(bytes.size() / 2)), true);
    ASSERT_TRUE(file);
    EXPECT_EQ(slice_error(*file, 1, {0, 1}).kind, ErrorKind::corrupt);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);  // no temporary one either
}

TEST_F(Slicer, a_part_is_not_a_model_and_a_model_is_not_a_part) {
    const GgufFile file = open({});
    ASSERT_TRUE(write_slices(file, 0, std::vector<std::uint32_t>{0, 1, 2, 3}, folder / "part.gguf"));
    EXPECT_EQ(read_moe(*GgufFile::open(folder / "part.gguf")).error().kind, ErrorKind::invalid);
    EXPECT_EQ(open_slices(folder / "m.gguf").error().kind, ErrorKind::invalid);
    EXPECT_EQ(open_slices(folder / "none.gguf").error().kind, ErrorKind::not_found);
}

TEST_F(Slicer, parts_that_contradict_themselves_are_rejected) {
    const auto part = [&](std::uint32_t layer, std::vector<std::uint32_t> experts, std::uint32_t n_expert) {
        TinyModel model;
        model.first_moe_layer = 1;
        model.n_expert = 2;  // in the file
        GgufWriter writer = model.writer();
        writer.add(kSliceLayerKey, layer);
        writer.add(kSliceExpertsKey, experts);
        writer.add(kSliceNExpertKey, n_expert);
        return open_slices(folder.write("part.gguf", TinyModel::fill(writer)));
    };
    EXPECT_TRUE(part(1, {0, 1}, 2));
    EXPECT_EQ(part(0, {0, 1}, 2).error().kind, ErrorKind::corrupt);
    EXPECT_EQ(part(1, {0, 0}, 2).error().kind, ErrorKind::corrupt);
    EXPECT_EQ(part(1, {0, 2}, 2).error().kind, ErrorKind::corrupt);
    EXPECT_EQ(part(1, {0}, 2).error().kind, ErrorKind::corrupt);
    EXPECT_EQ(part(1, {}, 2).error().kind, ErrorKind::corrupt);
    EXPECT_EQ(part(1, {0, 1}, 4).error().kind, ErrorKind::corrupt);
    EXPECT_FALSE(part(1, {0, 1}, 1u << 31));
}

TEST_F(Slicer, truncated_parts_are_rejected) {
    ASSERT_TRUE(write_slices(open({}), 1, std::vector<std::uint32_t>{0, 2}, folder / "part.gguf"));
    const Bytes bytes = testing::read_bytes(folder / "part.gguf");
    for (std::size_t size = 0; size + 32 < bytes.size(); size += 101) {
        const auto part = open_slices(folder.write("cut.gguf", std::span(bytes).first(size)));
        EXPECT_FALSE(part);
    }
}

TEST_F(Slicer, backbone_keeps_all_but_the_experts) {
    for (const std::uint64_t alignment : {32u, 128u}) {
        TinyModel model;
        model.alignment = alignment;
        const GgufFile file = open(model);
        const auto size = write_backbone(file, folder / "backbone.gguf");
        ASSERT_TRUE(size) << size.error().message;
        const auto backbone = GgufFile::open(folder / "backbone.gguf");
        ASSERT_TRUE(backbone) << backbone.error().message;
        EXPECT_EQ(backbone->file_bytes(), size->apparent_bytes);
        EXPECT_EQ(backbone->alignment(), alignment);
        EXPECT_EQ(backbone->flag(kBackboneKey), true);
        EXPECT_EQ(backbone->number(kBackboneSourceKey), file.file_bytes());
        for (const RawKey& key : file.keys()) {
            const auto same = std::ranges::find(backbone->keys(), key.key, &RawKey::key);
            ASSERT_NE(same, backbone->keys().end());
            EXPECT_TRUE(std::ranges::equal(backbone->raw_value(*same), file.raw_value(key)));
        }
        ASSERT_EQ(backbone->tensors().size(), file.tensors().size());
        for (const TensorInfo& tensor : file.tensors()) {
            const TensorInfo* copy = backbone->find(tensor.name);
            ASSERT_NE(copy, nullptr);
            EXPECT_EQ(copy->type, tensor.type);
            EXPECT_EQ(copy->ne, tensor.ne);
            if (parse_expert_tensor_name(tensor.name)) {
                Bytes bytes = tensor_bytes_of(*backbone, tensor.name);
                const auto stamp = decode_backbone_stamp(bytes);
                ASSERT_TRUE(stamp);
                const MoeModel moe = read_moe(file).value();
                const MoeLayer& layer = *moe.find(parse_expert_tensor_name(tensor.name)->layer);
                EXPECT_EQ(stamp->expert, sampled_expert(layer.layer, layer.n_expert));
                EXPECT_EQ(stamp->slice, sha256(read_slice(file, layer, stamp->expert).value()));
                std::fill_n(bytes.begin(), BackboneStamp::kBytes, std::byte{0});
                EXPECT_EQ(bytes, Bytes(tensor.n_bytes));
            } else {
                EXPECT_EQ(tensor_bytes_of(*backbone, tensor.name), tensor_bytes_of(file, tensor.name));
            }
        }
        EXPECT_EQ(read_moe(*backbone).value(), read_moe(file).value());
    }
}

TEST_F(Slicer, backbone_s_experts_are_one_hole_at_the_end) {
    TinyModel model;
    model.n_embd = 256;
    model.n_ff = 512;
    model.n_expert = 32;
    const GgufFile file = open(model);
    const auto size = write_backbone(file, folder / "backbone.gguf");
    ASSERT_TRUE(size);
    const auto backbone = GgufFile::open(folder / "backbone.gguf");
    std::uint64_t dense_end = 0;
    std::uint64_t experts_start = UINT64_MAX;
    for (const TensorInfo& tensor : backbone->tensors()) {
        if (parse_expert_tensor_name(tensor.name)) {
            experts_start = std::min(experts_start, tensor.offset);
        } else {
            dense_end = std::max(dense_end, tensor.offset + tensor.n_bytes);
        }
    }
    EXPECT_LE(dense_end, experts_start);
    EXPECT_GT(size->apparent_bytes, 20u << 20);
    EXPECT_LT(size->bytes, 300u << 10);
    // A stamp takes a block of the disk, two where it crosses a border.
    const std::uint64_t stamps = 6 * (std::uint64_t{8} << 10);
    EXPECT_LE(disk_bytes(folder / "backbone.gguf"), size->bytes + stamps + (16u << 10));
}

TEST_F(Slicer, backbone_of_a_backbone_is_the_same) {
    ASSERT_TRUE(write_backbone(open({}), folder / "one.gguf"));
    ASSERT_TRUE(write_backbone(*GgufFile::open(folder / "one.gguf"), folder / "two.gguf"));
    EXPECT_EQ(testing::read_bytes(folder / "one.gguf"), testing::read_bytes(folder / "two.gguf"));
}

TEST_F(Slicer, the_model_itself_is_never_overwritten) {
    const GgufFile file = open({});
    const Bytes before = testing::read_bytes(folder / "m.gguf");
    std::filesystem::create_symlink(folder / "m.gguf", folder / "link.gguf");
    for (const char* out : {"m.gguf", "link.gguf"}) {
        EXPECT_EQ(write_backbone(file, folder / out).error().kind, ErrorKind::invalid);
        EXPECT_EQ(write_slices(file, 0, std::vector<std::uint32_t>{0}, folder / out).error().kind, ErrorKind::invalid);
    }
    EXPECT_EQ(testing::read_bytes(folder / "m.gguf"), before);
}

TEST_F(Slicer, splits_give_the_same_slices_manifest_and_backbone) {
    const GgufFile file = open({});
    const Manifest manifest = make_manifest(file).value();
    ASSERT_TRUE(write_backbone(file, folder / "one.gguf"));
    const GgufFile one = GgufFile::open(folder / "one.gguf").value();
    ASSERT_TRUE(write_slices(file, 1, std::vector<std::uint32_t>{1, 2}, folder / "part.gguf"));
    const Bytes part = testing::read_bytes(folder / "part.gguf");
    for (const std::size_t n : {1u, 4u, 8u}) {
        ASSERT_TRUE(testing::write_two_splits(file, folder, n));
        const auto splits = GgufFile::open(folder / "s-00002-of-00002.gguf");
        ASSERT_TRUE(splits) << splits.error().message;
        EXPECT_EQ(make_manifest(*splits)->id(), manifest.id());
        ASSERT_TRUE(write_slices(*splits, 1, std::vector<std::uint32_t>{1, 2}, folder / "part.gguf"));
        EXPECT_EQ(testing::read_bytes(folder / "part.gguf"), part);
        ASSERT_TRUE(write_backbone(*splits, folder / "two.gguf"));
        const auto backbone = GgufFile::open(folder / "two.gguf");
        ASSERT_TRUE(backbone) << backbone.error().message;
        EXPECT_EQ(backbone->n_splits(), 1);
        EXPECT_EQ(backbone->number("split.count"), std::nullopt);
        for (const TensorInfo& tensor : one.tensors()) {
            EXPECT_EQ(tensor_bytes_of(*backbone, tensor.name), tensor_bytes_of(one, tensor.name));
        }
    }
}

TEST_F(Slicer, files_without_experts_bytes_are_refused) {
    ASSERT_TRUE(write_backbone(open({}), folder / "backbone.gguf"));
    EXPECT_EQ(slice_error(*GgufFile::open(folder / "backbone.gguf"), 0, {0}).kind, ErrorKind::invalid);
    TinyModel model;
    model.more_keys = [](GgufWriter& writer) { writer.add(kHeaderOnlyKey, true); };
    EXPECT_EQ(slice_error(open(model), 0, {0}).kind, ErrorKind::invalid);
    EXPECT_EQ(write_backbone(open(model), folder / "b.gguf").error().kind, ErrorKind::invalid);
}

}  // namespace
}  // namespace linkcpp::model
