// The devices that ggml has backends for on this machine, and which one a worker takes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include <ggml-backend.h>

#include "base/error.h"

namespace linkcpp::expert {

// The name of our own plugin's backend: its device is never chosen to compute on.
inline constexpr std::string_view kSwarmBackend = "Swarm";

struct Device {
    ggml_backend_dev_t handle = nullptr;  // owned by ggml's registry
    std::string name;                     // "CPU", "CUDA0"
    std::string description;              // "AMD EPYC …"
    std::string backend;                  // "CPU", "CUDA": the registry entry's name
    enum ggml_backend_dev_type type = GGML_BACKEND_DEVICE_TYPE_CPU;
    std::uint64_t free_bytes = 0;
    std::uint64_t total_bytes = 0;

    bool is_cpu() const { return type == GGML_BACKEND_DEVICE_TYPE_CPU; }
};

// What a backend offers beside its interface, by name; null where it does not.
template <class Function>
Function device_function(const Device& device, const char* name) {
    return reinterpret_cast<Function>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device.handle), name));
}

// Loads the backend modules of `dir` (the build's own llama.cpp folder if empty) into ggml's registry, once a process.
void load_backends(const std::filesystem::path& dir = {});

// Loads one backend module, for whoever wants a certain one and no other, and returns its first device. Errors:
// not_found, unsupported (no module, of another ggml, or for another processor).
Result<Device> load_device(const std::filesystem::path& module);

// What answers may depend on beside ggml's own version: the libraries that backends have brought into this process,
// each with its build id, "libvulkan_lvp.so 3f2a90c1". Complete once something was computed.
std::vector<std::string> driver_libraries();
// "AVX2", "DOTPROD": as the backend names them.
std::vector<std::string> features_of(const Device& device);

// In the registry's order, our own device left out. CPU memory is what could be used without swapping.
std::vector<Device> devices();

// The CPU, for whoever runs inside somebody else's program. One with ggml built in keeps its backends to itself: then
// they are loaded here first. Errors: unsupported (there is none).
Result<Device> cpu_device();

// By name, case ignored; without a name the first device that is not a CPU (an integrated GPU may call itself an
// accelerator, so the type is not asked further), else the CPU. Errors: not_found, listing the names.
Result<Device> choose_device(const std::vector<Device>& devices, std::string_view name = {});

}  // namespace linkcpp::expert
