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

// What was in this process before the first backend.
const std::vector<LoadedLibrary>& libraries_at_start() {
    static const std::vector<LoadedLibrary> libraries = loaded_libraries();
    return libraries;
}

Device describe(ggml_backend_dev_t handle) {
    Device device;
    device.handle = handle;
    device.name = ggml_backend_dev_name(handle);
    device.description = ggml_backend_dev_description(handle);
    device.backend = ggml_backend_reg_name(ggml_backend_dev_backend_reg(handle));
    device.type = ggml_backend_dev_type(handle);
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    ggml_backend_dev_memory(handle, &free_bytes, &total_bytes);
    device.free_bytes = device.is_cpu() ? available_memory_bytes() : free_bytes;
    device.total_bytes = total_bytes;
    return device;
}

}  // namespace

void load_backends(const std::filesystem::path& dir) {
    static std::once_flag once;
    std::call_once(once, [&] {
        (void)libraries_at_start();
        ggml_log_set(log_ggml, nullptr);
        // With ggml built in there are no modules: it knows its backends.
        const std::filesystem::path from = dir.empty() ? LINKCPP_LLAMA_BIN : dir;
        if (!from.empty()) { ggml_backend_load_all_from_path(from.c_str()); }
    });
}

Result<Device> load_device(const std::filesystem::path& module) {
    std::error_code error;
    if (!std::filesystem::exists(module, error)) {
        return fail(ErrorKind::not_found, "{}: expected a ggml backend module, found nothing", module.string());
    }
    (void)libraries_at_start();
    ggml_log_set(log_ggml, nullptr);
    ggml_backend_reg_t registry = ggml_backend_load(std::filesystem::absolute(module).c_str());
    if (registry != nullptr && ggml_backend_reg_dev_count(registry) == 0) {
        return fail(ErrorKind::unsupported, "{}: this backend finds no device on this machine", module.string());
    }
    if (registry == nullptr) {
        return fail(ErrorKind::unsupported,
                    "{}: ggml does not load it: no backend module, one of another ggml, or for another processor",
                    module.string());
    }
    return describe(ggml_backend_reg_dev_get(registry, 0));
}

std::vector<std::string> driver_libraries() {
    std::vector<std::string> names;
    for (const LoadedLibrary& library : loaded_libraries()) {
        if (std::ranges::find(libraries_at_start(), library) != libraries_at_start().end()) { continue; }
        names.push_back(library.build_id.empty() ? library.name
                                                 : fmt::format("{} {}", library.name, library.build_id.substr(0, 8)));
    }
    std::ranges::sort(names);
    return names;
}

std::vector<std::string> features_of(const Device& device) {
    std::vector<std::string> names;
    const auto features = device_function<ggml_backend_get_features_t>(device, "ggml_backend_get_features");
    if (features == nullptr) { return names; }
    for (const ggml_backend_feature* each = features(ggml_backend_dev_backend_reg(device.handle));
         each->name != nullptr; ++each) {
        const std::string_view value = each->value;
        names.push_back(value == "1" ? each->name : fmt::format("{}={}", each->name, value));
    }
    return names;
}

std::vector<Device> devices() {
    std::vector<Device> found;
    for (std::size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        Device device = describe(ggml_backend_dev_get(i));
        if (device.backend != kSwarmBackend) { found.push_back(std::move(device)); }
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
