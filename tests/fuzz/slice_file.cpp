// Models and slice files: GGUF that somebody else has made.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "base/file.h"
#include "base/test_folder.h"
#include "model/assembly.h"
#include "model/gguf_file.h"
#include "model/manifest.h"
#include "model/moe.h"
#include "model/slicer.h"

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
    // A backbone: put together again from slices of zeros.
    const auto fits = [](const model::MoeLayer& layer) { return layer.slice_bytes() * layer.n_expert <= kMost; };
    if (file->flag(model::kBackboneKey) != true || !std::ranges::all_of(moe->layers, fits)) { return 0; }
    static const TestFolder folder;
    const auto paths = model::assemble(
        *file, [](const model::MoeLayer& layer, std::uint32_t) -> Result<Bytes> { return Bytes(layer.slice_bytes()); },
        folder / "again.gguf");
    for (const auto& path : paths.value_or(std::vector<std::filesystem::path>())) { std::filesystem::remove(path); }
    return 0;
}
