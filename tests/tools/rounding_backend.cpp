// A ggml backend module whose device rounds the rows that it multiplies by experts in a way of one's choice: a
// stand-in, on any machine, for graphics cards and other processors. $LINKCPP_TEST_ROUNDING is the way
// (expert/rounding.h): "none" is what ggml's Vulkan kernels do while decoding. Products are added up in double
// precision; every other node is the CPU's. With $LINKCPP_TEST_NO_ROOM it can hold nothing.

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include <ggml-backend-impl.h>
#include <ggml-cpp.h>

#include "expert/rounding.h"

namespace {

using linkcpp::expert::Rounding;

// {n_in, n_out, n_experts} · {n_in, 1 or n_used, n_tokens}, by ids {n_used, n_tokens}
void multiply(ggml_tensor* node, Rounding rounding) {
    const ggml_tensor* weights = node->src[0];
    const ggml_tensor* rows = node->src[1];
    const ggml_tensor* ids = node->src[2];
    const auto n_in = static_cast<std::size_t>(weights->ne[0]);
    const ggml_to_float_t to_float = ggml_get_type_traits(weights->type)->to_float;
    std::vector<float> weight(n_in);
    std::vector<double> row(n_in);
    const auto at = [](const ggml_tensor* t, std::int64_t i1, std::int64_t i2) {
        return static_cast<char*>(t->data) + i1 * static_cast<std::int64_t>(t->nb[1]) +
               i2 * static_cast<std::int64_t>(t->nb[2]);
    };
    for (std::int64_t token = 0; token < ids->ne[1]; ++token) {
        for (std::int64_t i = 0; i < ids->ne[0]; ++i) {
            const auto expert = reinterpret_cast<const std::int32_t*>(at(ids, token, 0))[i];
            const auto* input = reinterpret_cast<const float*>(at(rows, i % rows->ne[1], token));
            auto* out = reinterpret_cast<float*>(at(node, i, token));
            linkcpp::expert::round_row(rounding, {input, n_in}, row);
            for (std::int64_t o = 0; o < node->ne[0]; ++o) {
                const char* packed = at(weights, o, expert);
                if (weights->type == GGML_TYPE_F32) {
                    std::copy_n(reinterpret_cast<const float*>(packed), n_in, weight.data());
                } else {
                    to_float(packed, weight.data(), static_cast<std::int64_t>(n_in));
                }
                linkcpp::expert::round_weights(rounding, weight);
                double sum = 0;
                for (std::size_t k = 0; k < n_in; ++k) { sum += row[k] * static_cast<double>(weight[k]); }
                out[o] = static_cast<float>(sum);
            }
        }
    }
}

// Of a backend that was started.
struct Context {
    ggml_backend_ptr cpu;
    ggml_context_ptr one_node;
    ggml_cgraph* graph = nullptr;
    Rounding rounding = Rounding::none;
};

ggml_status compute(ggml_backend_t backend, ggml_cgraph* graph) {
    auto& context = *static_cast<Context*>(backend->context);
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor* node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_MUL_MAT_ID) {
            multiply(node, context.rounding);
            continue;
        }
        ggml_graph_clear(context.graph);
        ggml_graph_add_node(context.graph, node);
        const ggml_status status = ggml_backend_graph_compute(context.cpu.get(), context.graph);
        if (status != GGML_STATUS_SUCCESS) { return status; }
    }
    return GGML_STATUS_SUCCESS;
}

Rounding wanted() {
    const char* name = std::getenv("LINKCPP_TEST_ROUNDING");
    return linkcpp::expert::rounding_of(name == nullptr ? "none" : name).value_or(Rounding::none);
}

const char* device_name(ggml_backend_dev_t /*device*/) {
    static const std::string name = "Rounding-" + std::string(linkcpp::expert::to_string(wanted()));
    return name.c_str();
}

ggml_backend_dev_t cpu_device() {
    static ggml_backend_reg_t cpu = ggml_backend_load(LINKCPP_LLAMA_BIN "/libggml-cpu.so");
    return cpu != nullptr ? ggml_backend_reg_dev_get(cpu, 0) : nullptr;
}

ggml_backend_t start(ggml_backend_dev_t device, const char* parameters) {
    auto* context = new Context;
    context->cpu.reset(ggml_backend_dev_init(cpu_device(), parameters));
    context->one_node.reset(
        ggml_init({.mem_size = ggml_graph_overhead_custom(1, false), .mem_buffer = nullptr, .no_alloc = true}));
    context->graph = ggml_new_graph_custom(context->one_node.get(), 1, false);
    context->rounding = wanted();
    auto* backend = new ggml_backend{.guid = context->cpu->guid, .iface = {}, .device = device, .context = context};
    backend->iface.get_name = [](ggml_backend_t) { return "Rounding"; };
    backend->iface.free = [](ggml_backend_t self) {
        delete static_cast<Context*>(self->context);
        delete self;
    };
    backend->iface.graph_compute = compute;
    return backend;
}

// Of a device that has no room for anything.
ggml_backend_buffer_type_t no_room(ggml_backend_dev_t /*device*/) {
    static ggml_backend_buffer_type type = [] {
        ggml_backend_buffer_type copy = *ggml_backend_dev_buffer_type(cpu_device());
        copy.iface.alloc_buffer = [](ggml_backend_buffer_type_t, std::size_t) -> ggml_backend_buffer_t {
            return nullptr;
        };
        return copy;
    }();
    return &type;
}

ggml_backend_dev_t device(ggml_backend_reg_t registry, std::size_t /*index*/) {
    // The CPU's, but for its name and what computes.
    static ggml_backend_device ours = [&] {
        ggml_backend_device copy = *cpu_device();
        copy.reg = registry;
        copy.iface.get_name = device_name;
        copy.iface.get_description = [](ggml_backend_dev_t) { return "for tests"; };
        copy.iface.init_backend = start;
        if (std::getenv("LINKCPP_TEST_NO_ROOM") != nullptr) { copy.iface.get_buffer_type = no_room; }
        return copy;
    }();
    return &ours;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ggml_backend_reg* ggml_backend_init() {
    static ggml_backend_reg registry = {
        .api_version = GGML_BACKEND_API_VERSION,
        .iface = {.get_name = [](ggml_backend_reg_t) { return "Rounding"; },
                  .get_device_count = [](ggml_backend_reg_t) -> std::size_t { return cpu_device() != nullptr ? 1 : 0; },
                  .get_device = device,
                  .get_proc_address = nullptr},
        .context = nullptr,
    };
    return &registry;
}
