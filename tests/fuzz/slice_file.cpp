// Models and slice files: GGUF that somebody else has made.
#include <sys/mman.h>
#include <unistd.h>

#include "base/file.h"
#include "model/gguf_file.h"
#include "model/manifest.h"
#include "model/moe.h"

using namespace linkcpp;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const UniqueFd fd(::memfd_create("model", MFD_CLOEXEC));
    if (!fd || ::write(fd.get(), data, size) != static_cast<ssize_t>(size)) { return 0; }
    const auto file = model::GgufFile::open(fmt::format("/proc/self/fd/{}", fd.get()));
    if (!file) { return 0; }
    const auto moe = model::read_moe(*file);
    if (!moe) { return 0; }
    constexpr std::uint64_t kMost = 1u << 20;
    for (const model::MoeLayer& layer : moe->layers) {
        if (layer.slice_bytes() > kMost) { continue; }
        for (std::uint32_t expert = 0; expert < std::min(layer.n_expert, 4u); ++expert) {
            const auto slice = model::read_slice(*file, layer, expert);
            if (slice && slice->size() != layer.slice_bytes()) { __builtin_trap(); }
        }
    }
    return 0;
}
