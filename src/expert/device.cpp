#include "expert/device.h"

#include <algorithm>
#include <cctype>
#include <mutex>

#include <ggml.h>

#include "base/log.h"
#include "base/platform.h"

namespace linkcpp::expert {
namespace {

bool equal_ignoring_case(std::string_view a, std::string_view b) {
    return std::ranges::equal(a, b,
                              [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

// ggml says "loaded CPU backend from …" at every start; a person needs warnings and errors only.
void log_ggml(ggml_log_level level, const char* text, void* /*unused*/) {
    std::string_view line(text);
    while (line.ends_with('\n')) { line.remove_suffix(1); }
    if (level == GGML_LOG_LEVEL_ERROR) {
        log_error("ggml: {}", line);
    } else if (level == GGML_LOG_LEVEL_WARN) {
        log_warn("ggml: {}", line);
    } else {
        log_debug("ggml: {}", line);
    }
}

}  // namespace

void load_backends(const std::filesystem::path& dir) {
    static std::once_flag once;
    std::call_once(once, [&] {
        ggml_log_set(log_ggml, nullptr);
        ggml_backend_load_all_from_path(dir.empty() ? LINKCPP_LLAMA_BIN : dir.c_str());
    });
}

std::vector<Device> devices() {
    std::vector<Device> found;
    for (std::size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        Device device;
        device.handle = ggml_backend_dev_get(i);
        device.name = ggml_backend_dev_name(device.handle);
        device.description = ggml_backend_dev_description(device.handle);
        device.backend = ggml_backend_reg_name(ggml_backend_dev_backend_reg(device.handle));
        if (device.backend == kSwarmBackend) { continue; }
        device.type = ggml_backend_dev_type(device.handle);
        std::size_t free_bytes = 0;
        std::size_t total_bytes = 0;
        ggml_backend_dev_memory(device.handle, &free_bytes, &total_bytes);
        device.free_bytes = device.is_cpu() ? available_memory_bytes() : free_bytes;
        device.total_bytes = total_bytes;
        found.push_back(std::move(device));
    }
    return found;
}

Result<Device> cpu_device() {
    if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == nullptr) { load_backends(); }
    const std::vector<Device> all = devices();
    const auto cpu = std::ranges::find_if(all, &Device::is_cpu);
    if (cpu != all.end()) { return *cpu; }
    return fail(ErrorKind::unsupported, "no CPU backend to compute on");
}

Result<Device> choose_device(const std::vector<Device>& devices, std::string_view name) {
    auto chosen = name.empty() ? std::ranges::find_if(devices, [](const Device& d) { return !d.is_cpu(); })
                               : std::ranges::find_if(
                                     devices, [&](const Device& d) { return equal_ignoring_case(d.name, name); });
    if (name.empty() && chosen == devices.end()) { chosen = std::ranges::find_if(devices, &Device::is_cpu); }
    if (chosen != devices.end()) { return *chosen; }
    std::string names;
    for (const Device& device : devices) { names += (names.empty() ? "" : ", ") + device.name; }
    if (name.empty()) { return fail(ErrorKind::not_found, "device: no ggml backend could be loaded on this machine"); }
    return fail(ErrorKind::not_found, "device: expected one of {}, got '{}'", names, name);
}

}  // namespace linkcpp::expert
