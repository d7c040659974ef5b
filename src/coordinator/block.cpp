#include "coordinator/block.h"

#include <algorithm>
#include <cstring>

namespace linkcpp::coordinator {
namespace {

using model::Role;

// Deeper chains than this are no expert blocks; it bounds the recursion on whatever graph llama.cpp asks about.
constexpr int kMaxDepth = 600;

// How far a tensor is on its way through a block.
enum class Stage {
    outside,
    scale,  // grows out of a per-expert scale alone
    rows,   // has a row for each of a token's experts
    sum,    // is summed over them
};

std::optional<model::ExpertTensorName> parse_ours(const ggml_tensor* tensor, const IsOurs& is_ours) {
    if (tensor == nullptr || !is_ours(tensor)) { return std::nullopt; }
    return model::parse_expert_tensor_name(ggml_get_name(tensor));
}

bool is_scale(Role role) {
    return role >= Role::gate_scale;
}
bool is_bias(Role role) {
    return !model::is_weight(role) && !is_scale(role);
}

bool is_elementwise(ggml_op op) {
    switch (op) {
        case GGML_OP_UNARY:
        case GGML_OP_GLU:
        case GGML_OP_SQR:
        case GGML_OP_SQRT:
        case GGML_OP_CLAMP:
        case GGML_OP_SCALE:
        case GGML_OP_SUB:
        case GGML_OP_DIV:
        case GGML_OP_CONT: return true;
        default: return false;
    }
}

// A view of one of a token's experts, for all tokens: where rows become summands.
bool is_one_expert(const ggml_tensor* view) {
    const ggml_tensor* rows = view->src[0];
    return view->ne[2] == 1 && view->ne[1] == rows->ne[2] && view->nb[1] == rows->nb[2] && view->ne[0] == rows->ne[0];
}

class Stages {
  public:
    explicit Stages(const IsOurs& is_ours) : is_ours_(is_ours) {}

    Stage of(const ggml_tensor* t, int depth = 0) const {
        if (t == nullptr || depth > kMaxDepth) { return Stage::outside; }
        const auto source = [&](int i) { return of(t->src[i], depth + 1); };
        switch (t->op) {
            case GGML_OP_NONE: {
                const auto name = parse_ours(t, is_ours_);
                return name && is_scale(name->role) ? Stage::scale : Stage::outside;
            }
            case GGML_OP_MUL_MAT_ID: return parse_product(t, is_ours_) ? Stage::rows : Stage::outside;
            case GGML_OP_RESHAPE: return source(0);
            case GGML_OP_VIEW: {
                const Stage stage = source(0);
                return stage == Stage::rows && is_one_expert(t) ? Stage::sum : stage;
            }
            case GGML_OP_REPEAT:
            case GGML_OP_GET_ROWS: return source(0) == Stage::scale ? Stage::scale : Stage::outside;
            case GGML_OP_ADD_ID: return source(0);
            case GGML_OP_MUL: return of_product(source(0), source(1));
            case GGML_OP_ADD: {
                const Stage stage = source(0);
                return stage == source(1) && stage != Stage::scale ? stage : Stage::outside;
            }
            default: return is_elementwise(t->op) ? of_elementwise(t, source(0), depth) : Stage::outside;
        }
    }

  private:
    // By the router's weights, by a scale, or of two of the block's own.
    static Stage of_product(Stage first, Stage second) {
        if (first == Stage::rows && second != Stage::sum) { return Stage::rows; }
        return first == Stage::outside && second == Stage::rows ? Stage::rows : Stage::outside;
    }

    Stage of_elementwise(const ggml_tensor* t, Stage first, int depth) const {
        if (t->op == GGML_OP_CONT && first == Stage::sum) { return Stage::sum; }
        const bool both = t->src[1] == nullptr || of(t->src[1], depth + 1) == Stage::rows;
        return first == Stage::rows && both ? Stage::rows : Stage::outside;
    }

    const IsOurs& is_ours_;
};

bool contains(const std::vector<ggml_tensor*>& nodes, const ggml_tensor* node) {
    return std::ranges::find(nodes, node) != nodes.end();
}

// Whether all of them are to be computed with this graph. What an earlier piece has computed may have lost its inputs.
bool are_all_in(ggml_cgraph* graph, const std::vector<ggml_tensor*>& nodes) {
    std::size_t n_found = 0;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor* node = ggml_graph_node(graph, i);
        n_found += node->view_src == nullptr && contains(nodes, node) ? 1 : 0;
    }
    const auto computes = [](const ggml_tensor* node) { return node->view_src == nullptr; };
    return n_found == static_cast<std::size_t>(std::ranges::count_if(nodes, computes));
}

// Whether a node that is not among `nodes` reads one of them other than `result`.
bool is_read_elsewhere(ggml_cgraph* graph, const std::vector<ggml_tensor*>& nodes, const ggml_tensor* result) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor* reader = ggml_graph_node(graph, i);
        if (contains(nodes, reader)) { continue; }
        for (const ggml_tensor* source : reader->src) {
            if (source != nullptr && source != result && contains(nodes, source)) { return true; }
        }
    }
    const auto is_output = [&](const ggml_tensor* node) {
        return node != result && (node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0;
    };
    return std::ranges::any_of(nodes, is_output);
}

// MUL(out, weights), then one VIEW for each expert, then ADDs from left to right.
class SumFinder {
  public:
    SumFinder(ggml_cgraph* graph, Block& block) : graph_(graph), block_(block) {}

    void find() {
        const ggml_tensor* weighted = reader_of(block_.out, GGML_OP_MUL);
        if (weighted == nullptr || weighted->src[0] != block_.out) { return; }
        const ggml_tensor* weights = weighted->src[1];
        const ggml_tensor* rows = block_.out;
        if (weights->type != GGML_TYPE_F32 || weights->ne[0] != 1 || weights->ne[1] != rows->ne[1] ||
            weights->ne[2] != rows->ne[2] || block_.rows->ne[1] != 1) {
            return;
        }
        ggml_tensor* sum = nullptr;
        std::uint32_t n_summed = 0;
        for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
            ggml_tensor* node = ggml_graph_node(graph_, i);
            const bool adds = node->op == GGML_OP_ADD &&
                              is_view(node->src[1], weighted, n_summed == 0 ? 1 : n_summed) &&
                              (n_summed == 0 ? is_view(node->src[0], weighted, 0) : node->src[0] == sum);
            const bool copies = node->op == GGML_OP_CONT && n_summed == 0 && is_view(node->src[0], weighted, 0);
            if (!adds && !copies) { continue; }
            sum = node;
            n_summed = copies ? 1 : std::max(n_summed, 1u) + 1;
            block_.sum_nodes.push_back(node);
        }
        collect_views(weighted);
        if (sum == nullptr || is_read_elsewhere(graph_, block_.sum_nodes, sum)) {
            block_.sum_nodes.clear();
            return;
        }
        block_.weights = weights;
        block_.n_summed = n_summed;
        block_.sum = sum;
    }

  private:
    const ggml_tensor* reader_of(const ggml_tensor* source, ggml_op op) const {
        for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
            const ggml_tensor* node = ggml_graph_node(graph_, i);
            if (node->op == op && std::ranges::find(node->src, source) != std::end(node->src)) { return node; }
        }
        return nullptr;
    }

    static bool is_view(const ggml_tensor* t, const ggml_tensor* weighted, std::size_t expert) {
        return t != nullptr && t->op == GGML_OP_VIEW && t->src[0] == weighted && is_one_expert(t) &&
               t->view_offs - weighted->view_offs == expert * weighted->nb[1];
    }

    void collect_views(const ggml_tensor* weighted) {
        for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
            ggml_tensor* node = ggml_graph_node(graph_, i);
            if (node == weighted || (node->op == GGML_OP_VIEW && node->src[0] == weighted)) {
                block_.sum_nodes.push_back(node);
            }
        }
    }

    ggml_cgraph* graph_;
    Block& block_;
};

// "MUL_MAT_ID(up) SILU MUL_MAT_ID(down of ffn_moe_odd-3)": what there is of a layer, for people who would teach it.
std::string describe(ggml_cgraph* graph, std::uint32_t layer, const IsOurs& is_ours) {
    std::string text;
    bool inside = false;
    for (int i = 0; i < ggml_graph_n_nodes(graph) && text.size() < 400; ++i) {
        const ggml_tensor* node = ggml_graph_node(graph, i);
        const auto product = parse_product(node, is_ours);
        if (product) { inside = product->layer == layer; }
        if (!inside || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE) { continue; }
        if (product) {
            text += fmt::format("{}{}({} of {})", text.empty() ? "" : ", ", ggml_op_name(node->op),
                                model::to_string(product->role), ggml_get_name(node->src[1]));
        } else {
            text += fmt::format("{}{}", text.empty() ? "" : ", ", ggml_op_desc(node));
        }
    }
    return text;
}

}  // namespace

std::optional<model::ExpertTensorName> parse_product(const ggml_tensor* node, const IsOurs& is_ours) {
    if (node->op != GGML_OP_MUL_MAT_ID) { return std::nullopt; }
    const auto name = parse_ours(node->src[0], is_ours);
    return name && model::is_weight(name->role) ? name : std::nullopt;
}

bool belongs_to_block(const ggml_tensor* op, const IsOurs& is_ours) {
    // Biases and scales, while llama.cpp looks for a place for them.
    if (op->op == GGML_OP_ADD_ID) {
        const auto name = parse_ours(op->src[1], is_ours);
        if (name && is_bias(name->role)) { return true; }
    }
    if (op->op == GGML_OP_MUL_MAT_ID) {
        const auto name = parse_ours(op->src[0], is_ours);
        if (name && is_scale(name->role)) { return true; }
    }
    return Stages(is_ours).of(op) != Stage::outside;
}

// Compares a pattern with llama.cpp's nodes.
class BlockFinder::Match {
  public:
    Match(const Pattern& pattern, const IsOurs& is_ours) : pattern_(pattern), is_ours_(is_ours) {}

    // Whether `down` grows out of what the pattern's does, wherever those nodes are.
    bool matches_down(ggml_tensor* down) { return equal(pattern_.down, down); }

    // Whether `node` and all it grows out of are the pattern.
    bool matches(ggml_tensor* node) {
        if (!equal(pattern_.out, node)) { return false; }
        const ggml_tensor* rows = rows_;
        const ggml_tensor* ids = ids_;
        const std::int64_t n_used = node->ne[1];
        return rows != nullptr && ids != nullptr && ids->ne[0] == n_used && ids->ne[1] == node->ne[2] &&
               ids->ne[2] == 1 && rows->ne[2] == node->ne[2] && (rows->ne[1] == 1 || rows->ne[1] == n_used) &&
               rows->ne[3] == 1 && node->ne[3] == 1;
    }

    const ggml_tensor* rows() const { return rows_; }
    const ggml_tensor* ids() const { return ids_; }
    // Everything inside, the result included.
    const std::vector<ggml_tensor*>& nodes() const { return nodes_; }

  private:
    bool equal(const ggml_tensor* expected, ggml_tensor* got) {
        if (got == nullptr || got->type != expected->type) { return false; }
        if (expected == pattern_.rows) { return is_same(rows_, got) && got->ne[0] == expected->ne[0]; }
        if (expected == pattern_.ids) { return is_same(ids_, got); }
        if (expected->op == GGML_OP_NONE) {
            return is_ours_(got) && std::strcmp(ggml_get_name(expected), ggml_get_name(got)) == 0;
        }
        if (got->op != expected->op || got->ne[0] != expected->ne[0] || !has_same_parameters(expected, got)) {
            return false;
        }
        if (!contains(nodes_, got)) { nodes_.push_back(got); }
        for (int i = 0; i < GGML_MAX_SRC; ++i) {
            if (expected->src[i] == nullptr && got->src[i] == nullptr) { continue; }
            if (expected->src[i] == nullptr || !equal(expected->src[i], got->src[i])) { return false; }
        }
        return true;
    }

    static bool is_same(const ggml_tensor*& place, const ggml_tensor* got) {
        if (place == nullptr) { place = got; }
        return place == got;
    }

    static bool has_same_parameters(const ggml_tensor* expected, const ggml_tensor* got) {
        if (expected->op == GGML_OP_VIEW) {
            const ggml_tensor* source = got->src[0];
            return source != nullptr && got->view_offs - source->view_offs == expected->view_offs &&
                   got->nb[1] == source->nb[1] && got->nb[2] == source->nb[2] && got->ne[1] == source->ne[1] &&
                   got->ne[2] == source->ne[2];
        }
        return std::memcmp(expected->op_params, got->op_params, sizeof expected->op_params) == 0;
    }

    const Pattern& pattern_;
    const IsOurs& is_ours_;
    const ggml_tensor* rows_ = nullptr;
    const ggml_tensor* ids_ = nullptr;
    std::vector<ggml_tensor*> nodes_;
};

BlockFinder::BlockFinder(const model::MoeModel& model) {
    constexpr std::size_t kTensors = expert::kMaxFfnNodes + model::kMaxRole;
    for (const model::MoeLayer& layer : model.layers) {
        Pattern pattern;
        pattern.context.reset(
            ggml_init({.mem_size = kTensors * ggml_tensor_overhead(), .mem_buffer = nullptr, .no_alloc = true}));
        ggml_context* context = pattern.context.get();
        expert::FfnTensors tensors;
        for (const model::ExpertTensor& of : layer.tensors) {
            ggml_tensor* tensor = ggml_new_tensor_3d(context, of.type, of.ne[0], of.ne[1], of.ne[2]);
            ggml_set_name(tensor, of.name.c_str());
            tensors[of.role] = tensor;
        }
        pattern.rows = ggml_new_tensor_3d(context, GGML_TYPE_F32, layer.n_embd, 1, 3);
        pattern.ids = ggml_new_tensor_2d(context, GGML_TYPE_I32, 1, 3);
        pattern.out = expert::build_ffn(context, layer, tensors, pattern.rows, pattern.ids);
        pattern.down = pattern.out;
        while (pattern.down != nullptr && pattern.down->op != GGML_OP_MUL_MAT_ID) {
            pattern.down = pattern.down->src[0];
        }
        patterns_[layer.layer] = std::move(pattern);
    }
}

bool BlockFinder::is_described(std::uint32_t layer, ggml_tensor* down, const IsOurs& is_ours) const {
    const auto pattern = patterns_.find(layer);
    return pattern != patterns_.end() && pattern->second.out != nullptr &&
           Match(pattern->second, is_ours).matches_down(down);
}

Plan BlockFinder::plan(ggml_cgraph* graph, const IsOurs& is_ours) const {
    Plan plan;
    const int n_nodes = ggml_graph_n_nodes(graph);
    std::map<const ggml_tensor*, Block> blocks;  // by result
    std::vector<ggml_tensor*> inside;
    for (int i = 0; i < n_nodes; ++i) {
        const auto product = parse_product(ggml_graph_node(graph, i), is_ours);
        const auto pattern = product && product->role == Role::down ? patterns_.find(product->layer) : patterns_.end();
        if (pattern == patterns_.end() || pattern->second.out == nullptr) { continue; }
        for (int j = i; j < n_nodes; ++j) {
            ggml_tensor* node = ggml_graph_node(graph, j);
            Match match(pattern->second, is_ours);
            if (node->op != pattern->second.out->op || !match.matches(node) || !are_all_in(graph, match.nodes()) ||
                is_read_elsewhere(graph, match.nodes(), node)) {
                continue;
            }
            Block block{.layer = product->layer, .rows = match.rows(), .ids = match.ids(), .out = node};
            SumFinder(graph, block).find();
            blocks[node] = std::move(block);
            inside.insert(inside.end(), match.nodes().begin(), match.nodes().end());
            break;
        }
    }
    for (int i = 0; i < n_nodes; ++i) {
        ggml_tensor* node = ggml_graph_node(graph, i);
        if (const auto block = blocks.find(node); block != blocks.end()) {
            plan.steps.push_back({std::move(block->second), nullptr});
        } else if (node->op != GGML_OP_NONE && node->op != GGML_OP_VIEW && node->op != GGML_OP_RESHAPE &&
                   !contains(inside, node)) {
            plan.steps.push_back({std::nullopt, node});
            const auto product = parse_product(node, is_ours);
            if (product && product->role == Role::down && !is_described(product->layer, node, is_ours)) {
                plan.unknown.try_emplace(product->layer, describe(graph, product->layer, is_ours));
            }
        }
    }
    return plan;
}

}  // namespace linkcpp::coordinator
