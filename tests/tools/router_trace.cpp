// router_trace MODEL TEXT-FILE N OUT [OTHER [anew]]: what a coordinator decides while it decodes, and from what.
//
// N tokens are evaluated one at a time: the text's, then those that the logits have for the likeliest. OUT becomes a
// folder of arrays, fastest dimension first:
//
//   tokens.i32   {N}                   what was evaluated
//   inputs.f32   {n_embd, layers, N}   rows that go into the expert blocks
//   scores.f32   {n_expert, layers, N} what the router sorts experts by
//   order.i32    {n_expert, layers, N} experts, the best first: the first n_used are the chosen ones
//   blocks.f32   {n_embd, layers, N}   the blocks' results: the weighted sums over the chosen experts
//   logits.f32   {n_vocab, N}
//   shape.json   {"n_layers", "n_used"}
//
// With the folder OTHER of an earlier run its tokens are evaluated instead, so that step by step the same is asked.
// With `anew` each block's result is, once recorded, replaced by OTHER's: then every block of every layer starts from
// what it started from there, and shows by itself. The plugin comes in by GGML_BACKEND_PATH.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include <ggml-backend.h>
#include <llama-cpp.h>
#include <llama.h>

namespace {

constexpr int kThreads = 2;  // equal numbers need an equal order of additions

template <class T>
std::vector<T> read_array(const std::filesystem::path& path) {
    std::ifstream in(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(in), {}};
    std::vector<T> values(bytes.size() / sizeof(T));
    std::copy_n(bytes.data(), values.size() * sizeof(T), reinterpret_cast<char*>(values.data()));
    return values;
}

template <class T>
class ArrayFile {
  public:
    explicit ArrayFile(const std::filesystem::path& path) : out_(path, std::ios::binary) {}
    void append(const T* values, std::size_t n) {
        out_.write(reinterpret_cast<const char*>(values), static_cast<std::streamsize>(n * sizeof(T)));
    }
    void append(const ggml_tensor* tensor) {
        values_.resize(static_cast<std::size_t>(ggml_nelements(tensor)));
        ggml_backend_tensor_get(tensor, values_.data(), 0, ggml_nbytes(tensor));
        append(values_.data(), values_.size());
    }
    bool good() { return static_cast<bool>(out_.flush()); }

  private:
    std::ofstream out_;
    std::vector<T> values_;
};

// Sees the nodes through llama.cpp's evaluation callback. None of those asked for lies inside an expert block, so that
// the plugin still gets each block in one piece.
class Trace {
  public:
    Trace(const std::filesystem::path& folder, std::vector<float> replacements)
        : replacements_(std::move(replacements)),
          inputs_(folder / "inputs.f32"),
          scores_(folder / "scores.f32"),
          order_(folder / "order.i32"),
          blocks_(folder / "blocks.f32") {}

    static bool callback(ggml_tensor* node, bool ask, void* trace) {
        const std::string_view name = ggml_get_name(node);
        const auto is = [&](std::string_view kind) { return name.starts_with(kind); };
        if (ask) { return is("ffn_norm-") || is("ffn_moe_argsort-") || is("ffn_moe_out-"); }
        static_cast<Trace*>(trace)->take(node, is("ffn_norm-"), is("ffn_moe_out-"));
        return true;
    }

    std::size_t n_blocks() const { return n_blocks_; }
    bool good() { return inputs_.good() && scores_.good() && order_.good() && blocks_.good(); }

  private:
    void take(ggml_tensor* node, bool is_input, bool is_block) {
        if (is_input) {
            inputs_.append(node);
        } else if (is_block) {
            blocks_.append(node);
            const auto n = static_cast<std::size_t>(ggml_nelements(node));
            if ((n_blocks_ + 1) * n <= replacements_.size()) {
                ggml_backend_tensor_set(node, replacements_.data() + n_blocks_ * n, 0, ggml_nbytes(node));
            }
            ++n_blocks_;
        } else {
            scores_.append(node->src[0]);
            order_.append(node);
        }
    }

    std::vector<float> replacements_;  // empty: results stay as they are
    ArrayFile<float> inputs_;
    ArrayFile<float> scores_;
    ArrayFile<std::int32_t> order_;
    ArrayFile<float> blocks_;
    std::size_t n_blocks_ = 0;
};

struct Options {
    std::string model;
    std::string text;
    int n_tokens = 0;
    std::filesystem::path out;
    std::filesystem::path other;  // empty: none
    bool anew = false;
};

std::vector<llama_token> given_tokens(const Options& options, const llama_vocab* vocab) {
    if (!options.other.empty()) { return read_array<llama_token>(options.other / "tokens.i32"); }
    std::ifstream in(options.text);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    std::vector<llama_token> tokens(text.size() + 1);
    const int n = llama_tokenize(vocab, text.data(), static_cast<int>(text.size()), tokens.data(),
                                 static_cast<int>(tokens.size()), false, false);
    tokens.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
    return tokens;
}

std::string n_expert_used(const llama_model* model) {
    char architecture[64] = {};
    char value[32] = {};
    llama_model_meta_val_str(model, "general.architecture", architecture, sizeof architecture);
    const std::string key = std::string(architecture) + ".expert_used_count";
    llama_model_meta_val_str(model, key.c_str(), value, sizeof value);
    return value;
}

int run(const Options& options) {
    ggml_backend_load_all_from_path(LINKCPP_LLAMA_BIN);
    llama_model_params model_params = llama_model_default_params();
    model_params.use_extra_bufts = false;  // re-packed weights are multiplied in another order
    const llama_model_ptr model(llama_model_load_from_file(options.model.c_str(), model_params));
    if (!model) { return 1; }
    const llama_vocab* vocab = llama_model_get_vocab(model.get());
    const int n_vocab = llama_vocab_n_tokens(vocab);
    std::vector<llama_token> tokens = given_tokens(options, vocab);
    if (tokens.empty()) {
        std::fprintf(stderr, "%s: no tokens\n", options.text.c_str());
        return 1;
    }

    std::filesystem::create_directories(options.out);
    Trace trace(options.out, options.anew ? read_array<float>(options.other / "blocks.f32") : std::vector<float>());
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<std::uint32_t>(options.n_tokens);
    params.n_threads = params.n_threads_batch = kThreads;
    params.cb_eval = Trace::callback;
    params.cb_eval_user_data = &trace;
    const llama_context_ptr context(llama_init_from_model(model.get(), params));
    if (!context) { return 1; }

    ArrayFile<float> logits_file(options.out / "logits.f32");
    ArrayFile<llama_token> tokens_file(options.out / "tokens.i32");
    for (int i = 0; i < options.n_tokens; ++i) {
        llama_token token = tokens[static_cast<std::size_t>(i)];
        if (llama_decode(context.get(), llama_batch_get_one(&token, 1)) != 0) { return 1; }
        const float* logits = llama_get_logits_ith(context.get(), 0);
        logits_file.append(logits, static_cast<std::size_t>(n_vocab));
        tokens_file.append(&token, 1);
        if (static_cast<std::size_t>(i) + 1 == tokens.size()) {
            tokens.push_back(static_cast<llama_token>(std::max_element(logits, logits + n_vocab) - logits));
        }
    }
    std::ofstream shape(options.out / "shape.json");
    shape << R"({"n_layers": )" << trace.n_blocks() / static_cast<std::size_t>(options.n_tokens) << R"(, "n_used": )"
          << n_expert_used(model.get()) << "}\n";
    return trace.good() && logits_file.good() && tokens_file.good() && shape.flush() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    const bool anew = argc == 7 && std::string_view(argv[6]) == "anew";
    const int n_tokens = argc > 3 ? std::atoi(argv[3]) : 0;
    if (argc < 5 || argc > 7 || (argc == 7 && !anew) || n_tokens < 1) {
        std::fprintf(stderr, "usage: router_trace MODEL TEXT-FILE N OUT [OTHER [anew]]\n");
        return 2;
    }
    return run({.model = argv[1],
                .text = argv[2],
                .n_tokens = n_tokens,
                .out = argv[4],
                .other = argc > 5 ? argv[5] : "",
                .anew = anew});
}
