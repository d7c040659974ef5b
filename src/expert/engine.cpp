#include "expert/engine.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpp.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include "base/platform.h"
#include "base/progress.h"
#include "base/units.h"
#include "expert/ffn.h"
#include "model/parallel.h"

namespace linkcpp::expert {
namespace {

using model::MoeLayer;
using model::Role;

// Up to this many pairs a request's graph is kept, one for each layer and shape: building it anew would cost as much as
// a small expert.
constexpr std::uint32_t kCachedPairs = 32;
// About what stays in a core's caches between computing rows, sending them and reading the next ones.
constexpr std::size_t kStretchBytes = 1u << 20;
constexpr std::size_t kMaxTensors = kMaxFfnNodes;
constexpr std::size_t kWeightAlignment = 32;  // GGUF_DEFAULT_ALIGNMENT

ggml_context_ptr make_context(std::size_t n_tensors, bool graph) {
    const std::size_t bytes =
        n_tensors * ggml_tensor_overhead() + (graph ? ggml_graph_overhead_custom(kMaxFfnNodes, false) : 0);
    return ggml_context_ptr(ggml_init({.mem_size = bytes, .mem_buffer = nullptr, .no_alloc = true}));
}

// All rows have the same number of pairs: then the request is {n_used, n_rows} as llama.cpp's own.
bool is_rectangular(std::span<const Pair> pairs, std::size_t n_rows) {
    if (pairs.size() % n_rows != 0) { return false; }
    const std::size_t n_used = pairs.size() / n_rows;
    for (std::size_t i = 0; i < pairs.size(); ++i) {
        if (pairs[i].row != i / n_used) { return false; }
    }
    return true;
}

// Each expert's pairs stand together.
bool is_grouped(std::span<const Pair> pairs) {
    std::vector<bool> seen(std::size_t{1} << 16);
    for (std::size_t i = 0; i < pairs.size(); ++i) {
        if (i > 0 && pairs[i].expert == pairs[i - 1].expert) { continue; }
        if (seen[pairs[i].expert]) { return false; }
        seen[pairs[i].expert] = true;
    }
    return true;
}

// Whether the weights can be computed from where they lie in a slice: kernels want them to begin where a GGUF has them
// begin.
bool are_aligned_in_slice(const MoeLayer& layer) {
    std::uint64_t offset = 0;
    for (const model::ExpertTensor& tensor : layer.tensors) {
        if (model::is_weight(tensor.role) && offset % kWeightAlignment != 0) { return false; }
        offset += tensor.slab_bytes;
    }
    return true;
}

}  // namespace

struct Engine::Arena {
    ggml_backend_buffer_ptr buffer;
    std::size_t bytes = 0;
    std::uint64_t generation = 0;  // grows with each buffer: a graph of an older one points into freed memory
};

struct Engine::Shape {
    std::optional<Role> product;
    std::uint32_t n_used = 0;
    std::uint32_t n_rows = 0;

    auto operator<=>(const Shape&) const = default;
};

struct Engine::Graph {
    ggml_context_ptr context;
    ggml_cgraph* graph = nullptr;
    ggml_tensor* rows = nullptr;   // {n_in, 1, n_rows}
    ggml_tensor* ids = nullptr;    // {n_used, n_rows}, local ids
    ggml_tensor* out = nullptr;    // {n_out, n_used, n_rows}
    std::uint64_t generation = 0;  // of its arena
};

struct Engine::Layer {
    std::uint64_t model = 0;
    MoeLayer layer;
    std::vector<std::int32_t> local;  // the model's expert id → position in the tensors, -1: not held
    ggml_context_ptr context;
    std::optional<AddressSpace> addresses;  // where `slices` are mapped, not copied; ends after them
    ggml_backend_buffer_ptr slices;         // whole slices, the weights in them; none: all is in `buffer`
    std::size_t stride = 0;                 // from one slice to the next; 0 without them
    ggml_backend_buffer_ptr buffer;
    FfnTensors tensors;
    std::map<Shape, std::unique_ptr<Graph>> graphs;
    std::uint64_t bytes = 0;
};

Engine::Engine(Device device, unsigned n_threads)
    : device_(std::move(device)),
      n_threads_(n_threads == 0 ? n_processors() : n_threads),
      small_(std::make_unique<Arena>()),
      large_(std::make_unique<Arena>()),
      large_graph_(std::make_unique<Graph>()) {}

Engine::~Engine() {
    layers_.clear();
    large_graph_.reset();
    small_.reset();
    large_.reset();
    if (backend_ != nullptr) { ggml_backend_free(backend_); }
    if (threadpool_ != nullptr) {
        const auto free_pool = device_function<void (*)(ggml_threadpool*)>(device_, "ggml_threadpool_free");
        free_pool(static_cast<ggml_threadpool*>(threadpool_));
    }
}

Result<std::unique_ptr<Engine>> Engine::open(const Device& device, unsigned n_threads) {
    std::unique_ptr<Engine> engine(new Engine(device, n_threads));
    LINKCPP_CHECK(engine->start());
    return engine;
}

Status Engine::start() {
    backend_ = ggml_backend_dev_init(device_.handle, nullptr);
    if (backend_ == nullptr) { return fail(ErrorKind::failed, "device {}: its backend does not start", device_.name); }
    host_memory_ = ggml_backend_buft_is_host(ggml_backend_get_default_buffer_type(backend_));
    if (!device_.is_cpu()) { return {}; }
    if (const auto set = device_function<ggml_backend_set_n_threads_t>(device_, "ggml_backend_set_n_threads")) {
        set(backend_, static_cast<int>(n_threads_));
    }
    // A pool of its own: without one ggml makes a new one for every graph.
    const auto new_pool =
        device_function<ggml_threadpool* (*)(ggml_threadpool_params*)>(device_, "ggml_threadpool_new");
    const auto set_pool =
        device_function<void (*)(ggml_backend_t, ggml_threadpool*)>(device_, "ggml_backend_cpu_set_threadpool");
    if (new_pool != nullptr && set_pool != nullptr) {
        ggml_threadpool_params params = ggml_threadpool_params_default(static_cast<int>(n_threads_));
        params.poll = 0;
        threadpool_ = new_pool(&params);
        if (threadpool_ != nullptr) { set_pool(backend_, static_cast<ggml_threadpool*>(threadpool_)); }
    }
    return {};
}

Status Engine::make_tensors(Layer& held, std::uint32_t n_local, bool mapped) {
    held.context = make_context(kMaxTensors, false);
    for (const model::ExpertTensor& tensor : held.layer.tensors) {
        const auto [a, b, c] = tensor.shape_with(n_local);
        held.tensors[tensor.role] = ggml_new_tensor_3d(held.context.get(), tensor.type, a, b, c);
        held.bytes += tensor.slab_bytes * n_local;
    }
    const bool in_slices = host_memory_ && are_aligned_in_slice(held.layer);
    if (mapped && !in_slices) {
        return fail(ErrorKind::unsupported,
                    "device {}: layer {} cannot be computed with where it lies on disk; leave out --mmap", device_.name,
                    held.layer.layer);
    }
    if (in_slices) { LINKCPP_CHECK(place_in_slices(held, n_local, mapped)); }
    // Allocates what has no place yet.
    if (std::ranges::any_of(held.tensors, [](const auto& entry) { return entry.second->data == nullptr; })) {
        held.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(held.context.get(),
                                                                   ggml_backend_get_default_buffer_type(backend_)));
        if (!held.buffer) { return no_room(held); }
        ggml_backend_buffer_set_usage(held.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    return check_operations(held);
}

// Memory for an array of slices, or addresses that they are mapped to.
Status Engine::allocate_slices(Layer& held, std::size_t n_bytes, bool mapped) {
    if (mapped) {
        ggml_backend_dev_props properties{};
        ggml_backend_dev_get_props(device_.handle, &properties);
        if (!properties.caps.buffer_from_host_ptr) {
            return fail(ErrorKind::unsupported, "device {}: cannot compute with what lies on disk; leave out --mmap",
                        device_.name);
        }
        LINKCPP_TRY(AddressSpace addresses, AddressSpace::reserve(n_bytes));
        held.addresses.emplace(std::move(addresses));
        held.slices.reset(
            ggml_backend_dev_buffer_from_host_ptr(device_.handle, held.addresses->base(), n_bytes, n_bytes));
    } else {
        held.slices.reset(ggml_backend_buft_alloc_buffer(ggml_backend_get_default_buffer_type(backend_), n_bytes));
    }
    if (!held.slices) { return no_room(held); }
    ggml_backend_buffer_set_usage(held.slices.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    if (!mapped) { prefer_large_pages(ggml_backend_buffer_get_base(held.slices.get()), n_bytes); }
    return {};
}

// Gives the weights their places in an array of slices: from one expert to the next it is a whole slice.
Status Engine::place_in_slices(Layer& held, std::uint32_t n_local, bool mapped) {
    held.stride = GGML_PAD(held.layer.slice_bytes(), mapped ? page_bytes() : kWeightAlignment);
    LINKCPP_CHECK(allocate_slices(held, n_local * held.stride, mapped));
    auto* base = static_cast<std::byte*>(ggml_backend_buffer_get_base(held.slices.get()));
    std::size_t offset = 0;
    for (const model::ExpertTensor& tensor : held.layer.tensors) {
        if (model::is_weight(tensor.role)) {
            ggml_tensor* weight = held.tensors[tensor.role];
            weight->nb[2] = held.stride;
            weight->nb[3] = weight->nb[2] * n_local;
            if (ggml_backend_tensor_alloc(held.slices.get(), weight, base + offset) != GGML_STATUS_SUCCESS) {
                return fail(ErrorKind::failed, "device {}: {} has no place", device_.name, tensor.name);
            }
        }
        offset += tensor.slab_bytes;
    }
    return {};
}

std::unexpected<Error> Engine::no_room(const Layer& held) const {
    return fail(ErrorKind::overloaded, "device {}: no room for {} bytes of layer {}", device_.name, held.bytes,
                held.layer.layer);
}

// Asks the device before the first request does.
Status Engine::check_operations(const Layer& held) const {
    const ggml_context_ptr context = make_context(3 * kMaxTensors, false);
    ggml_tensor* ids = ggml_new_tensor_2d(context.get(), GGML_TYPE_I32, 1, 1);
    const auto rows = [&](std::int64_t n) { return ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, n, 1, 1); };
    for (const auto& [role, tensor] : held.tensors) {
        if (!model::is_weight(role)) { continue; }
        const ggml_tensor* product = build_product(context.get(), held.tensors, role, rows(tensor->ne[0]), ids);
        if (ggml_backend_dev_supports_op(device_.handle, product)) { continue; }
        // Or is it only too much in one piece? Some devices take 128 MiB.
        FfnTensors alone{{role, ggml_new_tensor_3d(context.get(), tensor->type, tensor->ne[0], tensor->ne[1], 1)}};
        if (ggml_backend_dev_supports_op(device_.handle,
                                         build_product(context.get(), alone, role, rows(tensor->ne[0]), ids))) {
            return fail(ErrorKind::overloaded,
                        "device {}: {} experts of one layer are too much for it in one piece ({} of {}); give it fewer",
                        device_.name, tensor->ne[2], format_bytes(ggml_nbytes(tensor)), model::to_string(role));
        }
        return fail(ErrorKind::unsupported, "device {}: cannot multiply by {} experts", device_.name,
                    ggml_type_name(tensor->type));
    }
    build_ffn(context.get(), held.layer, held.tensors, rows(held.layer.n_embd), ids);
    for (ggml_tensor* t = ggml_get_first_tensor(context.get()); t; t = ggml_get_next_tensor(context.get(), t)) {
        if (t->op != GGML_OP_NONE && !ggml_backend_dev_supports_op(device_.handle, t)) {
            return fail(ErrorKind::unsupported, "device {}: cannot compute {} ({} experts)", device_.name,
                        ggml_op_desc(t), model::to_string(held.layer.activation.kind));
        }
    }
    return {};
}

void Engine::drop(std::uint32_t layer) {
    put(layer, nullptr);
}

Status Engine::hold(std::uint64_t model, const MoeLayer& layer, std::span<const std::uint16_t> experts,
                    const SliceSource& source, unsigned n_threads) {
    return hold(model, layer, experts, false, source, n_threads);
}

Status Engine::hold_mapped(std::uint64_t model, const MoeLayer& layer, std::span<const std::uint16_t> experts,
                           const SliceSource& source, unsigned n_threads) {
    return hold(model, layer, experts, true, source, n_threads);
}

Status Engine::hold(std::uint64_t model, const MoeLayer& layer, std::span<const std::uint16_t> experts, bool mapped,
                    const SliceSource& source, unsigned n_threads) {
    auto held = std::make_shared<Layer>();
    held->model = model;
    held->layer = layer;
    held->local.assign(layer.n_expert, -1);
    for (std::size_t i = 0; i < experts.size(); ++i) {
        if (experts[i] >= layer.n_expert) {
            return fail(ErrorKind::not_found, "layer {}: expert {} of {}", layer.layer, experts[i], layer.n_expert);
        }
        held->local[experts[i]] = static_cast<std::int32_t>(i);
    }
    LINKCPP_CHECK(make_tensors(*held, static_cast<std::uint32_t>(experts.size()), mapped));
    const std::size_t slice_bytes = layer.slice_bytes();
    // Without an array of slices (stride 0) each is read to the same place aside.
    Bytes aside(held->slices ? 0 : slice_bytes);
    auto* const first =
        held->slices ? static_cast<std::byte*>(ggml_backend_buffer_get_base(held->slices.get())) : aside.data();
    Progress quiet("", 0, Progress::Unit::items, true);
    LINKCPP_CHECK(model::for_all(
        experts.size(), held->slices ? n_threads : 1, quiet, [&](std::size_t i) -> Result<std::uint64_t> {
            const std::span<std::byte> slice(first + i * held->stride, slice_bytes);
            LINKCPP_CHECK(source(layer.layer, experts[i], slice));
            std::size_t offset = 0;
            for (const model::ExpertTensor& tensor : layer.tensors) {
                if (!held->slices || !model::is_weight(tensor.role)) {
                    ggml_backend_tensor_set(held->tensors.at(tensor.role), slice.data() + offset, i * tensor.slab_bytes,
                                            tensor.slab_bytes);
                }
                offset += tensor.slab_bytes;
            }
            return 1;
        }));
    put(layer.layer, std::move(held));
    return {};
}

Status Engine::read(std::uint64_t model, std::uint32_t layer, std::uint32_t expert, std::span<std::byte> to) const {
    const auto held = find(layer);
    if (!held || held->model != model || expert >= held->local.size() || held->local[expert] < 0 ||
        to.size() != held->layer.slice_bytes()) {
        return fail(ErrorKind::not_found, "layer {}: expert {} is not held", layer, expert);
    }
    const auto i = static_cast<std::size_t>(held->local[expert]);
    std::size_t offset = 0;
    for (const model::ExpertTensor& tensor : held->layer.tensors) {
        const ggml_tensor* from = held->tensors.at(tensor.role);
        // Weights in an array of slices are a slice apart, other tensors are without gaps.
        const std::size_t step = held->slices && model::is_weight(tensor.role) ? held->stride : tensor.slab_bytes;
        ggml_backend_tensor_get(from, to.data() + offset, i * step, tensor.slab_bytes);
        offset += tensor.slab_bytes;
    }
    return {};
}

std::shared_ptr<Engine::Layer> Engine::find(std::uint32_t layer) const {
    const std::lock_guard lock(mutex_);
    const auto found = layers_.find(layer);
    return found == layers_.end() ? nullptr : found->second;
}

void Engine::put(std::uint32_t layer, std::shared_ptr<Layer> held) {
    const std::lock_guard lock(mutex_);
    // The old one is freed outside the lock, by whoever lets go of it last.
    std::shared_ptr<Layer>& place = layers_[layer];
    place.swap(held);
    if (!place) { layers_.erase(layer); }
}

bool Engine::holds(std::uint32_t layer, std::uint32_t expert) const {
    const auto held = find(layer);
    return held && expert < held->local.size() && held->local[expert] >= 0;
}

std::uint64_t Engine::shard_bytes() const {
    const std::lock_guard lock(mutex_);
    std::uint64_t bytes = 0;
    for (const auto& [number, held] : layers_) { bytes += held->bytes; }
    return bytes;
}

Status Engine::build(Graph& graph, Layer& held, const Shape& shape, Arena& arena) {
    graph.context = make_context(kMaxTensors, true);
    ggml_context* context = graph.context.get();
    const model::Widths widths = model::widths_of(held.layer, shape.product);
    graph.rows = ggml_new_tensor_3d(context, GGML_TYPE_F32, widths.n_in, 1, shape.n_rows);
    graph.ids = ggml_new_tensor_2d(context, GGML_TYPE_I32, shape.n_used, shape.n_rows);
    graph.out = shape.product ? build_product(context, held.tensors, *shape.product, graph.rows, graph.ids)
                              : build_ffn(context, held.layer, held.tensors, graph.rows, graph.ids);
    graph.graph = ggml_new_graph_custom(context, kMaxFfnNodes, false);
    ggml_build_forward_expand(graph.graph, graph.out);

    ggml_backend_buffer_type_t type = ggml_backend_get_default_buffer_type(backend_);
    std::size_t bytes = 0;
    const auto for_each_tensor = [&](const auto& visit) {
        for (ggml_tensor* t = ggml_get_first_tensor(context); t != nullptr; t = ggml_get_next_tensor(context, t)) {
            if (t->view_src == nullptr) { visit(t); }
        }
    };
    for_each_tensor([&](const ggml_tensor* t) {
        bytes += GGML_PAD(ggml_backend_buft_get_alloc_size(type, t), ggml_backend_buft_get_alignment(type));
    });
    if (bytes > arena.bytes) {
        ++arena.generation;
        arena.buffer.reset(ggml_backend_buft_alloc_buffer(type, bytes));
        arena.bytes = arena.buffer ? bytes : 0;
        if (!arena.buffer) {
            return fail(ErrorKind::overloaded, "device {}: no room for {} bytes of activations", device_.name, bytes);
        }
    }
    ggml_tallocr allocator = ggml_tallocr_new(arena.buffer.get());
    ggml_status status = GGML_STATUS_SUCCESS;
    for_each_tensor([&](ggml_tensor* t) {
        if (status == GGML_STATUS_SUCCESS) { status = ggml_tallocr_alloc(&allocator, t); }
    });
    for (ggml_tensor* t = ggml_get_first_tensor(context); t != nullptr; t = ggml_get_next_tensor(context, t)) {
        if (t->view_src != nullptr && status == GGML_STATUS_SUCCESS) { status = ggml_backend_view_init(t); }
    }
    if (status != GGML_STATUS_SUCCESS) {
        return fail(ErrorKind::failed, "device {}: {}", device_.name, ggml_status_to_string(status));
    }
    graph.generation = arena.generation;
    return {};
}

Result<Engine::Graph*> Engine::graph_for(Layer& held, const Shape& shape) {
    if (shape.n_used * shape.n_rows > kCachedPairs) {
        LINKCPP_CHECK(build(*large_graph_, held, shape, *large_));
        return large_graph_.get();
    }
    std::unique_ptr<Graph>& cached = held.graphs[shape];
    if (!cached || cached->generation != small_->generation) {
        auto graph = std::make_unique<Graph>();
        LINKCPP_CHECK(build(*graph, held, shape, *small_));
        cached = std::move(graph);
    }
    return cached.get();
}

Result<std::span<const float>> Engine::run(Layer& held, const Batch& batch, std::span<const Pair> pairs) {
    const std::size_t n_in = batch.n_in;
    const std::size_t n_rows = batch.rows.size() / n_in;
    ids_.resize(pairs.size());
    std::ranges::transform(pairs, ids_.begin(), [&](const Pair& pair) { return held.local[pair.expert]; });
    const bool rectangular = is_rectangular(pairs, n_rows);
    const auto n_graph_rows = static_cast<std::uint32_t>(rectangular ? n_rows : pairs.size());
    const auto n_used = static_cast<std::uint32_t>(pairs.size() / n_graph_rows);
    LINKCPP_TRY(Graph * graph, graph_for(held, {batch.product, n_used, n_graph_rows}));
    if (rectangular) {
        ggml_backend_tensor_set(graph->rows, batch.rows.data(), 0, batch.rows.size_bytes());
    } else {
        if (!host_memory_) { expanded_.resize(pairs.size() * n_in); }
        float* place = host_memory_ ? static_cast<float*>(graph->rows->data) : expanded_.data();
        for (const Pair& pair : pairs) {
            std::memcpy(place, batch.rows.data() + pair.row * n_in, n_in * sizeof(float));
            place += n_in;
        }
        if (!host_memory_) { ggml_backend_tensor_set(graph->rows, expanded_.data(), 0, ggml_nbytes(graph->rows)); }
    }
    ggml_backend_tensor_set(graph->ids, ids_.data(), 0, ids_.size() * sizeof(std::int32_t));
    const ggml_status status = ggml_backend_graph_compute(backend_, graph->graph);
    if (status != GGML_STATUS_SUCCESS) {
        return fail(ErrorKind::failed, "device {}: {}", device_.name, ggml_status_to_string(status));
    }
    const auto n_out = static_cast<std::size_t>(ggml_nelements(graph->out));
    if (host_memory_) { return std::span(static_cast<const float*>(graph->out->data), n_out); }
    staging_.resize(n_out);
    ggml_backend_tensor_get(graph->out, staging_.data(), 0, n_out * sizeof(float));
    return std::span<const float>(staging_);
}

std::size_t Engine::end_of_stretch(std::span<const Pair> pairs, std::size_t begin, std::size_t row_bytes) {
    std::size_t end = begin;
    while (end < pairs.size()) {
        std::size_t next = end + 1;
        while (next < pairs.size() && pairs[next].expert == pairs[end].expert) { ++next; }
        if (end > begin && (next - begin) * row_bytes > kStretchBytes) { break; }
        end = next;
    }
    return end;
}

Status Engine::check(const Layer& held, const Batch& batch) {
    const std::uint32_t layer = batch.layer;
    if (held.model != batch.model) {
        return fail(ErrorKind::unsupported, "layer {}: it is held of another model than {:016x}", layer, batch.model);
    }
    const std::size_t n_in = model::widths_of(held.layer, batch.product).n_in;
    if (n_in == 0) { return fail(ErrorKind::invalid, "layer {}: it has no weight of that role", layer); }
    if (!batch.product && held.layer.activation.kind == model::Activation::unknown) {
        return fail(ErrorKind::invalid, "layer {}: its activation is not known", layer);
    }
    const std::size_t n_rows = batch.rows.size() / n_in;
    if (batch.n_in != n_in || n_rows == 0 || batch.rows.size() % n_in != 0 || batch.pairs.empty()) {
        return fail(ErrorKind::invalid, "layer {}: expected rows of {}, got {} numbers in rows of {} with {} pairs",
                    layer, n_in, batch.rows.size(), batch.n_in, batch.pairs.size());
    }
    for (std::size_t i = 0; i < batch.pairs.size(); ++i) {
        const Pair& pair = batch.pairs[i];
        if (pair.row >= n_rows) { return fail(ErrorKind::invalid, "pair {}: row {} of {}", i, pair.row, n_rows); }
        if (pair.expert >= held.local.size() || held.local[pair.expert] < 0) {
            return fail(ErrorKind::not_found, "expert {} of layer {} is not held", pair.expert, layer);
        }
    }
    return {};
}

Status Engine::compute(const Batch& batch, const RowSink& sink) {
    const auto held = find(batch.layer);
    if (!held) { return fail(ErrorKind::not_found, "layer {} is not held", batch.layer); }
    LINKCPP_CHECK(check(*held, batch));
    const std::span<const Pair> pairs = batch.pairs;
    const std::size_t n_out = model::widths_of(held->layer, batch.product).n_out;
    const std::size_t row_bytes = n_out * sizeof(float);
    const bool stretches = device_.is_cpu() && pairs.size() * row_bytes > kStretchBytes && is_grouped(pairs);
    for (std::size_t begin = 0; begin < pairs.size();) {
        const std::size_t end = stretches ? end_of_stretch(pairs, begin, row_bytes) : pairs.size();
        LINKCPP_TRY(const std::span<const float> result, run(*held, batch, pairs.subspan(begin, end - begin)));
        LINKCPP_CHECK(sink({begin, n_out, result}));
        begin = end;
    }
    return {};
}

Status Engine::compute_rows(const Batch& batch, std::span<float> out) {
    return compute(batch, [&](const RowPart& part) -> Status {
        if (out.size() != batch.pairs.size() * part.n_out) {
            return fail(ErrorKind::invalid, "layer {}: {} pairs do not make {} numbers", batch.layer,
                        batch.pairs.size(), out.size());
        }
        std::memcpy(out.data() + part.first * part.n_out, part.rows.data(), part.rows.size_bytes());
        return {};
    });
}

Status Engine::compute_sums(const Batch& batch, std::span<float> out) {
    if (out.size() != batch.rows.size() || batch.product) {
        return fail(ErrorKind::invalid, "layer {}: sums of {} numbers for rows of {}", batch.layer, out.size(),
                    batch.rows.size());
    }
    std::ranges::fill(out, 0.0f);
    const std::size_t n_embd = batch.n_in;
    return compute(batch, [&](const RowPart& part) -> Status {
        for (std::size_t i = 0; i * n_embd < part.rows.size(); ++i) {
            const Pair& pair = batch.pairs[part.first + i];
            const float* row = part.rows.data() + i * n_embd;
            float* sum = out.data() + pair.row * n_embd;
            for (std::size_t j = 0; j < n_embd; ++j) { sum[j] += row[j] * pair.weight; }
        }
        return {};
    });
}

}  // namespace linkcpp::expert
