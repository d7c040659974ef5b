#include "model/gguf_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <random>

#include "model/moe.h"
#include "model/test_model.h"

namespace linkcpp::model {
namespace {

using testing::TinyModel;

ErrorKind kind_of(const std::filesystem::path& path) {
    const auto file = GgufFile::open(path);
    EXPECT_FALSE(file) << path << " was accepted";
    return file ? ErrorKind::failed : file.error().kind;
}

// Writes a header over the file's own; the rest stays.
Bytes with_number(Bytes bytes, std::size_t at, std::uint64_t value) {
    store_le(bytes.data() + at, value);
    return bytes;
}

std::size_t position_of(const Bytes& bytes, std::string_view text) {
    return as_text(bytes).find(text);
}

TEST(GgufFile, tensors_and_metadata_are_read) {
    const TestFolder folder;
    TinyModel model;
    model.more_keys = [](GgufWriter& writer) {
        writer.add("a.float", 1.5f);
        writer.add("a.flag", true);
        writer.add("a.negative", std::int32_t{-3});
        writer.add("a.large", std::uint64_t{1} << 40);
        writer.add("a.list", std::vector<std::uint32_t>{3, 1, 2});
    };
    const Bytes bytes = model.bytes();
    const auto file = GgufFile::open(folder.write("m.gguf", bytes));
    ASSERT_TRUE(file) << file.error().message;
    EXPECT_EQ(file->architecture(), "qwen3moe");
    EXPECT_EQ(file->number("qwen3moe.block_count"), 2);
    EXPECT_EQ(file->number("a.large"), std::uint64_t{1} << 40);
    EXPECT_EQ(file->number("a.negative"), std::nullopt);
    EXPECT_EQ(file->number("general.name"), std::nullopt);
    EXPECT_EQ(file->number("a.list"), std::nullopt);
    EXPECT_EQ(file->real("a.float"), 1.5);
    EXPECT_EQ(file->real("qwen3moe.block_count"), std::nullopt);
    EXPECT_EQ(file->flag("a.flag"), true);
    EXPECT_EQ(file->text("no.such"), std::nullopt);
    EXPECT_EQ(file->numbers("a.list"), (std::vector<std::uint64_t>{3, 1, 2}));
    EXPECT_EQ(file->numbers("a.large"), (std::vector<std::uint64_t>{std::uint64_t{1} << 40}));
    EXPECT_EQ(file->file_bytes(), bytes.size());

    const TensorInfo* tensor = file->find("blk.1.ffn_down_exps.weight");
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(tensor->type, GGML_TYPE_Q8_0);
    EXPECT_EQ(tensor->ne, (std::array<std::int64_t, 4>{32, 64, 4, 1}));
    EXPECT_EQ(tensor->n_bytes, 32 / 32 * 34 * 64 * 4);
    Bytes part(100);
    ASSERT_TRUE(file->read(*tensor, 50, part));
    EXPECT_TRUE(std::ranges::equal(part, std::span(bytes).subspan(tensor->offset + 50, 100)));
    EXPECT_EQ(file->find("blk.9.nothing"), nullptr);
}

TEST(GgufFile, offsets_agree_with_ggml) {
    const TestFolder folder;
    for (const std::uint64_t alignment : {32u, 8u, 256u}) {
        TinyModel model;
        model.alignment = alignment;
        const auto path = folder.write("m.gguf", model.bytes());
        const auto file = GgufFile::open(path);
        ASSERT_TRUE(file) << file.error().message;
        gguf_context* ggml = gguf_init_from_file(path.c_str(), {.no_alloc = true, .ctx = nullptr});
        ASSERT_NE(ggml, nullptr);
        ASSERT_EQ(gguf_get_n_tensors(ggml), static_cast<std::int64_t>(file->tensors().size()));
        for (std::int64_t i = 0; i < gguf_get_n_tensors(ggml); ++i) {
            const TensorInfo& tensor = file->tensors()[static_cast<std::size_t>(i)];
            EXPECT_EQ(tensor.name, gguf_get_tensor_name(ggml, i));
            EXPECT_EQ(tensor.n_bytes, gguf_get_tensor_size(ggml, i));
            EXPECT_EQ(tensor.offset, gguf_get_data_offset(ggml) + gguf_get_tensor_offset(ggml, i));
        }
        EXPECT_EQ(file->data_offset(0), gguf_get_data_offset(ggml));
        gguf_free(ggml);
    }
}

TEST(GgufFile, reading_outside_a_tensor_is_refused) {
    const TestFolder folder;
    const auto file = GgufFile::open(folder.write("m.gguf", TinyModel{}.bytes()));
    ASSERT_TRUE(file);
    const TensorInfo& tensor = file->tensors()[1];
    Bytes part(16);
    EXPECT_EQ(file->read(tensor, tensor.n_bytes - 15, part).error().kind, ErrorKind::invalid);
    EXPECT_EQ(file->read(tensor, UINT64_MAX - 3, part).error().kind, ErrorKind::invalid);
    EXPECT_TRUE(file->read(tensor, tensor.n_bytes - 16, part));
}

TEST(GgufFile, missing_file_and_folder_are_named) {
    const TestFolder folder;
    EXPECT_EQ(kind_of(folder / "none.gguf"), ErrorKind::not_found);
    EXPECT_EQ(kind_of(folder.path()), ErrorKind::invalid);
    EXPECT_EQ(kind_of(folder.write("empty.gguf", {})), ErrorKind::corrupt);
    EXPECT_EQ(kind_of(folder.write("text.gguf", as_bytes("this is a text, not a model"))), ErrorKind::corrupt);
}

TEST(GgufFile, every_truncation_is_rejected) {
    const TestFolder folder;
    TinyModel model;
    model.n_layer = 1;
    const GgufWriter writer = model.writer();
    const Bytes bytes = TinyModel::fill(writer);
    const auto path = folder.write("m.gguf", bytes);
    for (std::uint64_t size = bytes.size() - 1; size > 0; size -= size < writer.data_offset() + 8 ? 1 : 997) {
        std::filesystem::resize_file(path, size);
        EXPECT_EQ(kind_of(path), ErrorKind::corrupt) << size;
        const bool header_complete = size + 32 > writer.data_offset();  // all but the padding
        if (const auto partial = GgufFile::open(path, true)) {
            EXPECT_TRUE(header_complete) << size;
            EXPECT_EQ(partial->tensors().size(), 7);
            Bytes part(1);
            EXPECT_EQ(partial->read(partial->tensors().back(), 12799, part).error().kind, ErrorKind::corrupt);
        } else {
            EXPECT_LT(size, writer.data_offset());
        }
    }
}

TEST(GgufFile, flipped_bytes_never_crash) {
    const TestFolder folder;
    TinyModel model;
    model.n_layer = 1;
    model.more_keys = [](GgufWriter& writer) {
        writer.add("tokenizer.tokens", std::vector<std::string>{"a", "bc", "", "def"});
        writer.add("some.list", std::vector<std::int32_t>{-1, 2});
        writer.add("some.flag", false);
    };
    const GgufWriter writer = model.writer();
    const Bytes good = TinyModel::fill(writer);
    const auto path = folder.write("m.gguf", good);
    const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
    std::mt19937 random(1);
    std::size_t n_accepted = 0;
    for (int i = 0; i < 20000; ++i) {
        Bytes header(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(writer.data_offset()));
        const std::size_t n_flips = 1 + random() % 3;
        for (std::size_t k = 0; k < n_flips; ++k) {
            header[random() % header.size()] = static_cast<std::byte>(random());
        }
        ASSERT_TRUE(write_at(fd.get(), header, 0, "test"));
        const auto file = GgufFile::open(path, i % 2 == 0);
        if (!file) {
            EXPECT_FALSE(file.error().message.empty());
            continue;
        }
        ++n_accepted;
        Bytes byte(1);
        for (const TensorInfo& tensor : file->tensors()) {
            if (tensor.n_bytes == 0 || i % 2 == 0) { continue; }
            EXPECT_TRUE(file->read(tensor, tensor.n_bytes - 1, byte)) << tensor.name;
        }
        for (const RawKey& key : file->keys()) {
            (void)file->text(key.key);
            (void)file->numbers(key.key);
            (void)file->reals(key.key);
            (void)file->flag(key.key);
            (void)file->raw_value(key);
        }
        (void)read_moe(*file);
    }
    EXPECT_GT(n_accepted, 100);  // flips within names and values leave a valid file
}

TEST(GgufFile, hostile_counts_and_lengths_are_rejected) {
    const TestFolder folder;
    const Bytes good = TinyModel{}.bytes();
    const std::uint64_t huge[] = {~0ull, 1ull << 63, 1ull << 40, 1u << 20};
    for (const std::uint64_t value : huge) {
        EXPECT_EQ(kind_of(folder.write("m.gguf", with_number(good, 8, value))), ErrorKind::corrupt);   // tensors
        EXPECT_EQ(kind_of(folder.write("m.gguf", with_number(good, 16, value))), ErrorKind::corrupt);  // keys
        EXPECT_EQ(kind_of(folder.write("m.gguf", with_number(good, 24, value))),
                  ErrorKind::corrupt);  // first key's length
        const std::size_t name = position_of(good, "blk.1.ffn_up_exps.weight");
        EXPECT_EQ(kind_of(folder.write("m.gguf", with_number(good, name - 8, value))), ErrorKind::corrupt);
        const std::size_t ne = name + std::string_view("blk.1.ffn_up_exps.weight").size() + 4;
        EXPECT_EQ(kind_of(folder.write("m.gguf", with_number(good, ne, value))), ErrorKind::corrupt);
        EXPECT_EQ(kind_of(folder.write("m.gguf", with_number(good, ne + 16, value))), ErrorKind::corrupt);
        EXPECT_EQ(kind_of(folder.write("m.gguf", with_number(good, ne + 28, value))), ErrorKind::corrupt);  // offset
    }
}

// Each product alone wraps round to a small number in 64 bits.
TEST(GgufFile, shapes_that_overflow_are_rejected) {
    constexpr std::int64_t big = std::int64_t{1} << 32;
    EXPECT_EQ(tensor_bytes(GGML_TYPE_F32, {big, big, 1, 1}), std::nullopt);
    EXPECT_EQ(tensor_bytes(GGML_TYPE_F32, {0, big, big, 1}), std::nullopt);
    EXPECT_EQ(tensor_bytes(GGML_TYPE_F32, {big, 1 << 20, 1 << 10, 4}), std::nullopt);
    EXPECT_EQ(tensor_bytes(GGML_TYPE_F32, {-1, 1, 1, 1}), std::nullopt);
    EXPECT_EQ(tensor_bytes(GGML_TYPE_F32, {0, 5, 1, 1}), 0);
    EXPECT_EQ(tensor_bytes(GGML_TYPE_Q4_K, {256, 3, 1, 1}), 3 * 144);
    EXPECT_EQ(tensor_bytes(GGML_TYPE_Q4_K, {255, 3, 1, 1}), std::nullopt);
    EXPECT_EQ(tensor_bytes(GGML_TYPE_COUNT, {256, 1, 1, 1}), std::nullopt);
    EXPECT_EQ(tensor_bytes(-1, {256, 1, 1, 1}), std::nullopt);
    EXPECT_EQ(tensor_bytes(4, {256, 1, 1, 1}), std::nullopt);  // a type that ggml dropped
}

TEST(GgufFile, metadata_that_ggml_would_abort_on_is_rejected) {
    const TestFolder folder;
    const Bytes good = TinyModel{}.bytes();
    Bytes zero_in_key = good;
    zero_in_key[position_of(good, "general.name")] = std::byte{0};
    EXPECT_EQ(kind_of(folder.write("m.gguf", zero_in_key)), ErrorKind::corrupt);
    TinyModel odd;
    odd.more_keys = [](GgufWriter& writer) { writer.add(GGUF_KEY_GENERAL_ALIGNMENT, std::int32_t{32}); };
    EXPECT_EQ(kind_of(folder.write("m.gguf", odd.bytes())), ErrorKind::corrupt);
    odd.more_keys = [](GgufWriter& writer) { writer.add(GGUF_KEY_GENERAL_ALIGNMENT, 48u); };
    EXPECT_EQ(kind_of(folder.write("m.gguf", odd.bytes())), ErrorKind::corrupt);
    odd.more_keys = [](GgufWriter& writer) { writer.add("general.name", "again"); };
    EXPECT_EQ(kind_of(folder.write("m.gguf", odd.bytes())), ErrorKind::corrupt);
    odd.more_keys = [](GgufWriter& writer) {
        Bytes nested(16);  // an array of arrays
        store_le<std::int32_t>(nested.data(), GGUF_TYPE_ARRAY);
        store_le<std::int32_t>(nested.data() + 4, GGUF_TYPE_ARRAY);
        writer.add_raw("nested", nested);
    };
    EXPECT_EQ(kind_of(folder.write("m.gguf", odd.bytes())), ErrorKind::corrupt);
    EXPECT_EQ(kind_of(folder.write("m.gguf", with_number(good, 4, 1))), ErrorKind::unsupported);           // GGUF v1
    EXPECT_EQ(kind_of(folder.write("m.gguf", with_number(good, 4, 0x03000000))), ErrorKind::unsupported);  // big-endian
}

TEST(GgufFile, duplicate_tensors_are_rejected) {
    const TestFolder folder;
    TinyModel model;
    model.more_tensors = [](GgufWriter& writer) {
        (void)writer.add_tensor("token_embd.weight", GGML_TYPE_F32, {4, 1, 1, 1});
    };
    EXPECT_EQ(kind_of(folder.write("m.gguf", model.bytes())), ErrorKind::corrupt);
}

// A model in `n` files, two tensors in each.
class Splits : public ::testing::Test {
  protected:
    static std::string name(std::size_t i, std::size_t n) { return fmt::format("m-{:05}-of-{:05}.gguf", i + 1, n); }

    Bytes split(std::size_t i, std::size_t n, std::int32_t n_tensors) const {
        GgufWriter writer;
        if (i == 0) { writer.add("general.architecture", "qwen3moe"); }
        writer.add("split.no", static_cast<std::uint32_t>(i));
        writer.add("split.count", static_cast<std::uint32_t>(n));
        writer.add("split.tensors.count", n_tensors);
        (void)writer.add_tensor(fmt::format("t{}", 2 * i), GGML_TYPE_F32, {5, 1, 1, 1});
        (void)writer.add_tensor(fmt::format("t{}", 2 * i + 1), GGML_TYPE_F32, {7, 1, 1, 1});
        return TinyModel::fill(writer);
    }

    void write_all(std::size_t n) const {
        for (std::size_t i = 0; i < n; ++i) { folder.write(name(i, n), split(i, n, static_cast<std::int32_t>(2 * n))); }
    }

    TestFolder folder;
};

TEST_F(Splits, are_found_from_any_of_them) {
    write_all(3);
    for (std::size_t i = 0; i < 3; ++i) {
        const auto file = GgufFile::open(folder / name(i, 3));
        ASSERT_TRUE(file) << file.error().message;
        EXPECT_EQ(file->n_splits(), 3);
        EXPECT_EQ(file->architecture(), "qwen3moe");
        ASSERT_EQ(file->tensors().size(), 6);
        const TensorInfo* tensor = file->find("t5");
        ASSERT_NE(tensor, nullptr);
        EXPECT_EQ(tensor->split, 2);
        Bytes part(28);
        ASSERT_TRUE(file->read(*tensor, 0, part));
        const Bytes whole = testing::read_bytes(folder / name(2, 3));
        EXPECT_TRUE(std::ranges::equal(part, std::span(whole).subspan(tensor->offset, 28)));
    }
}

TEST_F(Splits, a_missing_one_is_named) {
    write_all(3);
    std::filesystem::remove(folder / name(1, 3));
    const auto file = GgufFile::open(folder / name(0, 3));
    ASSERT_FALSE(file);
    EXPECT_EQ(file.error().kind, ErrorKind::invalid);
    EXPECT_NE(file.error().message.find("00002-of-00003"), std::string::npos);
}

TEST_F(Splits, swapped_ones_are_rejected) {
    write_all(3);
    folder.write(name(1, 3), split(2, 3, 6));
    folder.write(name(2, 3), split(1, 3, 6));
    EXPECT_EQ(kind_of(folder / name(0, 3)), ErrorKind::invalid);
}

TEST_F(Splits, one_of_another_model_is_rejected) {
    write_all(3);
    folder.write(name(2, 3), split(2, 4, 8));
    EXPECT_EQ(kind_of(folder / name(0, 3)), ErrorKind::invalid);
    folder.write(name(2, 3), TinyModel{}.bytes());
    EXPECT_EQ(kind_of(folder / name(0, 3)), ErrorKind::invalid);
}

TEST_F(Splits, a_wrong_name_or_count_is_rejected) {
    write_all(3);
    EXPECT_EQ(kind_of(folder.write("renamed.gguf", split(0, 3, 6))), ErrorKind::invalid);
    EXPECT_EQ(kind_of(folder.write("m-00001-of-00002.gguf", split(0, 3, 6))), ErrorKind::invalid);
    EXPECT_EQ(kind_of(folder.write("m-00004-of-00003.gguf", split(0, 3, 6))), ErrorKind::invalid);
    folder.write(name(0, 3), split(0, 3, 7));
    EXPECT_EQ(kind_of(folder / name(0, 3)), ErrorKind::corrupt);
}

TEST_F(Splits, a_tensor_in_two_is_rejected) {
    write_all(2);
    GgufWriter writer;
    writer.add("split.no", 1u);
    writer.add("split.count", 2u);
    (void)writer.add_tensor("t0", GGML_TYPE_F32, {5, 1, 1, 1});
    (void)writer.add_tensor("t3", GGML_TYPE_F32, {5, 1, 1, 1});
    folder.write(name(1, 2), TinyModel::fill(writer));
    EXPECT_EQ(kind_of(folder / name(0, 2)), ErrorKind::corrupt);
}

TEST_F(Splits, a_cut_one_is_rejected) {
    write_all(2);
    const Bytes bytes = split(1, 2, 4);
    folder.write(name(1, 2), std::span(bytes).first(bytes.size() - 40));
    EXPECT_EQ(kind_of(folder / name(0, 2)), ErrorKind::corrupt);
    EXPECT_TRUE(GgufFile::open(folder / name(0, 2), true));
}

}  // namespace
}  // namespace linkcpp::model
