#include "model/synth.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <vector>

#include <unistd.h>

#include "base/file.h"
#include "base/progress.h"
#include "model/gguf_writer.h"
#include "model/moe.h"
#include "model/parallel.h"
#include "model/random_weights.h"
#include "model/slicer.h"

namespace linkcpp::model {
namespace {

// Root mean square of silu(x) y for x, y of unit normal distribution (numerical integration).
constexpr double kSwigluScale = 0.5965;
constexpr std::uint64_t kChunkBytes = 4u << 20;
constexpr std::uint64_t kPageBytes = 4u << 10;
constexpr std::uint32_t kMinVocab = 300;
// LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS of llama.cpp's src/llama-hparams.h.
constexpr std::uint32_t kLlamaMaxLayers = 512;
constexpr std::uint32_t kLlamaMaxExperts = 1024;

bool is_qwen35(const SynthOptions& options) {
    return options.architecture == "qwen35moe";
}

bool has_attention(const SynthOptions& options, std::uint32_t layer) {
    return !is_qwen35(options) || (layer + 1) % options.full_attention_interval == 0;
}

// A matrix that takes a vector of `n` numbers of that scale to numbers of unit scale.
double unit_deviation(std::uint32_t n, double scale = 1) {
    return 1 / (std::sqrt(static_cast<double>(n)) * scale);
}

// The file in the making: its header, and how each tensor is filled.
class Synth {
  public:
    explicit Synth(const SynthOptions& options) : o_(options) {}

    Status plan() {
        add_keys();
        if (o_.experts_only) {
            for (std::uint32_t i = 0; i < o_.n_layer; ++i) { LINKCPP_CHECK(add_experts(i)); }
            return {};
        }
        add_vocabulary();
        LINKCPP_CHECK(add_matrix("token_embd.weight", o_.n_embd, o_.n_vocab, 1));
        for (std::uint32_t i = 0; i < o_.n_layer; ++i) {
            const std::string block = fmt::format("blk.{}.", i);
            LINKCPP_CHECK(add_ones(block + "attn_norm.weight", o_.n_embd));
            LINKCPP_CHECK(has_attention(o_, i) ? add_attention(block) : add_delta_net(block));
            LINKCPP_CHECK(
                add_ones(block + (is_qwen35(o_) ? "post_attention_norm.weight" : "ffn_norm.weight"), o_.n_embd));
            LINKCPP_CHECK(add(block + "ffn_gate_inp.weight", GGML_TYPE_F32, {o_.n_embd, o_.n_expert, 1, 1},
                              unit_deviation(o_.n_embd)));
            LINKCPP_CHECK(add_experts(i));
            if (is_qwen35(o_)) { LINKCPP_CHECK(add_shared_expert(block)); }
        }
        LINKCPP_CHECK(add_ones("output_norm.weight", o_.n_embd));
        return add_matrix("output.weight", o_.n_embd, o_.n_vocab, unit_deviation(o_.n_embd));
    }

    Status write(const std::filesystem::path& out, unsigned n_threads) const {
        LINKCPP_TRY(AtomicFile file, AtomicFile::create(out));
        LINKCPP_CHECK(write_at(file.fd(), writer_.header(), 0, out.string()));
        if (::ftruncate(file.fd(), static_cast<off_t>(writer_.file_bytes())) != 0) {
            return fail_errno(errno, out.string());
        }
        if (!o_.header_only) { LINKCPP_CHECK(fill(file, n_threads)); }
        return file.commit(AtomicFile::Flush::no);
    }

  private:
    Status add(const std::string& name, ggml_type type, const std::array<std::int64_t, 4>& ne, double deviation,
               double mean = 0) {
        const RandomWeights weights{
            .type = type, .n_columns = ne[0], .deviation = deviation, .mean = mean, .key = key_of(o_.seed, name)};
        if (Status status = weights.check(); !status) { return fail_with(name, std::move(status).error()); }
        LINKCPP_CHECK(writer_.add_tensor(name, type, ne));
        weights_.push_back({weights, static_cast<std::uint64_t>(ne[1] * ne[2])});
        return {};
    }

    Status add_matrix(const std::string& name, std::uint32_t n_in, std::uint32_t n_out, double deviation) {
        LINKCPP_CHECK(add(name, o_.dense_type, {n_in, n_out, 1, 1}, deviation));
        const bool is_needed = name == "token_embd.weight" || name == "output.weight";
        if (o_.sparse && !is_needed) { weights_.back().filled = 0; }
        return {};
    }

    // {n_in, n_out, n_expert}
    Status add_expert_matrices(const std::string& name, ggml_type type, const std::array<std::int64_t, 4>& ne,
                               double deviation) {
        LINKCPP_CHECK(add(name, type, ne, deviation));
        Weights& added = weights_.back();
        if (!o_.sparse) { return {}; }
        added.step = static_cast<std::uint64_t>(ne[1]);
        added.filled = std::clamp<std::uint64_t>(kPageBytes / added.random.row_bytes(), 1, added.step);
        return {};
    }

    Status add_ones(const std::string& name, std::uint32_t n) { return add(name, GGML_TYPE_F32, {n, 1, 1, 1}, 0, 1); }

    void add_keys();
    void add_vocabulary();
    Status add_attention(const std::string& block);
    Status add_delta_net(const std::string& block);
    Status add_experts(std::uint32_t layer);
    Status add_shared_expert(const std::string& block);
    Status fill(const AtomicFile& file, unsigned n_threads) const;

    // Of a tensor: of each `step` rows the first `filled` are made, the others are holes.
    struct Weights {
        RandomWeights random;
        std::uint64_t step = 1;  // all rows, unless it is said otherwise
        std::uint64_t filled = step;
    };

    const SynthOptions& o_;
    GgufWriter writer_;
    std::vector<Weights> weights_;  // of each of the writer's tensors
};

void Synth::add_keys() {
    const std::string a = o_.architecture + ".";
    writer_.add("general.architecture", o_.architecture);
    writer_.add("general.name",
                fmt::format("synthetic {}x{} top-{} seed {}", o_.n_layer, o_.n_expert, o_.n_expert_used, o_.seed));
    writer_.add("general.quantization_version", static_cast<std::uint32_t>(GGML_QNT_VERSION));
    if (o_.header_only) { writer_.add(kHeaderOnlyKey, true); }
    writer_.add(a + "block_count", o_.n_layer);
    writer_.add(a + "context_length", o_.n_ctx);
    writer_.add(a + "embedding_length", o_.n_embd);
    writer_.add(a + "feed_forward_length", o_.n_ff);
    writer_.add(a + "expert_feed_forward_length", o_.n_ff);
    writer_.add(a + "expert_count", o_.n_expert);
    writer_.add(a + "expert_used_count", o_.n_expert_used);
    writer_.add(a + "attention.head_count", o_.n_head);
    writer_.add(a + "attention.head_count_kv", o_.n_head_kv);
    writer_.add(a + "attention.key_length", o_.head_dim);
    writer_.add(a + "attention.value_length", o_.head_dim);
    writer_.add(a + "attention.layer_norm_rms_epsilon", 1e-6f);
    writer_.add(a + "rope.freq_base", 10000.0f);
    if (!is_qwen35(o_)) { return; }

    // A quarter of each head is rotated; the sections share out the pairs of that quarter.
    const std::uint32_t n_rot = o_.head_dim / 4;
    const auto n_pairs = static_cast<std::int32_t>(n_rot / 2);
    const std::int32_t third = (n_pairs + 2) / 3;
    writer_.add(a + "rope.dimension_count", n_rot);
    writer_.add(a + "rope.dimension_sections", std::vector<std::int32_t>{third, third, n_pairs - 2 * third, 0});
    writer_.add(a + "expert_shared_feed_forward_length", o_.n_ff_shared);
    writer_.add(a + "full_attention_interval", o_.full_attention_interval);
    writer_.add(a + "ssm.conv_kernel", 4u);
    writer_.add(a + "ssm.inner_size", o_.ssm_n_head * o_.ssm_state);
    writer_.add(a + "ssm.state_size", o_.ssm_state);
    writer_.add(a + "ssm.time_step_rank", o_.ssm_n_head);
    writer_.add(a + "ssm.group_count", o_.ssm_n_group);
}

std::string utf8(std::uint32_t code_point) {
    if (code_point < 0x80) { return {static_cast<char>(code_point)}; }
    return {static_cast<char>(0xc0 | code_point >> 6), static_cast<char>(0x80 | (code_point & 0x3f))};
}

// GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from 256 on.
std::vector<std::string> byte_alphabet() {
    std::vector<std::string> tokens;
    std::uint32_t next = 256;
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        tokens.push_back(utf8(printable ? byte : next++));
    }
    return tokens;
}

// All bytes; words of letters behind a space, each one a merge of a shorter word and a letter; the end of the text.
void Synth::add_vocabulary() {
    std::vector<std::string> tokens = byte_alphabet();
    std::vector<std::string> merges;
    std::vector<std::string> words{tokens[' ']};  // grows while it is walked: every word is lengthened by every letter
    for (std::size_t i = 0; tokens.size() < o_.n_vocab - 1; ++i) {
        for (char letter = 'a'; letter <= 'z' && tokens.size() < o_.n_vocab - 1; ++letter) {
            merges.push_back(words[i] + ' ' + letter);
            words.push_back(words[i] + letter);
            tokens.push_back(words.back());
        }
    }
    tokens.emplace_back("<|endoftext|>");
    std::vector<std::int32_t> types(o_.n_vocab, 1);  // normal
    types.back() = 3;                                // control
    writer_.add("tokenizer.ggml.model", "gpt2");
    writer_.add("tokenizer.ggml.pre", "qwen2");
    writer_.add("tokenizer.ggml.tokens", tokens);
    writer_.add("tokenizer.ggml.token_type", types);
    writer_.add("tokenizer.ggml.merges", merges);
    writer_.add("tokenizer.ggml.bos_token_id", o_.n_vocab - 1);
    writer_.add("tokenizer.ggml.eos_token_id", o_.n_vocab - 1);
    writer_.add("tokenizer.ggml.add_bos_token", false);
}

Status Synth::add_attention(const std::string& block) {
    const std::uint32_t n_q = o_.n_head * o_.head_dim;
    const std::uint32_t n_kv = o_.n_head_kv * o_.head_dim;
    const std::uint32_t n_normed = o_.architecture == "olmoe" ? o_.n_embd : o_.head_dim;
    const double unit = unit_deviation(o_.n_embd);
    // qwen35moe's queries come with a gate each, whose sigmoid is a half on average.
    LINKCPP_CHECK(add_matrix(block + "attn_q.weight", o_.n_embd, is_qwen35(o_) ? 2 * n_q : n_q, unit));
    LINKCPP_CHECK(add_matrix(block + "attn_k.weight", o_.n_embd, n_kv, unit));
    LINKCPP_CHECK(add_matrix(block + "attn_v.weight", o_.n_embd, n_kv, unit));
    LINKCPP_CHECK(
        add_matrix(block + "attn_output.weight", n_q, o_.n_embd, unit_deviation(n_q, is_qwen35(o_) ? 0.5 : 1)));
    LINKCPP_CHECK(add_ones(block + "attn_q_norm.weight", n_normed));
    return add_ones(block + "attn_k_norm.weight", n_normed);
}

Status Synth::add_delta_net(const std::string& block) {
    const std::uint32_t n_value = o_.ssm_n_head * o_.ssm_state;
    const std::uint32_t n_conv = 2 * o_.ssm_n_group * o_.ssm_state + n_value;
    const double unit = unit_deviation(o_.n_embd);
    LINKCPP_CHECK(add_matrix(block + "attn_qkv.weight", o_.n_embd, n_conv, unit));
    LINKCPP_CHECK(add_matrix(block + "attn_gate.weight", o_.n_embd, n_value, unit));
    LINKCPP_CHECK(add(block + "ssm_conv1d.weight", GGML_TYPE_F32, {4, n_conv, 1, 1}, unit_deviation(4)));
    LINKCPP_CHECK(add(block + "ssm_dt.bias", GGML_TYPE_F32, {o_.ssm_n_head, 1, 1, 1}, 0.5));
    // exp(a softplus(x)) is how much of the state a step keeps: a half to nearly all.
    LINKCPP_CHECK(add(block + "ssm_a", GGML_TYPE_F32, {o_.ssm_n_head, 1, 1, 1}, 0.1, -0.5));
    LINKCPP_CHECK(add(block + "ssm_beta.weight", GGML_TYPE_F32, {o_.n_embd, o_.ssm_n_head, 1, 1}, unit));
    LINKCPP_CHECK(add(block + "ssm_alpha.weight", GGML_TYPE_F32, {o_.n_embd, o_.ssm_n_head, 1, 1}, unit));
    LINKCPP_CHECK(add_ones(block + "ssm_norm.weight", o_.ssm_state));
    return add_matrix(block + "ssm_out.weight", n_value, o_.n_embd, unit_deviation(n_value, kSwigluScale));
}

Status Synth::add_experts(std::uint32_t layer) {
    const std::int64_t n_embd = o_.n_embd;
    const std::int64_t n_ff = o_.n_ff;
    const std::int64_t n_expert = o_.n_expert;
    const double unit = unit_deviation(o_.n_embd);
    const bool more_bits = o_.down_more_bits_type && has_more_bits(layer, o_.n_layer);
    const auto name = [layer](Role role) { return expert_tensor_name(layer, role); };
    if (o_.merged_gate_up) {
        LINKCPP_CHECK(add_expert_matrices(name(Role::gate_up), o_.gate_type, {n_embd, 2 * n_ff, n_expert, 1}, unit));
    } else {
        LINKCPP_CHECK(add_expert_matrices(name(Role::gate), o_.gate_type, {n_embd, n_ff, n_expert, 1}, unit));
        LINKCPP_CHECK(add_expert_matrices(name(Role::up), o_.up_type, {n_embd, n_ff, n_expert, 1}, unit));
    }
    return add_expert_matrices(name(Role::down), more_bits ? *o_.down_more_bits_type : o_.down_type,
                               {n_ff, n_embd, n_expert, 1}, unit_deviation(o_.n_ff, kSwigluScale));
}

Status Synth::add_shared_expert(const std::string& block) {
    const double unit = unit_deviation(o_.n_embd);
    LINKCPP_CHECK(add(block + "ffn_gate_inp_shexp.weight", GGML_TYPE_F32, {o_.n_embd, 1, 1, 1}, unit));
    LINKCPP_CHECK(add_matrix(block + "ffn_gate_shexp.weight", o_.n_embd, o_.n_ff_shared, unit));
    LINKCPP_CHECK(add_matrix(block + "ffn_up_shexp.weight", o_.n_embd, o_.n_ff_shared, unit));
    return add_matrix(block + "ffn_down_shexp.weight", o_.n_ff_shared, o_.n_embd,
                      unit_deviation(o_.n_ff_shared, kSwigluScale));
}

Status Synth::fill(const AtomicFile& file, unsigned n_threads) const {
    struct Chunk {
        std::size_t tensor;
        std::uint64_t first_row;
        std::uint64_t n_rows;
    };
    std::vector<Chunk> chunks;
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < weights_.size(); ++i) {
        const Weights& weights = weights_[i];
        const std::uint64_t row_bytes = weights.random.row_bytes();
        const std::uint64_t n_rows = writer_.n_bytes(i) / row_bytes;
        const std::uint64_t at_once = std::max<std::uint64_t>(1, kChunkBytes / row_bytes);
        for (std::uint64_t step = 0; step < n_rows; step += weights.step) {
            for (std::uint64_t row = 0; row < weights.filled; row += at_once) {
                chunks.push_back({i, step + row, std::min(at_once, weights.filled - row)});
            }
            total += weights.filled * row_bytes;
        }
    }
    Progress progress("making weights", total);
    return for_all(chunks.size(), n_threads, progress, [&](std::size_t i) -> Result<std::uint64_t> {
        const Chunk& chunk = chunks[i];
        const RandomWeights& weights = weights_[chunk.tensor].random;
        Bytes bytes(chunk.n_rows * weights.row_bytes());
        weights.fill(static_cast<std::int64_t>(chunk.first_row), bytes);
        const std::uint64_t offset = writer_.offset(chunk.tensor) + chunk.first_row * weights.row_bytes();
        LINKCPP_CHECK(write_at(file.fd(), bytes, offset, file.name()));
        return bytes.size();
    });
}

Status check_range(std::string_view what, std::uint32_t value, std::uint32_t from, std::uint32_t to) {
    if (value >= from && value <= to) { return {}; }
    return fail(ErrorKind::invalid, "{}: expected {} to {}, got {}", what, from, to, value);
}

Status check_dense(const SynthOptions& o) {
    LINKCPP_CHECK(check_range("layers", o.n_layer, 1, kLlamaMaxLayers));
    LINKCPP_CHECK(check_range("experts", o.n_expert, 1, kLlamaMaxExperts));
    LINKCPP_CHECK(check_range("vocabulary", o.n_vocab, kMinVocab, 1u << 20));
    LINKCPP_CHECK(check_range("heads", o.n_head, 1, 1024));
    LINKCPP_CHECK(check_range("KV heads", o.n_head_kv, 1, o.n_head));
    LINKCPP_CHECK(check_range("head size", o.head_dim, 16, 1024));
    if (o.n_head % o.n_head_kv != 0) {
        return fail(ErrorKind::invalid, "heads: expected a multiple of the {} KV heads, got {}", o.n_head_kv, o.n_head);
    }
    if (o.head_dim % 8 != 0) {
        return fail(ErrorKind::invalid, "head size: expected a multiple of 8, got {}", o.head_dim);
    }
    if (o.architecture == "olmoe" && o.n_head * o.head_dim != o.n_embd) {
        return fail(ErrorKind::invalid, "n_embd: expected a multiple of the {} heads, got {}", o.n_head, o.n_embd);
    }
    if (!is_qwen35(o)) { return {}; }
    LINKCPP_CHECK(check_range("n_ff of the shared expert", o.n_ff_shared, 1, kMaxFf));
    LINKCPP_CHECK(check_range("interval of attention", o.full_attention_interval, 1, kLlamaMaxLayers));
    LINKCPP_CHECK(check_range("size of a delta net's state", o.ssm_state, 8, 1024));
    LINKCPP_CHECK(check_range("heads of a delta net", o.ssm_n_head, 1, 1024));
    LINKCPP_CHECK(check_range("groups of a delta net", o.ssm_n_group, 1, o.ssm_n_head));
    if (o.ssm_n_head % o.ssm_n_group != 0) {
        return fail(ErrorKind::invalid, "heads of a delta net: expected a multiple of the {} groups, got {}",
                    o.ssm_n_group, o.ssm_n_head);
    }
    return {};
}

// Fills in what follows from other options and refuses what no file can hold.
Result<SynthOptions> complete(SynthOptions o) {
    if (o.architecture != "qwen3moe" && o.architecture != "qwen35moe" && o.architecture != "olmoe") {
        return fail(ErrorKind::unsupported, "architecture: expected qwen3moe, qwen35moe or olmoe, got '{}'",
                    o.architecture);
    }
    LINKCPP_CHECK(check_range("layers", o.n_layer, 1, kMaxLayers));
    LINKCPP_CHECK(check_range("experts", o.n_expert, 1, kMaxExperts));
    LINKCPP_CHECK(check_range("experts used", o.n_expert_used, 1, o.n_expert));
    LINKCPP_CHECK(check_range("n_embd", o.n_embd, 1, kMaxEmbd));
    LINKCPP_CHECK(check_range("n_ff", o.n_ff, 1, kMaxFf));
    if (o.merged_gate_up && (!is_qwen35(o) || o.gate_type != o.up_type)) {
        return fail(ErrorKind::invalid, "merged gate and up: expected qwen35moe and one type, got {}, {} and {}",
                    o.architecture, static_cast<int>(o.gate_type), static_cast<int>(o.up_type));
    }
    if (o.n_ff_shared == 0) { o.n_ff_shared = o.n_ff; }
    if (o.architecture == "olmoe" && o.n_head > 0) {
        o.n_head_kv = o.n_head;
        o.head_dim = o.n_embd / o.n_head;
    }
    if (!o.experts_only) { LINKCPP_CHECK(check_dense(o)); }
    return o;
}

SynthOptions qwen35_122b() {
    SynthOptions o;
    o.architecture = "qwen35moe";
    o.n_layer = 48;
    o.n_expert = 256;
    o.n_expert_used = 8;
    o.n_embd = 3072;
    o.n_ff = 1024;
    o.n_ff_shared = 1024;
    o.n_head = 32;
    o.n_head_kv = 2;
    o.head_dim = 256;
    o.n_vocab = 248320;
    o.n_ctx = 262144;
    o.ssm_state = 128;
    o.ssm_n_group = 16;
    o.ssm_n_head = 64;
    o.down_more_bits_type = GGML_TYPE_Q6_K;
    o.dense_type = GGML_TYPE_Q4_K;
    return o;
}

SynthOptions qwen35_122b_layer() {
    SynthOptions o = qwen35_122b();
    o.n_layer = 1;
    o.down_type = GGML_TYPE_Q6_K;
    o.down_more_bits_type.reset();
    o.experts_only = true;
    return o;
}

SynthOptions bench() {
    SynthOptions o;
    o.n_layer = 8;
    o.n_expert = 64;
    o.n_expert_used = 8;
    o.n_embd = 1024;
    o.n_ff = 512;
    o.n_head = 16;
    o.n_head_kv = 4;
    o.n_vocab = 32000;
    o.down_more_bits_type = GGML_TYPE_Q6_K;
    return o;
}

struct Preset {
    std::string_view name;
    SynthOptions (*options)();
};
constexpr Preset kPresets[] = {
    {"bench", bench}, {"qwen3.5-122b-a10b", qwen35_122b}, {"qwen3.5-122b-a10b-layer", qwen35_122b_layer}};

}  // namespace

Result<SynthOptions> synth_preset(std::string_view name) {
    std::string names;
    for (const Preset& preset : kPresets) {
        if (preset.name == name) { return preset.options(); }
        names += fmt::format("{}{}", names.empty() ? "" : ", ", preset.name);
    }
    return fail(ErrorKind::not_found, "preset: expected one of {}, got '{}'", names, name);
}

bool has_more_bits(std::uint32_t layer, std::uint32_t n_layer) {
    const std::uint32_t eighth = n_layer / 8;
    return layer < eighth || layer >= 7 * n_layer / 8 || (layer - eighth) % 3 == 2;
}

Status write_synthetic_model(const SynthOptions& options, const std::filesystem::path& out, unsigned n_threads) {
    LINKCPP_TRY(const SynthOptions completed, complete(options));
    Synth synth(completed);
    LINKCPP_CHECK(synth.plan());
    return synth.write(out, n_threads);
}

}  // namespace linkcpp::model
