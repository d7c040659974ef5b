#include "coordinator/block.h"

#include <algorithm>
#include <map>

namespace linkcpp::coordinator {
namespace {

// Deeper chains than this are no expert blocks; it bounds the recursion on whatever graph llama.cpp asks about.
constexpr int kMaxDepth = 600;

bool is_alias(const ggml_tensor* t) {
    return t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE;
}

bool is_product(const ggml_tensor* t, const IsOurs& is_ours) {
    return t->op == GGML_OP_MUL_MAT_ID && t->src[0] != nullptr && is_ours(t->src[0]) &&
           model::parse_expert_tensor_name(ggml_get_name(t->src[0])).has_value();
}

bool grows_out_of_products(const ggml_tensor* t, const IsOurs& is_ours, int depth) {
    if (t == nullptr || depth > kMaxDepth) { return false; }
    const auto grows = [&](const ggml_tensor* source) { return grows_out_of_products(source, is_ours, depth + 1); };
    switch (t->op) {
        case GGML_OP_MUL_MAT_ID: return is_product(t, is_ours);
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE:
        case GGML_OP_CONT:
        case GGML_OP_MUL: return grows(t->src[0]);
        case GGML_OP_GLU: return t->src[1] != nullptr && grows(t->src[0]) && grows(t->src[1]);
        case GGML_OP_ADD: return grows(t->src[0]) && grows(t->src[1]);
        default: return false;
    }
}

std::unexpected<Error> not_understood(const ggml_tensor* node) {
    return fail(ErrorKind::unsupported, "expert block: node {} ({}) is of a kind that this release does not know",
                ggml_get_name(node), ggml_op_desc(node));
}

// One block in the making, while its nodes go by.
class Builder {
  public:
    explicit Builder(const IsOurs& is_ours) : is_ours_(is_ours) {}

    // False: the node starts the next block.
    Result<bool> take(ggml_tensor* node) {
        if (is_product(node, is_ours_)) { return take_product(node); }
        if (block_.down != nullptr) {
            block_.tail.push_back(node);
            return true;
        }
        if (is_alias(node)) {
            names_[node] = role_of(node->src[0]);
            return true;
        }
        if (node->op == GGML_OP_GLU) { return take_activation(node); }
        return not_understood(node);
    }

    Result<Block> finish() {
        if (block_.down == nullptr) {
            return fail(ErrorKind::unsupported,
                        "expert block of layer {}: it is cut into pieces, perhaps by a program "
                        "that looks at every node; this release needs it whole",
                        block_.layer);
        }
        recognise_sum();
        return std::move(block_);
    }

  private:
    enum class Part { none, gate, up, both, activated };

    Part role_of(const ggml_tensor* t) const {
        const auto found = names_.find(t);
        return found == names_.end() ? Part::none : found->second;
    }

    Result<bool> take_product(ggml_tensor* node) {
        const auto name = model::parse_expert_tensor_name(ggml_get_name(node->src[0]));
        if (started_ && (name->layer != block_.layer || block_.down != nullptr)) { return false; }
        block_.layer = name->layer;
        if (!started_) { block_.ids = node->src[2]; }
        started_ = true;
        if (node->src[2] != block_.ids) { return not_understood(node); }
        if (name->role == model::Role::down) {
            if (role_of(node->src[1]) != Part::activated) { return not_understood(node); }
            block_.down = node;
            return true;
        }
        if (block_.h != nullptr && block_.h != node->src[1]) { return not_understood(node); }
        block_.h = node->src[1];
        if (block_.h->ne[1] != 1) { return not_understood(node); }  // rows differ by expert: weights come first
        names_[node] = name->role == model::Role::gate ? Part::gate
                       : name->role == model::Role::up ? Part::up
                                                       : Part::both;
        return true;
    }

    Result<bool> take_activation(ggml_tensor* node) {
        const ggml_tensor* gate = node->src[0];
        const ggml_tensor* up = node->src[1];
        const bool swapped = node->op_params[1] != 0;
        if (ggml_get_glu_op(node) != GGML_GLU_OP_SWIGLU || up == nullptr || swapped) { return not_understood(node); }
        const bool split = role_of(gate) == Part::gate && role_of(up) == Part::up;
        const bool merged = role_of(gate) == Part::both && role_of(up) == Part::both && gate->view_offs == 0 &&
                            up->view_offs == static_cast<std::size_t>(gate->ne[0]) * sizeof(float);
        if (!split && !merged) { return not_understood(node); }
        block_.activation = model::Activation::swiglu;
        names_[node] = Part::activated;
        return true;
    }

    // MUL(down, weights), then one VIEW for each expert, then ADDs from left to right.
    void recognise_sum() {
        std::vector<ggml_tensor*> nodes;
        std::ranges::copy_if(block_.tail, std::back_inserter(nodes),
                             [](const ggml_tensor* t) { return t->op != GGML_OP_VIEW; });
        if (nodes.empty() || nodes[0]->op != GGML_OP_MUL || nodes[0]->src[0] != block_.down) { return; }
        const ggml_tensor* weighted = nodes[0];
        const ggml_tensor* weights = weighted->src[1];
        const std::int64_t n_used = block_.down->ne[1];
        if (weights->type != GGML_TYPE_F32 || weights->ne[0] != 1 || weights->ne[1] != n_used ||
            weights->ne[2] != block_.down->ne[2]) {
            return;
        }
        const auto is_view_of = [&](const ggml_tensor* t, std::size_t expert) {
            return t->op == GGML_OP_VIEW && t->src[0] == weighted &&
                   t->view_offs - weighted->view_offs == expert * weighted->nb[1] && t->ne[0] == weighted->ne[0] &&
                   t->ne[1] == weighted->ne[2] && t->nb[1] == weighted->nb[2];
        };
        if (nodes.size() == 2 && nodes[1]->op == GGML_OP_CONT && is_view_of(nodes[1]->src[0], 0)) {
            block_.n_summed = 1;
        } else {
            for (std::size_t i = 1; i < nodes.size(); ++i) {
                const ggml_tensor* left = nodes[i]->src[0];
                const bool chained = i == 1 ? is_view_of(left, 0) : left == nodes[i - 1];
                if (nodes[i]->op != GGML_OP_ADD || !chained || !is_view_of(nodes[i]->src[1], i)) { return; }
            }
            block_.n_summed = static_cast<std::uint32_t>(nodes.size());
        }
        if (block_.n_summed < 1 || nodes.size() < 2) { return; }
        block_.weights = weights;
        block_.sum = nodes.back();
    }

    const IsOurs& is_ours_;
    Block block_;
    bool started_ = false;
    std::map<const ggml_tensor*, Part> names_;
};

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

}  // namespace

bool belongs_to_block(const ggml_tensor* op, const IsOurs& is_ours) {
    if (op->op == GGML_OP_GLU && ggml_get_glu_op(op) != GGML_GLU_OP_SWIGLU) { return false; }
    return grows_out_of_products(op, is_ours, 0);
}

Result<std::vector<Block>> find_blocks(ggml_cgraph* graph, const IsOurs& is_ours) {
    std::vector<Block> blocks;
    auto builder = std::make_unique<Builder>(is_ours);
    const int n_nodes = ggml_graph_n_nodes(graph);
    bool started = false;
    for (int i = 0; i < n_nodes; ++i) {
        ggml_tensor* node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_NONE || (!started && is_alias(node))) { continue; }
        started = true;
        LINKCPP_TRY(const bool taken, builder->take(node));
        if (taken) { continue; }
        LINKCPP_TRY(Block block, builder->finish());
        blocks.push_back(std::move(block));
        builder = std::make_unique<Builder>(is_ours);
        LINKCPP_TRY(const bool again, builder->take(node));
        if (!again) { return not_understood(node); }
    }
    if (started) {
        LINKCPP_TRY(Block block, builder->finish());
        blocks.push_back(std::move(block));
    }
    return blocks;
}

Status compute_tail_node(ggml_tensor* node) {
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

}  // namespace linkcpp::coordinator
