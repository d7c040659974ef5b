// The expert engine: holds a shard on one ggml device and computes (row, expert, weight) pairs.
//
// One pair's row is the whole FFN of its expert, made of the nodes of ffn.h: the same kernels give the same bits. Or it
// is the product by one of the expert's weights alone, for blocks that nobody has described.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/raw_buffer.h"
#include "expert/device.h"
#include "model/moe.h"

namespace linkcpp::expert {

struct Pair {
    std::uint16_t row = 0;     // index into the rows given
    std::uint16_t expert = 0;  // the model's own id
    float weight = 0;          // used by weighted sums only
};

// Work for one layer. `model` is what the layer was held under: a layer of another model is never computed with.
struct Batch {
    std::uint64_t model = 0;
    std::uint32_t layer = 0;
    std::uint32_t n_in = 0;
    std::span<const float> rows;  // {n_in, n_rows}
    std::span<const Pair> pairs;
    std::optional<model::Role> product;  // nothing: the whole FFN, and n_in and n_out are n_embd
};

// Fills `to` with the slice (layer, expert): MoeLayer::slice_bytes() bytes. Called from several threads at once.
using SliceSource = std::function<Status(std::uint32_t layer, std::uint32_t expert, std::span<std::byte> to)>;

// The rows {n_out, n} of the pairs first, first + 1, …, first + n - 1.
struct RowPart {
    std::size_t first = 0;
    std::size_t n_out = 0;
    std::span<const float> rows;
};
// Takes them; they are valid until it returns.
using RowSink = std::function<Status(const RowPart& part)>;

// compute_*() belong to one thread at a time; hold() may run on another meanwhile, and a request sees a layer as it was
// before or after, never between.
class Engine {
  public:
    // `n_threads`: of a CPU device, 0 for all processors. Errors: failed (the device does not start).
    static Result<std::unique_ptr<Engine>> open(const Device& device, unsigned n_threads);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Makes `experts` (ascending, at least one) of `model` what is held of that layer, in the place of what was. A CPU
    // computes from where `source` has written to. On an error what was held stays. `n_threads` call `source`, if
    // slices have a place of their own (on a CPU); 0: all processors. Errors: those of `source`, unsupported (the
    // device cannot compute this type), overloaded (not enough memory on the device), not_found (no such expert).
    Status hold(std::uint64_t model, const model::MoeLayer& layer, std::span<const std::uint16_t> experts,
                const SliceSource& source, unsigned n_threads = 1);
    // The same without memory of its own: `source` is given addresses of an AddressSpace (base/platform.h), each
    // slice's beginning with a page, and maps something there. Errors: also unsupported (a device, or a layer, that
    // cannot be computed with where it lies).
    Status hold_mapped(std::uint64_t model, const model::MoeLayer& layer, std::span<const std::uint16_t> experts,
                       const SliceSource& source, unsigned n_threads = 1);
    void drop(std::uint32_t layer);
    // Fills `to` with a slice that is held of that model: the bytes that `source` gave. May be called by whoever calls
    // hold(), also from its source. Errors: not_found.
    Status read(std::uint64_t model, std::uint32_t layer, std::uint32_t expert, std::span<std::byte> to) const;

    bool holds(std::uint32_t layer, std::uint32_t expert) const;
    std::uint64_t shard_bytes() const;

    // Gives one unweighted row a pair to `sink`, in the pairs' order, in one stretch or
    // several: where each expert's pairs stand together, a CPU computes a large request expert by expert, so that a
    // stretch stays in its caches and can be sent while the next is computed. Pairs of one expert are never parted.
    // Errors: not_found (layer or expert not held), unsupported (the layer is of another model), invalid (the batch
    // contradicts itself or the layer), failed (device), the sink's.
    Status compute(const Batch& batch, const RowSink& sink);
    // The same into `out`: {n_out, pairs.size()}.
    Status compute_rows(const Batch& batch, std::span<float> out);
    // out: {n_embd, n_rows}: for each row the sum of its pairs' rows times their weights, added in the pairs' order. Of
    // whole FFNs only.
    Status compute_sums(const Batch& batch, std::span<float> out);

    const Device& device() const { return device_; }
    unsigned n_threads() const { return n_threads_; }

  private:
    struct Layer;
    struct Graph;
    struct Arena;

    Engine(Device device, unsigned n_threads);
    Status start();
    Status hold(std::uint64_t model, const model::MoeLayer& layer, std::span<const std::uint16_t> experts, bool mapped,
                const SliceSource& source, unsigned n_threads);
    Status make_tensors(Layer& held, std::uint32_t n_local, bool mapped);
    std::unexpected<Error> no_room(const Layer& held) const;
    Status place_in_slices(Layer& held, std::uint32_t n_local, bool mapped);
    Status allocate_slices(Layer& held, std::size_t n_bytes, bool mapped);
    Status check_operations(const Layer& held) const;
    static Status check(const Layer& held, const Batch& batch);
    struct Shape;
    Result<Graph*> graph_for(Layer& held, const Shape& shape);
    static std::size_t end_of_stretch(std::span<const Pair> pairs, std::size_t begin, std::size_t row_bytes);
    Status build(Graph& graph, Layer& held, const Shape& shape, Arena& arena);
    // Runs one graph and returns the rows where it left them: in host memory, or copied to staging_.
    Result<std::span<const float>> run(Layer& held, const Batch& batch, std::span<const Pair> pairs);

    Device device_;
    unsigned n_threads_;
    ggml_backend_t backend_ = nullptr;
    void* threadpool_ = nullptr;
    bool host_memory_ = false;  // tensors lie in memory that this process can read and write directly
    std::shared_ptr<Layer> find(std::uint32_t layer) const;
    void put(std::uint32_t layer, std::shared_ptr<Layer> held);

    mutable std::mutex mutex_;  // guards layers_, not what the layers hold
    std::map<std::uint32_t, std::shared_ptr<Layer>> layers_;
    std::unique_ptr<Arena> small_;  // shared by all cached graphs: one runs at a time
    std::unique_ptr<Arena> large_;
    std::unique_ptr<Graph> large_graph_;
    std::vector<std::int32_t> ids_;
    RawFloats expanded_;
    RawFloats staging_;
};

}  // namespace linkcpp::expert
