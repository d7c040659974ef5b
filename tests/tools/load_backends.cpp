// To be preloaded into a program of llama.cpp that loads no backend modules by itself (test-llama-archs in a build with
// modules): loads them before main().

#include <ggml-backend.h>

__attribute__((constructor)) static void load_backends() {
    ggml_backend_load_all_from_path(LINKCPP_LLAMA_BIN);
}
