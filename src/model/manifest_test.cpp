#include "model/manifest.h"

#include <gtest/gtest.h>

#include <random>

#include "base/file.h"
#include "model/slicer.h"
#include "model/test_model.h"

namespace linkcpp::model {
namespace {

using testing::TinyModel;

class ManifestTest : public ::testing::Test {
  protected:
    GgufFile open(const TinyModel& model, std::string_view name = "m.gguf") const {
        return GgufFile::open(folder.write(name, model.bytes())).value();
    }

    TestFolder folder;
};

void expect_corrupt(std::string_view json) {
    const auto manifest = Manifest::from_json(json);
    ASSERT_FALSE(manifest) << json.substr(0, 200);
    EXPECT_EQ(manifest.error().kind, ErrorKind::corrupt);
}

std::string replaced(std::string text, std::string_view from, std::string_view to) {
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
}

TEST_F(ManifestTest, hashes_every_slice_in_tensor_order) {
    const GgufFile file = open({});
    const auto manifest = make_manifest(file, 3);
    ASSERT_TRUE(manifest) << manifest.error().message;
    ASSERT_EQ(manifest->slices.size(), 2);
    for (const MoeLayer& layer : manifest->model.layers) {
        for (std::uint32_t expert = 0; expert < 4; ++expert) {
            Sha256 hash;
            for (const Role role : {Role::gate, Role::up, Role::down}) {
                const ExpertTensor& tensor = *layer.find(role);
                Bytes slab(tensor.slab_bytes);
                ASSERT_TRUE(file.read(*file.find(tensor.name), expert * tensor.slab_bytes, slab));
                hash.add(slab);
            }
            const Digest digest = hash.finish();
            ASSERT_NE(manifest->slice(layer.layer, expert), nullptr);
            EXPECT_EQ(*manifest->slice(layer.layer, expert), digest);
            EXPECT_EQ(sha256(read_slice(file, layer, expert).value()), digest);
        }
    }
    EXPECT_EQ(manifest->slice(2, 0), nullptr);
    EXPECT_EQ(manifest->slice(0, 4), nullptr);
    EXPECT_EQ(read_slice(file, manifest->model.layers[0], 4).error().kind, ErrorKind::not_found);
}

TEST_F(ManifestTest, is_the_same_for_any_number_of_threads) {
    const GgufFile file = open({});
    const std::string one = make_manifest(file, 1)->to_json();
    for (const unsigned n : {0u, 2u, 7u}) { EXPECT_EQ(make_manifest(file, n)->to_json(), one); }
}

TEST_F(ManifestTest, changes_with_one_byte_of_one_expert) {
    TinyModel model;
    const Digest id = make_manifest(open(model))->id();
    Bytes bytes = model.bytes();
    const TensorInfo tensor = *open(model).find("blk.1.ffn_up_exps.weight");
    const std::uint64_t last_expert = tensor.offset + tensor.n_bytes / 4 * 3;
    bytes[last_expert] ^= std::byte{1};
    const auto other = make_manifest(*GgufFile::open(folder.write("other.gguf", bytes)));
    EXPECT_NE(other->id(), id);
    bytes[last_expert] ^= std::byte{1};
    bytes[open(model).find("output.weight")->offset] ^= std::byte{1};  // not an expert
    EXPECT_EQ(make_manifest(*GgufFile::open(folder.write("other.gguf", bytes)))->id(), id);
}

TEST_F(ManifestTest, json_round_trips_to_the_same_id) {
    for (const bool merged : {false, true}) {
        TinyModel model;
        model.architecture = "qwen35moe";
        model.merged = merged;
        const Manifest manifest = make_manifest(open(model)).value();
        const auto again = Manifest::from_json(manifest.to_json());
        ASSERT_TRUE(again) << again.error().message;
        EXPECT_EQ(again->model, manifest.model);
        EXPECT_EQ(again->slices, manifest.slices);
        EXPECT_EQ(again->id(), manifest.id());
    }
}

TEST_F(ManifestTest, names_that_are_not_utf8_round_trip) {
    Manifest manifest = make_manifest(open({})).value();
    manifest.model.name = "caf\xe9 \xe4\xb8";
    const auto again = Manifest::from_json(manifest.to_json());
    ASSERT_TRUE(again) << again.error().message;
    EXPECT_EQ(again->id(), manifest.id());
}

TEST_F(ManifestTest, json_that_is_not_canonical_is_rejected) {
    const std::string good = make_manifest(open({}))->to_json();
    ASSERT_TRUE(Manifest::from_json(good));
    expect_corrupt(" " + good);
    expect_corrupt(good + "\n");
    expect_corrupt(replaced(good, "\"n_layer\":2", "\"n_layer\": 2"));
    expect_corrupt(replaced(good, "\"n_layer\":2", "\"n_layer\":2.0"));
    expect_corrupt(replaced(good, "\"n_layer\":2", "\"n_layer\":2,\"n_more\":1"));
    expect_corrupt(replaced(good, "\"n_layer\":2", "\"n_layer\":2,\"n_layer\":2"));
}

TEST_F(ManifestTest, json_with_wrong_values_is_rejected) {
    const std::string good = make_manifest(open({}))->to_json();
    expect_corrupt("");
    expect_corrupt("null");
    expect_corrupt("[]");
    expect_corrupt(replaced(good, "manifest.2", "manifest.1"));
    expect_corrupt(replaced(good, "\"qwen3moe\"", "\"\""));
    expect_corrupt(replaced(good, "\"n_layer\":2", "\"n_layer\":1"));
    expect_corrupt(replaced(good, "\"n_layer\":2", "\"n_layer\":4294967298"));
    expect_corrupt(replaced(good, "\"n_layer\":2", "\"n_layer\":-2"));
    expect_corrupt(replaced(good, "\"n_layer\":2", "\"n_layer\":\"2\""));
    expect_corrupt(replaced(good, "\"n_layer\":2,", ""));
    expect_corrupt(replaced(good, "\"n_expert\":4", "\"n_expert\":5"));
    expect_corrupt(replaced(good, "\"n_expert_used\":2", "\"n_expert_used\":0"));
    expect_corrupt(replaced(good, "\"n_ff\":32", "\"n_ff\":33"));
    expect_corrupt(replaced(good, "\"n_ff\":32", "\"n_ff\":4294967264"));
    expect_corrupt(replaced(good, "\"n_embd\":64", "\"n_embd\":0"));
    expect_corrupt(replaced(good, "\"activation\":1", "\"activation\":8"));
    expect_corrupt(replaced(good, "\"activation\":1", "\"activation\":12"));
    expect_corrupt(replaced(good, "\"parameters\":[0.0,0.0]", "\"parameters\":[0.0]"));
    expect_corrupt(replaced(good, "\"parameters\":[0.0,0.0]", "\"parameters\":[0.0,\"1\"]"));
    expect_corrupt(replaced(good, "\"parameters\":[0.0,0.0]", "\"parameters\":[0.0,1e300]"));
    expect_corrupt(replaced(good, "\"parameters\":[0.0,0.0]", "\"parameters\":[-1.0,0.0]"));
    expect_corrupt(replaced(good, "\"weights_first\":false", "\"weights_first\":0"));
    expect_corrupt(replaced(good, "\"role\":1", "\"role\":0"));
    expect_corrupt(replaced(good, "\"role\":1", "\"role\":2"));
    expect_corrupt(replaced(good, "\"type\":1", "\"type\":26"));  // integers
    expect_corrupt(replaced(good, "\"type\":1", "\"type\":4"));
    expect_corrupt(replaced(good, "\"layer\":1", "\"layer\":0"));
    const std::size_t hash = good.find("\"slices\":[\"") + 11;
    expect_corrupt(std::string(good).replace(hash, 1, "g"));
    expect_corrupt(std::string(good).erase(hash, 2));
    expect_corrupt(std::string(good).erase(hash - 1, 67));  // one slice less
}

TEST_F(ManifestTest, deep_or_long_json_is_rejected_quickly) {
    expect_corrupt(std::string(1 << 20, '['));
    expect_corrupt("{\"layers\":" + std::string(100, '[') + std::string(100, ']') + "}");
    expect_corrupt(std::string(kMaxManifestBytes + 1, ' '));
}

TEST_F(ManifestTest, damaged_json_never_crashes) {
    const std::string good = make_manifest(open({}))->to_json();
    std::mt19937 random(1);
    for (int i = 0; i < 3000; ++i) {
        std::string bad = good;
        for (unsigned k = 0; k <= random() % 3; ++k) { bad[random() % bad.size()] = static_cast<char>(random()); }
        if (i % 3 == 0) { bad.resize(random() % bad.size()); }
        if (const auto manifest = Manifest::from_json(bad)) { EXPECT_EQ(manifest->to_json(), bad); }
    }
}

TEST_F(ManifestTest, backbones_and_header_only_files_are_refused) {
    ASSERT_TRUE(write_backbone(open({}), folder / "backbone.gguf"));
    EXPECT_EQ(make_manifest(*GgufFile::open(folder / "backbone.gguf")).error().kind, ErrorKind::invalid);
    TinyModel model;
    model.more_keys = [](GgufWriter& writer) { writer.add(kHeaderOnlyKey, true); };
    EXPECT_EQ(load_or_make_manifest(open(model)).error().kind, ErrorKind::invalid);
}

TEST_F(ManifestTest, a_file_cut_short_is_an_error) {
    const Bytes bytes = TinyModel{}.bytes();
    const auto file = GgufFile::open(folder.write("m.gguf", std::span(bytes).first(bytes.size() / 2)), true);
    ASSERT_TRUE(file);
    EXPECT_EQ(make_manifest(*file, 2).error().kind, ErrorKind::corrupt);
}

class ManifestCache : public ManifestTest {
  protected:
    void SetUp() override { ::setenv("LINKCPP_HOME", (folder / "home").c_str(), 1); }
    void TearDown() override { ::unsetenv("LINKCPP_HOME"); }

    std::vector<std::filesystem::path> cached() const {
        std::vector<std::filesystem::path> files;
        for (const auto& entry : std::filesystem::directory_iterator(folder / "home" / "cache" / "manifests")) {
            files.push_back(entry.path());
        }
        return files;
    }
};

TEST_F(ManifestCache, is_used_while_the_file_stays_as_it_is) {
    const GgufFile file = open({});
    const Manifest first = load_or_make_manifest(file).value();
    ASSERT_EQ(cached().size(), 1);
    // Changed in the cache, to see that it is read from there.
    Manifest changed = first;
    changed.slices[0][0] = Digest{};
    ASSERT_TRUE(write_file_atomically(cached()[0], changed.to_json()));
    EXPECT_EQ(load_or_make_manifest(file)->id(), changed.id());
}

TEST_F(ManifestCache, is_made_anew_when_the_file_changes) {
    const Digest first = load_or_make_manifest(open({}))->id();
    Bytes bytes = TinyModel{}.bytes();
    bytes[open({}).find("blk.0.ffn_up_exps.weight")->offset] ^= std::byte{1};
    const auto path = folder.write("m.gguf", bytes);
    std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now() + std::chrono::seconds(5));
    EXPECT_NE(load_or_make_manifest(*GgufFile::open(path))->id(), first);
}

TEST_F(ManifestCache, that_is_damaged_is_made_anew) {
    const GgufFile file = open({});
    const Digest id = load_or_make_manifest(file)->id();
    for (const std::string_view damage : {"", "{}", "garbage"}) {
        ASSERT_TRUE(write_file_atomically(cached()[0], damage));
        EXPECT_EQ(load_or_make_manifest(file)->id(), id);
    }
    EXPECT_EQ(load_or_make_manifest(file)->to_json(), read_file(cached()[0]).value());
}

TEST_F(ManifestCache, that_cannot_be_written_is_no_error) {
    folder.write("home", as_bytes("a file where the folder should be"));
    EXPECT_TRUE(load_or_make_manifest(open({})));
}

}  // namespace
}  // namespace linkcpp::model
