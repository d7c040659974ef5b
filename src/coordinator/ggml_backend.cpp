#include "coordinator/ggml_backend.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <random>
#include <string>

#include <ggml-backend-impl.h>
#include <ggml-backend.h>
#include <ggml.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/log.h"
#include "base/platform.h"
#include "base/text.h"
#include "coordinator/block.h"
#include "coordinator/cpu_node.h"
#include "coordinator/dispatcher.h"
#include "coordinator/hub_client.h"
#include "coordinator/settings.h"
#include "coordinator/weight_check.h"

namespace linkcpp::coordinator {
namespace {

constexpr const char* kName = "Swarm";
constexpr std::size_t kAlignment = 64;

// What lives as long as the process: ggml keeps pointers into it. Made by swarm_registry(), the one function that ggml
// asks for, and never freed: other threads may still be computing when static objects are destroyed.
struct Plugin {
    Settings settings;
    bool broken = false;  // the settings could not be read: refuse to load a model rather than run it here
    Dispatcher dispatcher;
    std::mutex mutex;  // guards client and manifest
    std::unique_ptr<HubClient> client;
    std::shared_ptr<const model::Manifest> manifest;
    // Made with the manifest, before the first tensor.
    std::unique_ptr<WeightCheck> check;
    std::unique_ptr<BlockFinder> finder;
    CpuNodes cpu_nodes;
    std::atomic<bool> loaded{false};  // the manifest and what is made with it are there
    std::atomic<bool> wrong_model{false};

    ggml_backend_reg registry{};
    ggml_backend_device device{};
    ggml_backend_buffer_type buffer_type{};

    explicit Plugin(Settings s) : settings(std::move(s)), dispatcher(settings.dispatch) {}
};

Plugin* g_plugin = nullptr;  // set once in swarm_registry()

// Calls `work` and turns whatever it throws into `otherwise`: nothing may unwind into llama.cpp.
template <class Work, class T>
T guarded(const char* where, T otherwise, const Work& work) noexcept {
    try {
        return work();
    } catch (const std::exception& error) { log_error("{}: {}", where, error.what()); } catch (...) {
        log_error("{}: unknown exception", where);
    }
    return otherwise;
}

// ---- buffers
// ---------------------------------------------------------------------------------------------------------

// A range of addresses. For weights it stays without memory: llama.cpp hands us every expert's bytes, and we keep none.
// As soon as it turns out to be for computation it gets memory, page by page as it is touched.
struct Buffer {
    void* base = nullptr;
    std::size_t bytes = 0;
    bool readable = false;

    explicit Buffer(std::size_t n) : bytes(std::max<std::size_t>(n, kAlignment)) {
        void* address = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        base = address == MAP_FAILED ? nullptr : address;
    }
    ~Buffer() {
        if (base != nullptr) { ::munmap(base, bytes); }
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    bool make_readable() {
        readable = readable || ::mprotect(base, bytes, PROT_READ | PROT_WRITE) == 0;
        return readable;
    }

    // Memory for one tensor among the weights.
    static bool make_readable(const ggml_tensor* tensor) {
        const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
        const auto begin = reinterpret_cast<std::uintptr_t>(tensor->data) / page * page;
        const auto end = reinterpret_cast<std::uintptr_t>(tensor->data) + ggml_nbytes(tensor);
        return ::mprotect(reinterpret_cast<void*>(begin), end - begin, PROT_READ | PROT_WRITE) == 0;
    }
};

// Biases and scales are small and stay here: a block that nobody has described needs them.
bool keeps_bytes(const ggml_tensor* tensor) {
    const auto name = model::parse_expert_tensor_name(ggml_get_name(tensor));
    return name && !model::is_weight(name->role);
}

Buffer& context_of(ggml_backend_buffer_t buffer) {
    return *static_cast<Buffer*>(buffer->context);
}

bool is_ours(const ggml_tensor* tensor) {
    const ggml_backend_buffer_t buffer = tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
    return buffer != nullptr && buffer->buft == &g_plugin->buffer_type;
}

void buffer_free(ggml_backend_buffer_t buffer) {
    delete &context_of(buffer);
}

void* buffer_base(ggml_backend_buffer_t buffer) {
    return context_of(buffer).base;
}

ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor) {
    return guarded("loading", GGML_STATUS_FAILED, [&] {
        if (buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
            return context_of(buffer).make_readable() ? GGML_STATUS_SUCCESS : GGML_STATUS_ALLOC_FAILED;
        }
        if (tensor->view_src != nullptr) { return GGML_STATUS_SUCCESS; }
        if (g_plugin->check) {
            const Status status = g_plugin->check->announce(tensor);
            if (!status) {
                log_error("{}", status.error().message);
            } else if (!keeps_bytes(tensor) || Buffer::make_readable(tensor)) {
                return GGML_STATUS_SUCCESS;
            }
        }
        return GGML_STATUS_FAILED;
    });
}

// Weights have no memory behind them: their bytes are looked at and dropped, they are on the workers.
void buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, const void* data, size_t offset,
                       size_t size) {
    const bool keep = context_of(buffer).readable || keeps_bytes(tensor);
    if (keep) { std::memcpy(static_cast<char*>(tensor->data) + offset, data, size); }
    if (context_of(buffer).readable) { return; }
    guarded("loading", 0, [&] {
        if (g_plugin->wrong_model || !g_plugin->check) { return 0; }
        const ByteView bytes(static_cast<const std::byte*>(data), size);
        if (const Status status = g_plugin->check->add(ggml_get_name(tensor), offset, bytes); !status) {
            log_error("{}", status.error().message);
            g_plugin->wrong_model = true;  // this function cannot fail: the next allocation does
        }
        return 0;
    });
}

void buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor* tensor, void* data, size_t offset,
                       size_t size) {
    if (context_of(buffer).readable || keeps_bytes(tensor)) {
        std::memcpy(data, static_cast<const char*>(tensor->data) + offset, size);
    } else {
        std::memset(data, 0, size);
        log_warn("{}: its bytes were asked for, but they are on the workers", ggml_get_name(tensor));
    }
}

void buffer_memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, uint8_t value, size_t offset,
                          size_t size) {
    if (context_of(buffer).readable) { std::memset(static_cast<char*>(tensor->data) + offset, value, size); }
}

bool buffer_copy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor* from, ggml_tensor* to) {
    if (!context_of(buffer).readable || from->buffer == nullptr || !ggml_backend_buffer_is_host(from->buffer)) {
        return false;
    }
    std::memcpy(to->data, from->data, ggml_nbytes(from));
    return true;
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    Buffer& context = context_of(buffer);
    if (context.readable) { std::memset(context.base, value, context.bytes); }
}

constexpr ggml_backend_buffer_i kBufferInterface = {
    .free_buffer = buffer_free,
    .get_base = buffer_base,
    .init_tensor = buffer_init_tensor,
    .memset_tensor = buffer_memset_tensor,
    .set_tensor = buffer_set_tensor,
    .get_tensor = buffer_get_tensor,
    .set_tensor_2d = nullptr,
    .get_tensor_2d = nullptr,
    .cpy_tensor = buffer_copy_tensor,
    .clear = buffer_clear,
    .reset = nullptr,
};

// ---- joining the hub
// -------------------------------------------------------------------------------------------------

// Workers that hold something dial as soon as the hub has told them of this program.
constexpr Duration kDialled = std::chrono::seconds(2);

// Waits until every slice can be computed, so that a model that loads also runs. Where this program can compute all
// itself, it waits only for workers that are there.
Status wait_for_coverage(Duration timeout) {
    using namespace std::chrono_literals;
    const TimePoint start = steady_now();
    TimePoint next_line = start + 2s;
    std::size_t missing = 0;
    std::size_t to_come = 0;
    while (true) {
        const TimePoint now = steady_now();
        const bool covered = g_plugin->dispatcher.covered(&missing, &to_come);
        if (covered && (to_come == 0 || now - start >= kDialled)) { break; }
        if (!covered && now - start >= timeout) {
            return fail(ErrorKind::timeout,
                        "{} expert slices have no live holder after {:.0f} s; start more workers with "
                        "`linkcpp join`, or let this program compute experts itself "
                        "(LINKCPP_LOCAL_EXPERTS=on)",
                        missing, to_seconds(timeout));
        }
        if (now >= next_line) {
            const std::size_t n_out = g_plugin->dispatcher.n_quarantined();
            log_info(
                "waiting for workers: {} expert slices have no live holder yet ({:.0f} s of {:.0f} s){}", missing,
                to_seconds(now - start), to_seconds(timeout),
                n_out == 0 ? "" : fmt::format("; {} in quarantine, see `linkcpp status`", counted(n_out, "worker")));
            next_line = now + 2s;
        }
        ::usleep(10'000);
    }
    if (missing > 0) {
        log_warn(
            "{} expert slices have no live holder: this program computes them itself (`linkcpp status` shows the "
            "workers)",
            missing);
    }
    return {};
}

constexpr Duration kStopTimeout = std::chrono::milliseconds(500);

// At the end of the process the control thread goes first, while what it uses is still there.
void stop_client() {
    // Somebody who is still loading holds the mutex for as long as that takes: then all stays as it is.
    const std::unique_lock lock(g_plugin->mutex, std::try_to_lock);
    if (!lock || !g_plugin->client) { return; }
    ::unlink(g_plugin->client->unix_path().c_str());
    const DispatchStats& stats = g_plugin->dispatcher.stats();
    log_debug(
        "{} expert blocks in {} requests, {} products one at a time, {} pairs ({} computed here), {} audits ({} of "
        "them "
        "apart, {} not to be had)",
        stats.layers - stats.products, stats.requests.load(), stats.products.load(), stats.pairs.load(),
        stats.local_pairs.load(), stats.audits.load(), stats.rulings.load(), stats.unchecked.load());
    if (g_plugin->client->stop(kStopTimeout)) {
        g_plugin->client.reset();
    } else {
        static_cast<void>(g_plugin->client.release());
    }
}

// Called when the first real buffer is allocated: a model is being loaded in earnest.
Status connect() {
    const std::lock_guard lock(g_plugin->mutex);
    if (g_plugin->broken) { return fail(ErrorKind::invalid, "the settings above are wrong; no model is loaded"); }
    if (g_plugin->wrong_model) {
        return fail(ErrorKind::invalid,
                    "this program has loaded another model than the hub serves; no token is computed");
    }
    if (g_plugin->manifest) { return {}; }
    if (!g_plugin->client) {
        LINKCPP_TRY(g_plugin->client, HubClient::start(g_plugin->settings.hub, g_plugin->dispatcher));
        static std::once_flag at_exit;
        std::call_once(at_exit, [] { std::atexit(stop_client); });
    }
    auto manifest = g_plugin->client->wait_for_model(g_plugin->settings.wait);
    if (!manifest) {
        g_plugin->client.reset();
        return std::unexpected(manifest.error());
    }
    LINKCPP_CHECK(wait_for_coverage(g_plugin->settings.coverage_wait));
    g_plugin->manifest = *manifest;
    g_plugin->check = std::make_unique<WeightCheck>(g_plugin->manifest, std::random_device{}());
    g_plugin->finder = std::make_unique<BlockFinder>(g_plugin->manifest->model);
    g_plugin->loaded.store(true, std::memory_order_release);
    log_info("experts of {} ({}) are computed by the swarm, mode {}", g_plugin->manifest->model.name,
             counted(g_plugin->manifest->model.layers.size(), "layer"),
             g_plugin->settings.dispatch.mode == wire::Mode::exact ? "exact" : "partial");
    return {};
}

// ---- buffer type
// -----------------------------------------------------------------------------------------------------

const char* buffer_type_name(ggml_backend_buffer_type_t /*type*/) {
    return kName;
}

ggml_backend_buffer_t buffer_type_alloc(ggml_backend_buffer_type_t type, size_t size) {
    return guarded("loading", static_cast<ggml_backend_buffer_t>(nullptr), [&]() -> ggml_backend_buffer_t {
        // Size 0: llama.cpp only asks what would be possible.
        if (size > 0) {
            if (const Status status = connect(); !status) {
                log_error("{}", status.error().message);
                return nullptr;
            }
        }
        auto buffer = std::make_unique<Buffer>(size);
        if (buffer->base == nullptr) {
            log_error("no room for {} bytes of addresses; raise the limit of virtual memory (ulimit -v)", size);
            return nullptr;
        }
        return ggml_backend_buffer_init(type, kBufferInterface, buffer.release(), size);
    });
}

size_t buffer_type_alignment(ggml_backend_buffer_type_t /*type*/) {
    return kAlignment;
}

bool buffer_type_is_host(ggml_backend_buffer_type_t /*type*/) {
    return false;  // or llama.cpp would write weights into it directly
}

// ---- computing
// -------------------------------------------------------------------------------------------------------

Status check_rows(const ggml_tensor* t, ggml_type type) {
    if (t->type == type && t->data != nullptr && t->nb[0] == ggml_type_size(type)) { return {}; }
    return fail(ErrorKind::unsupported, "{}: expected rows of {}, got {}", ggml_get_name(t), ggml_type_name(type),
                ggml_type_name(t->type));
}

// What both kinds of work have in common. `rows`: {n_in, 1 or n_used, n_tokens}, `ids`: {n_used, n_tokens}.
Result<Work> make_work(std::uint32_t layer, const ggml_tensor* rows, const ggml_tensor* ids, const ggml_tensor* out) {
    LINKCPP_CHECK(g_plugin->check->verified(layer));
    LINKCPP_CHECK(check_rows(rows, GGML_TYPE_F32));
    LINKCPP_CHECK(check_rows(ids, GGML_TYPE_I32));
    if (!ggml_is_contiguous(out) || out->type != GGML_TYPE_F32) {
        return fail(ErrorKind::unsupported, "{}: expected a contiguous result of f32", ggml_get_name(out));
    }
    return Work{.layer = layer,
                .n_in = static_cast<std::uint32_t>(rows->ne[0]),
                .n_out = static_cast<std::uint32_t>(out->ne[0]),
                .n_tokens = static_cast<std::uint32_t>(rows->ne[2]),
                .n_used = static_cast<std::uint32_t>(ids->ne[0]),
                .rows = static_cast<const float*>(rows->data),
                .token_stride = rows->nb[2] / sizeof(float),
                .slot_stride = rows->ne[1] == 1 ? 0 : rows->nb[1] / sizeof(float),
                .ids = static_cast<const std::int32_t*>(ids->data),
                .ids_stride = ids->nb[1] / sizeof(std::int32_t)};
}

std::span<float> numbers_of(ggml_tensor* tensor) {
    return {static_cast<float*>(tensor->data), static_cast<std::size_t>(ggml_nelements(tensor))};
}

// `computed`: gains the nodes behind the block that are done with it.
Status compute_block(const Block& block, std::vector<const ggml_tensor*>& computed) {
    LINKCPP_TRY(Work work, make_work(block.layer, block.rows, block.ids, block.out));
    if (work.n_tokens == 0) { return {}; }
    Dispatcher& dispatcher = g_plugin->dispatcher;
    const bool partial = dispatcher.options().mode == wire::Mode::partial && block.weights != nullptr &&
                         block.weights->nb[1] == sizeof(float) && ggml_is_contiguous(block.sum);
    if (!partial) { return dispatcher.compute_rows(work, numbers_of(block.out)); }
    work.weights = static_cast<const float*>(block.weights->data);
    work.weights_stride = block.weights->nb[2] / sizeof(float);
    work.n_summed = block.n_summed;
    computed.insert(computed.end(), block.sum_nodes.begin(), block.sum_nodes.end());
    return dispatcher.compute_sums(work, numbers_of(block.sum));
}

Status compute_node(ggml_tensor* node) {
    const auto product = parse_product(node, is_ours);
    if (!product) { return g_plugin->cpu_nodes.compute(node); }
    LINKCPP_TRY(Work work, make_work(product->layer, node->src[1], node->src[2], node));
    if (work.n_tokens == 0) { return {}; }
    work.product = product->role;
    return g_plugin->dispatcher.compute_rows(work, numbers_of(node));
}

Status compute_graph(ggml_cgraph* graph) {
    if (!g_plugin->finder) { return fail(ErrorKind::invalid, "no model has been loaded"); }
    const Plan plan = g_plugin->finder->plan(graph, is_ours);
    for (const auto& [layer, nodes] : plan.unknown) { g_plugin->dispatcher.note_unknown(layer, nodes); }
    std::vector<const ggml_tensor*> computed;
    for (const Step& step : plan.steps) {
        if (step.block) {
            LINKCPP_CHECK(compute_block(*step.block, computed));
        } else if (std::ranges::find(computed, step.node) == computed.end()) {
            LINKCPP_CHECK(compute_node(step.node));
        }
    }
    return {};
}

ggml_status backend_graph_compute(ggml_backend_t /*backend*/, ggml_cgraph* graph) {
    return guarded("computing", GGML_STATUS_FAILED, [&] {
        const Status status = compute_graph(graph);
        if (status) { return GGML_STATUS_SUCCESS; }
        log_error("{}", status.error().message);
        return GGML_STATUS_FAILED;
    });
}

const char* backend_name(ggml_backend_t /*backend*/) {
    return kName;
}

void backend_free(ggml_backend_t backend) {
    delete backend;
}

constexpr ggml_backend_i kBackendInterface = {
    .get_name = backend_name,
    .free = backend_free,
    .set_tensor_async = nullptr,
    .get_tensor_async = nullptr,
    .set_tensor_2d_async = nullptr,
    .get_tensor_2d_async = nullptr,
    .cpy_tensor_async = nullptr,
    .synchronize = nullptr,
    .graph_plan_create = nullptr,
    .graph_plan_free = nullptr,
    .graph_plan_update = nullptr,
    .graph_plan_compute = nullptr,
    .graph_compute = backend_graph_compute,
    .event_record = nullptr,
    .event_wait = nullptr,
    .graph_optimize = nullptr,
};

// ---- device
// ----------------------------------------------------------------------------------------------------------

// Layers cannot be put there: --device and -dev split names at ',' and '/', so nobody can give this one.
const char* device_name(ggml_backend_dev_t /*device*/) {
    return "Swarm (experts only, not for --device/-dev)";
}

const char* device_description(ggml_backend_dev_t /*device*/) {
    return "routed experts on a linkcpp swarm";
}

void device_memory(ggml_backend_dev_t /*device*/, size_t* free, size_t* total) {
    *free = 0;  // nothing of this machine's
    *total = 0;
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t /*device*/) {
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;  // llama.cpp puts such buffer types first in the list of the CPU's layers
}

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
    std::memset(props, 0, sizeof *props);
    props->name = device_name(device);
    props->description = device_description(device);
    props->type = device_type(device);
}

ggml_guid* guid() {
    static ggml_guid value = {0x6c, 0x69, 0x6e, 0x6b, 0x63, 0x70, 0x70, 0x2d,
                              0x73, 0x77, 0x61, 0x72, 0x6d, 0x2d, 0x30, 0x31};
    return &value;
}

ggml_backend_t device_init(ggml_backend_dev_t device, const char* /*params*/) {
    return guarded("starting", static_cast<ggml_backend_t>(nullptr),
                   [&] { return new ggml_backend{guid(), kBackendInterface, device, nullptr}; });
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t /*device*/) {
    return &g_plugin->buffer_type;
}

// llama.cpp asks where to put a weight by an operation on nothing but tensors that are not there yet.
bool is_question(const ggml_tensor* op) {
    return std::ranges::all_of(op->src, [](const ggml_tensor* src) {
        return src == nullptr || (src->op == GGML_OP_NONE && src->data == nullptr);
    });
}

// Another model's experts stay out, where that is what the user wants.
bool is_wanted(const ggml_tensor* op) {
    if (!g_plugin->settings.other_models_here || !g_plugin->loaded.load(std::memory_order_acquire)) { return true; }
    return std::ranges::all_of(op->src, [](const ggml_tensor* src) {
        return src == nullptr || !is_ours(src) || g_plugin->check->claims(src);
    });
}

bool device_supports_op(ggml_backend_dev_t /*device*/, const ggml_tensor* op) {
    switch (op->op) {
        case GGML_OP_NONE:
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE: return true;
        default:
            return guarded("planning", false,
                           [&] { return belongs_to_block(op, is_ours) && (!is_question(op) || is_wanted(op)); });
    }
}

bool device_supports_buffer_type(ggml_backend_dev_t /*device*/, ggml_backend_buffer_type_t type) {
    return type == &g_plugin->buffer_type || ggml_backend_buft_is_host(type);
}

constexpr ggml_backend_device_i kDeviceInterface = {
    .get_name = device_name,
    .get_description = device_description,
    .get_memory = device_memory,
    .get_type = device_type,
    .get_props = device_props,
    .init_backend = device_init,
    .get_buffer_type = device_buffer_type,
    .get_host_buffer_type = nullptr,
    .buffer_from_host_ptr = nullptr,
    .supports_op = device_supports_op,
    .supports_buft = device_supports_buffer_type,
    .offload_op = nullptr,
    .event_new = nullptr,
    .event_free = nullptr,
    .event_synchronize = nullptr,
};

// ---- registry
// --------------------------------------------------------------------------------------------------------

const char* registry_name(ggml_backend_reg_t /*registry*/) {
    return kName;
}

// Without a hub the program runs as if the plugin were not there.
size_t registry_device_count(ggml_backend_reg_t /*registry*/) {
    return g_plugin->settings.active ? 1 : 0;
}

// ggml has checked the plugin's API version by now: tell whoever started this program that the plugin is in it.
void check_in() {
    const char* text = std::getenv("LINKCPP_CHECK_IN_FD");
    if (text == nullptr) { return; }
    const int fd = std::atoi(text);
    const char byte = 1;
    if (fd > 2 && ::write(fd, &byte, 1) == 1) { ::close(fd); }
    ::unsetenv("LINKCPP_CHECK_IN_FD");
}

ggml_backend_dev_t registry_device(ggml_backend_reg_t /*registry*/, size_t /*index*/) {
    check_in();
    return &g_plugin->device;
}

constexpr ggml_backend_reg_i kRegistryInterface = {
    .get_name = registry_name,
    .get_device_count = registry_device_count,
    .get_device = registry_device,
    .get_proc_address = nullptr,
};

constexpr ggml_backend_buffer_type_i kBufferTypeInterface = {
    .get_name = buffer_type_name,
    .alloc_buffer = buffer_type_alloc,
    .get_alignment = buffer_type_alignment,
    .get_max_size = nullptr,
    .get_alloc_size = nullptr,
    .is_host = buffer_type_is_host,
};

#ifndef LINKCPP_PLUGIN_API_VERSION
#define LINKCPP_PLUGIN_API_VERSION GGML_BACKEND_API_VERSION  // tests build one that is out of date
#endif

// -sm tensor makes one device of all that are not a CPU, and ends the process when one of them has no room for layers.
bool splits_tensors() {
    if (const char* mode = std::getenv("LLAMA_ARG_SPLIT_MODE"); mode != nullptr && std::string_view(mode) == "tensor") {
        return true;
    }
    const std::vector<std::string> arguments = command_line();
    for (std::size_t i = 0; i + 1 < arguments.size(); ++i) {
        if ((arguments[i] == "-sm" || arguments[i] == "--split-mode") && arguments[i + 1].contains("tensor")) {
            return true;
        }
    }
    return false;
}

void make_plugin() {
    open_standard_streams();
    set_log_name("linkcpp");
    auto settings = read_settings();
    if (!settings) {
        log_error("{}", settings.error().message);
        Settings refused;
        refused.active = true;
        g_plugin = new Plugin(refused);
        g_plugin->broken = true;
    } else {
        g_plugin = new Plugin(*std::move(settings));
        if (!g_plugin->settings.active) {
            log_info("LINKCPP_HUB is not set: the swarm plugin is loaded and does nothing");
        }
    }
    if (g_plugin->settings.active && splits_tensors()) {
        log_error("llama.cpp's split mode 'tensor' cannot be used with experts on a swarm: the plugin does nothing");
        g_plugin->settings.active = false;
    }
    g_plugin->registry = {LINKCPP_PLUGIN_API_VERSION, kRegistryInterface, nullptr};
    g_plugin->device = {kDeviceInterface, &g_plugin->registry, nullptr};
    g_plugin->buffer_type = {kBufferTypeInterface, &g_plugin->device, nullptr};
}

}  // namespace

ggml_backend_reg* swarm_registry() {
    static std::once_flag once;
    return guarded("starting", static_cast<ggml_backend_reg*>(nullptr), [] {
        std::call_once(once, make_plugin);
        return &g_plugin->registry;
    });
}

}  // namespace linkcpp::coordinator
