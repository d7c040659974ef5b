// Which device a worker takes, asked of ggml's own registry: of all types that ggml has but the CPU's, an integrated
// graphics card's among them, the first is taken, and our own plugin's never is. Devices are registered here, the one
// behind the other, as backends do it.

#include <string>
#include <vector>

#include <ggml-backend-impl.h>
#include <gtest/gtest.h>

#include "expert/device.h"

namespace linkcpp::expert {
namespace {

struct FakeDevice {
    std::string name;
    enum ggml_backend_dev_type type;
    ggml_backend_device device;
};

// A backend with one device, registered as long as it lives.
struct FakeBackend {
    FakeBackend(std::string backend, std::string device_name, enum ggml_backend_dev_type type)
        : name(std::move(backend)), device{std::move(device_name), type, {}} {
        reg.api_version = GGML_BACKEND_API_VERSION;
        reg.context = this;
        reg.iface.get_name = [](ggml_backend_reg_t of) { return self(of).name.c_str(); };
        reg.iface.get_device_count = [](ggml_backend_reg_t) -> std::size_t { return 1; };
        reg.iface.get_device = [](ggml_backend_reg_t of, std::size_t) { return &self(of).device.device; };
        device.device.reg = &reg;
        device.device.context = &device;
        device.device.iface.get_name = [](ggml_backend_dev_t of) { return fake(of).name.c_str(); };
        device.device.iface.get_description = [](ggml_backend_dev_t) { return "made for a test"; };
        device.device.iface.get_memory = [](ggml_backend_dev_t, std::size_t* free, std::size_t* total) {
            *free = *total = std::size_t{1} << 30;
        };
        device.device.iface.get_type = [](ggml_backend_dev_t of) { return fake(of).type; };
        ggml_backend_register(&reg);
    }
    ~FakeBackend() { ggml_backend_unload(&reg); }
    FakeBackend(const FakeBackend&) = delete;
    FakeBackend& operator=(const FakeBackend&) = delete;

    static FakeBackend& self(ggml_backend_reg_t of) { return *static_cast<FakeBackend*>(of->context); }
    static FakeDevice& fake(ggml_backend_dev_t of) { return *static_cast<FakeDevice*>(of->context); }

    std::string name;
    ggml_backend_reg reg{};
    FakeDevice device;
};

std::string chosen() {
    return choose_device(devices())->name;
}

TEST(Registry, the_first_device_that_is_not_a_cpu_is_taken_whatever_it_calls_itself_and_ours_never_is) {
    load_backends();
    EXPECT_EQ(chosen(), "CPU");

    const FakeBackend ours(std::string(kSwarmBackend), "Swarm", GGML_BACKEND_DEVICE_TYPE_ACCEL);
    EXPECT_EQ(chosen(), "CPU");
    EXPECT_EQ(choose_device(devices(), "Swarm").error().kind, ErrorKind::not_found);
    const FakeBackend other_cpu("Other", "CPU-2", GGML_BACKEND_DEVICE_TYPE_CPU);
    EXPECT_EQ(chosen(), "CPU");

    const FakeBackend accelerator("Fast", "Fast0", GGML_BACKEND_DEVICE_TYPE_ACCEL);
    EXPECT_EQ(chosen(), "Fast0");
    const FakeBackend integrated("Vulkan", "Vulkan0", GGML_BACKEND_DEVICE_TYPE_IGPU);
    const FakeBackend card("CUDA", "CUDA0", GGML_BACKEND_DEVICE_TYPE_GPU);
    EXPECT_EQ(chosen(), "Fast0") << "the first, not the one of the best type";
    EXPECT_EQ(choose_device(devices(), "vulkan0")->name, "Vulkan0");
    for (const Device& device : devices()) { EXPECT_NE(device.backend, kSwarmBackend); }
}

// Of each type alone: what is on a machine whose graphics are part of its processor.
TEST(Registry, an_integrated_card_alone_is_taken) {
    load_backends();
    const FakeBackend ours(std::string(kSwarmBackend), "Swarm", GGML_BACKEND_DEVICE_TYPE_ACCEL);
    const FakeBackend integrated("Vulkan", "Vulkan0", GGML_BACKEND_DEVICE_TYPE_IGPU);
    EXPECT_EQ(chosen(), "Vulkan0");
}

}  // namespace
}  // namespace linkcpp::expert
