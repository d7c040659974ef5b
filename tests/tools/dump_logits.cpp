// dump_logits MODEL TEXT-FILE OUT [ROUTES]: the logits of a batch of 17 tokens and of 8 single ones, as raw f32.
//
// The text's first 25 tokens are evaluated; OUT gets {n_vocab, 25} f32. TEXT-FILE may be "tokens:SEED" for models
// without a vocabulary: 25 random token ids. ROUTES gets a line of JSON for each batch and routed layer: the experts
// that the router chose for each token, and by how much the last of them was ahead of the first that was not. Two runs
// with the same arithmetic give the same bytes: weights are not re-packed, two threads compute. The plugin comes in by
// GGML_BACKEND_PATH, as into llama.cpp's own programs.

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <ggml-backend.h>
#include <llama-cpp.h>
#include <llama.h>

namespace {

constexpr int kBatch = 17;  // odd, and more than one tile of rows
constexpr int kSingles = 8;
constexpr int kThreads = 2;

std::vector<llama_token> tokenize(const llama_vocab* vocab, const std::string& text) {
    std::vector<llama_token> tokens(text.size() + 1);
    const int n = llama_tokenize(vocab, text.data(), static_cast<int>(text.size()), tokens.data(),
                                 static_cast<int>(tokens.size()), false, false);
    tokens.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
    return tokens;
}

std::vector<llama_token> random_tokens(const llama_vocab* vocab, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<llama_token> tokens(kBatch + kSingles);
    for (llama_token& token : tokens) {
        token = static_cast<llama_token>(random() % static_cast<unsigned>(llama_vocab_n_tokens(vocab)));
    }
    return tokens;
}

// What routers choose, seen through llama.cpp's evaluation callback.
class Routes {
  public:
    explicit Routes(const char* path) : out_(path) {}

    static bool callback(ggml_tensor* node, bool ask, void* routes) {
        const bool routes_here = std::string_view(ggml_get_name(node)).starts_with("ffn_moe_argsort");
        if (!ask && routes_here) { static_cast<Routes*>(routes)->write(node); }
        return routes_here || !ask;
    }
    // How many experts are used is not the argsort's to know: the tensor behind it says so.
    void set_n_used(std::size_t n) { n_used_ = n; }
    bool good() { return static_cast<bool>(out_.flush()); }

  private:
    void write(const ggml_tensor* argsort) {
        const ggml_tensor* scores = argsort->src[0];
        const auto n_expert = static_cast<std::size_t>(argsort->ne[0]);
        const auto n_tokens = static_cast<std::size_t>(ggml_nrows(argsort));
        std::vector<std::int32_t> order(n_expert * n_tokens);
        std::vector<float> values(order.size());
        ggml_backend_tensor_get(argsort, order.data(), 0, order.size() * sizeof(std::int32_t));
        ggml_backend_tensor_get(scores, values.data(), 0, values.size() * sizeof(float));
        out_ << R"({"layer": ")" << ggml_get_name(argsort) << R"(", "tokens": [)";
        for (std::size_t t = 0; t < n_tokens; ++t) {
            const std::int32_t* chosen = order.data() + t * n_expert;
            std::vector<std::int32_t> ids(chosen, chosen + std::min(n_used_, n_expert));
            std::ranges::sort(ids);
            out_ << (t == 0 ? "" : ", ") << R"({"experts": [)";
            for (std::size_t i = 0; i < ids.size(); ++i) { out_ << (i == 0 ? "" : ", ") << ids[i]; }
            out_ << "]";
            if (n_used_ < n_expert) {
                const float* score = values.data() + t * n_expert;
                out_ << R"(, "margin": )" << score[chosen[n_used_ - 1]] - score[chosen[n_used_]];
            }
            out_ << "}";
        }
        out_ << "]}\n";
    }

    std::ofstream out_;
    std::size_t n_used_ = 1;
};

llama_context_ptr make_context(llama_model* model, Routes* routes) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 64;
    params.n_threads = params.n_threads_batch = kThreads;
    if (routes != nullptr) {
        params.cb_eval = Routes::callback;
        params.cb_eval_user_data = routes;
    }
    return llama_context_ptr(llama_init_from_model(model, params));
}

std::size_t n_expert_used(const llama_model* model) {
    char architecture[64] = {};
    char value[32] = {};
    llama_model_meta_val_str(model, "general.architecture", architecture, sizeof architecture);
    const std::string key = std::string(architecture) + ".expert_used_count";
    return llama_model_meta_val_str(model, key.c_str(), value, sizeof value) > 0 ? std::stoul(value) : 1;
}

bool evaluate(llama_context* context, const llama_token* tokens, int n, int first, std::ofstream& out) {
    struct Batch {
        llama_batch value;
        explicit Batch(int size) : value(llama_batch_init(size, 0, 1)) {}
        ~Batch() { llama_batch_free(value); }
        Batch(const Batch&) = delete;
        Batch& operator=(const Batch&) = delete;
    } batch(n);
    batch.value.n_tokens = n;
    for (int i = 0; i < n; ++i) {
        batch.value.token[i] = tokens[i];
        batch.value.pos[i] = first + i;
        batch.value.n_seq_id[i] = 1;
        batch.value.seq_id[i][0] = 0;
        batch.value.logits[i] = 1;
    }
    if (llama_decode(context, batch.value) != 0) { return false; }
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
    for (int i = 0; i < n; ++i) {
        out.write(reinterpret_cast<const char*>(llama_get_logits_ith(context, i)),
                  static_cast<std::streamsize>(sizeof(float)) * n_vocab);
    }
    return true;
}

int run(const char* model_path, const std::string& text_path, const char* out_path, const char* routes_path) {
    ggml_backend_load_all_from_path(LINKCPP_LLAMA_BIN);
    llama_model_params params = llama_model_default_params();
    params.use_extra_bufts = false;
    const llama_model_ptr model(llama_model_load_from_file(model_path, params));
    const auto routes = routes_path != nullptr ? std::make_unique<Routes>(routes_path) : nullptr;
    if (model && routes) { routes->set_n_used(n_expert_used(model.get())); }
    const llama_context_ptr context = model ? make_context(model.get(), routes.get()) : nullptr;
    if (!context) { return 1; }

    const llama_vocab* vocab = llama_model_get_vocab(model.get());
    std::vector<llama_token> tokens;
    if (text_path.starts_with("tokens:")) {
        tokens = random_tokens(vocab, static_cast<unsigned>(std::stoul(text_path.substr(7))));
    } else {
        std::ifstream in(text_path);
        tokens = tokenize(vocab, {std::istreambuf_iterator<char>(in), {}});
    }
    if (tokens.size() < kBatch + kSingles) {
        std::fprintf(stderr, "%s: expected %d tokens, got %zu\n", text_path.c_str(), kBatch + kSingles, tokens.size());
        return 1;
    }
    std::ofstream out(out_path, std::ios::binary);
    bool good = evaluate(context.get(), tokens.data(), kBatch, 0, out);
    for (int i = kBatch; good && i < kBatch + kSingles; ++i) {
        good = evaluate(context.get(), tokens.data() + i, 1, i, out);
    }
    return good && out.flush() && (!routes || routes->good()) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4 && argc != 5) {
        std::fprintf(stderr, "usage: dump_logits MODEL TEXT-FILE|tokens:SEED OUT [ROUTES]\n");
        return 2;
    }
    return run(argv[1], argv[2], argv[3], argc == 5 ? argv[4] : nullptr);
}
