// For tests: small GGUF models made in memory.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/test_folder.h"
#include "model/gguf_file.h"
#include "model/gguf_writer.h"
#include "model/moe.h"

namespace linkcpp::model::testing {

inline Bytes read_bytes(const std::filesystem::path& path) {
    std::ifstream in(path, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(in)), {});
    const ByteView bytes = as_bytes(text);
    return {bytes.begin(), bytes.end()};
}

// What a small model looks like; a test changes what it is about.
struct TinyModel {
    std::string architecture = "qwen3moe";
    std::uint32_t n_layer = 2;
    std::uint32_t first_moe_layer = 0;  // layers before it have no experts
    std::uint32_t n_embd = 64;
    std::uint32_t n_ff = 32;
    std::uint32_t n_expert = 4;
    std::uint32_t n_expert_used = 2;
    ggml_type type = GGML_TYPE_F16;
    ggml_type down_type = GGML_TYPE_Q8_0;
    bool merged = false;  // gate_up in place of gate and up
    std::uint64_t alignment = GGUF_DEFAULT_ALIGNMENT;
    // Called with the writer before and after the model's own tensors.
    std::function<void(GgufWriter&)> more_keys = [](GgufWriter&) {};
    std::function<void(GgufWriter&)> more_tensors = [](GgufWriter&) {};

    GgufWriter writer() const {
        GgufWriter writer(alignment);
        writer.add("general.architecture", architecture);
        writer.add("general.name", "tiny");
        writer.add(architecture + ".block_count", n_layer);
        writer.add(architecture + ".embedding_length", n_embd);
        writer.add(architecture + ".expert_count", n_expert);
        writer.add(architecture + ".expert_used_count", n_expert_used);
        more_keys(writer);
        const auto tensor = [&](const std::string& name, ggml_type of, std::array<std::int64_t, 4> ne) {
            (void)writer.add_tensor(name, of, ne).value();
        };
        tensor("token_embd.weight", GGML_TYPE_F16, {n_embd, 100, 1, 1});
        for (std::uint32_t i = 0; i < n_layer; ++i) {
            const std::string block = "blk." + std::to_string(i) + ".";
            tensor(block + "attn_norm.weight", GGML_TYPE_F32, {n_embd, 1, 1, 1});
            if (i >= first_moe_layer) {
                tensor(block + "ffn_down_exps.weight", down_type, {n_ff, n_embd, n_expert, 1});
                if (merged) {
                    tensor(block + "ffn_gate_up_exps.weight", type, {n_embd, std::int64_t{2} * n_ff, n_expert, 1});
                } else {
                    tensor(block + "ffn_gate_exps.weight", type, {n_embd, n_ff, n_expert, 1});
                    tensor(block + "ffn_up_exps.weight", type, {n_embd, n_ff, n_expert, 1});
                }
            }
            tensor(block + "ffn_gate_inp.weight", GGML_TYPE_F32, {n_embd, n_expert, 1, 1});
        }
        more_tensors(writer);
        tensor("output.weight", GGML_TYPE_F16, {n_embd, 100, 1, 1});
        return writer;
    }

    // The whole file, tensors filled with bytes that never repeat for long.
    Bytes bytes() const { return fill(writer()); }

    static Bytes fill(const GgufWriter& writer) {
        Bytes bytes = writer.header();
        std::mt19937 random(7);  // NOLINT: the same bytes each time
        while (bytes.size() < writer.file_bytes()) { bytes.push_back(static_cast<std::byte>(random())); }
        return bytes;
    }
};

// Cuts a model into two files, "s-00001-of-00002.gguf" and its sibling: the first `n` tensors in one, the others in the
// other.
inline Status write_two_splits(const GgufFile& file, const TestFolder& folder, std::size_t n) {
    for (std::size_t split = 0; split < 2; ++split) {
        GgufWriter writer;
        if (split == 0) {
            for (const RawKey& key : file.keys()) { writer.add_raw(key.key, file.raw_value(key)); }
        }
        writer.add("split.no", static_cast<std::uint32_t>(split));
        writer.add("split.count", 2u);
        writer.add("split.tensors.count", static_cast<std::int32_t>(file.tensors().size()));
        const auto tensors = split == 0 ? file.tensors().first(n) : file.tensors().subspan(n);
        for (const TensorInfo& tensor : tensors) {
            LINKCPP_CHECK(writer.add_tensor(tensor.name, tensor.type, tensor.ne));
        }
        Bytes bytes = writer.header();
        bytes.resize(writer.file_bytes());
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            LINKCPP_CHECK(file.read(tensors[i], 0, std::span(bytes).subspan(writer.offset(i), writer.n_bytes(i))));
        }
        folder.write(fmt::format("s-{:05}-of-00002.gguf", split + 1), bytes);
    }
    return {};
}

}  // namespace linkcpp::model::testing
