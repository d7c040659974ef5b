#include "coordinator/cpu_node.h"

#include <algorithm>

#include <ggml-backend.h>

#include "expert/device.h"

namespace linkcpp::coordinator {
namespace {

std::unexpected<Error> not_understood(const ggml_tensor* node) {
    return fail(ErrorKind::unsupported, "node {} ({}) cannot be computed here", ggml_get_name(node),
                ggml_op_desc(node));
}

// One row of dst: op(a, b), where b has one number for the whole row or as many as the row.
template <class Operation>
void compute_row(float* dst, const float* a, const float* b, std::int64_t n, std::int64_t n_b, Operation operation) {
    if (n_b == 1) {
        const float scalar = *b;
        for (std::int64_t i = 0; i < n; ++i) { dst[i] = operation(a[i], scalar); }
    } else {
        for (std::int64_t i = 0; i < n; ++i) { dst[i] = operation(a[i], b[i]); }
    }
}

template <class Operation>
Status compute_binary(ggml_tensor* node, Operation operation) {
    const ggml_tensor* a = node->src[0];
    const ggml_tensor* b = node->src[1];
    const bool numbers = node->type == GGML_TYPE_F32 && a->type == GGML_TYPE_F32 && b->type == GGML_TYPE_F32;
    const bool rows = node->nb[0] == sizeof(float) && a->nb[0] == sizeof(float) &&
                      (b->nb[0] == sizeof(float) || b->ne[0] == 1) && (b->ne[0] == 1 || b->ne[0] == node->ne[0]);
    if (!numbers || !rows || !ggml_are_same_shape(node, a) || !ggml_can_repeat(b, a)) { return not_understood(node); }
    for (std::int64_t k = 0; k < node->ne[3]; ++k) {
        for (std::int64_t j = 0; j < node->ne[2]; ++j) {
            for (std::int64_t i = 0; i < node->ne[1]; ++i) {
                const auto at = [&](const ggml_tensor* t, bool repeats) {
                    const std::int64_t i1 = repeats ? i % t->ne[1] : i;
                    const std::int64_t i2 = repeats ? j % t->ne[2] : j;
                    const std::int64_t i3 = repeats ? k % t->ne[3] : k;
                    return static_cast<char*>(t->data) + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
                };
                compute_row(reinterpret_cast<float*>(at(node, false)), reinterpret_cast<const float*>(at(a, false)),
                            reinterpret_cast<const float*>(at(b, true)), node->ne[0], b->ne[0], operation);
            }
        }
    }
    return {};
}

// Errors: unsupported (left to ggml).
Status compute_directly(ggml_tensor* node) {
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE: return {};
        case GGML_OP_MUL: return compute_binary(node, [](float a, float b) { return a * b; });
        case GGML_OP_ADD: return compute_binary(node, [](float a, float b) { return a + b; });
        case GGML_OP_CONT: {
            const ggml_tensor* a = node->src[0];
            if (!ggml_are_same_shape(node, a) || node->type != GGML_TYPE_F32 || a->type != GGML_TYPE_F32 ||
                !ggml_is_contiguous(node) || a->nb[0] != sizeof(float) || a->ne[3] != 1) {
                return not_understood(node);
            }
            auto* to = static_cast<float*>(node->data);
            for (std::int64_t j = 0; j < a->ne[2]; ++j) {
                for (std::int64_t i = 0; i < a->ne[1]; ++i) {
                    const auto* row =
                        reinterpret_cast<const float*>(static_cast<const char*>(a->data) + i * a->nb[1] + j * a->nb[2]);
                    to = std::copy_n(row, a->ne[0], to);
                }
            }
            return {};
        }
        default: return not_understood(node);
    }
}

}  // namespace

Status CpuNodes::compute(ggml_tensor* node) {
    if (compute_directly(node)) { return {}; }
    const std::lock_guard lock(mutex_);
    LINKCPP_CHECK(start());
    if (!ggml_backend_supports_op(backend_.get(), node)) { return not_understood(node); }
    ggml_graph_clear(graph_);
    ggml_graph_add_node(graph_, node);
    const ggml_status status = ggml_backend_graph_compute(backend_.get(), graph_);
    if (status == GGML_STATUS_SUCCESS) { return {}; }
    return fail(ErrorKind::failed, "node {} ({}): {}", ggml_get_name(node), ggml_op_desc(node),
                ggml_status_to_string(status));
}

Status CpuNodes::start() {
    if (backend_) { return {}; }
    LINKCPP_TRY(const expert::Device cpu, expert::cpu_device());
    backend_.reset(ggml_backend_dev_init(cpu.handle, nullptr));
    if (!backend_) { return fail(ErrorKind::unsupported, "the CPU backend does not start"); }
    // These nodes are small: a second thread would cost more than it does.
    if (const auto set = expert::device_function<ggml_backend_set_n_threads_t>(cpu, "ggml_backend_set_n_threads")) {
        set(backend_.get(), 1);
    }
    context_.reset(
        ggml_init({.mem_size = ggml_graph_overhead_custom(1, false), .mem_buffer = nullptr, .no_alloc = true}));
    graph_ = ggml_new_graph_custom(context_.get(), 1, false);
    return {};
}

}  // namespace linkcpp::coordinator
