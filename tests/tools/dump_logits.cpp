// dump_logits MODEL TEXT-FILE OUT: the logits of a batch of 17 tokens and of 8 single ones, as raw f32.
//
// The text's first 25 tokens are evaluated; OUT gets {n_vocab, 25} f32. Two runs with the same arithmetic give the same
// bytes: weights are not re-packed, two threads compute. The plugin comes in by GGML_BACKEND_PATH, as into
// llama.cpp's own programs.

#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
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

llama_context_ptr make_context(llama_model* model) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 64;
    params.n_threads = params.n_threads_batch = kThreads;
    return llama_context_ptr(llama_init_from_model(model, params));
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

int run(const char* model_path, const char* text_path, const char* out_path) {
    ggml_backend_load_all_from_path(LINKCPP_LLAMA_BIN);
    llama_model_params params = llama_model_default_params();
    params.use_extra_bufts = false;
    const llama_model_ptr model(llama_model_load_from_file(model_path, params));
    const llama_context_ptr context = model ? make_context(model.get()) : nullptr;
    if (!context) { return 1; }

    std::ifstream in(text_path);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    const std::vector<llama_token> tokens = tokenize(llama_model_get_vocab(model.get()), text);
    if (tokens.size() < kBatch + kSingles) {
        std::fprintf(stderr, "%s: expected %d tokens, got %zu\n", text_path, kBatch + kSingles, tokens.size());
        return 1;
    }
    std::ofstream out(out_path, std::ios::binary);
    bool good = evaluate(context.get(), tokens.data(), kBatch, 0, out);
    for (int i = kBatch; good && i < kBatch + kSingles; ++i) {
        good = evaluate(context.get(), tokens.data() + i, 1, i, out);
    }
    return good && out.flush() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: dump_logits MODEL TEXT-FILE OUT\n");
        return 2;
    }
    return run(argv[1], argv[2], argv[3]);
}
