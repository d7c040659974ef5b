#include "expert/engine.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <random>

#include <fcntl.h>
#include <gtest/gtest.h>

#include "base/file.h"
#include "base/platform.h"
#include "expert/half.h"
#include "expert/metrics.h"
#include "expert/reference.h"
#include "model/manifest.h"
#include "model/synth.h"
#include "model/test_model.h"

namespace {

// While it lives ggml finds no memory for large buffers.
class OutOfMemory {
  public:
    OutOfMemory() { now = true; }
    ~OutOfMemory() { now = false; }
    OutOfMemory(const OutOfMemory&) = delete;
    OutOfMemory& operator=(const OutOfMemory&) = delete;

    static inline std::atomic<bool> now{false};
};

}  // namespace

// The one that ggml's buffers come from, in the place of the system's.
// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): the system's names are reserved ones
extern "C" __attribute__((visibility("default"))) int posix_memalign(void** place, std::size_t alignment,
                                                                     std::size_t n_bytes) noexcept {
    if (OutOfMemory::now && n_bytes > 100'000) { return ENOMEM; }
    *place = std::aligned_alloc(alignment, (n_bytes + alignment - 1) / alignment * alignment);
    return *place != nullptr ? 0 : ENOMEM;
}

namespace linkcpp::expert {
namespace {

struct Shape {
    const char* name;
    ggml_type type;
    bool merged;
    // How far the device may be from double precision: its kernels round the activations to the type they multiply by
    // (8 bits a value for quantised weights, 16 for F16). For K-quants, whose blocks of 256 values share one scale,
    // cosines of 0.9998 were published for such experts (NMSE 4e-4).
    double tolerance;
};

void PrintTo(const Shape& shape, std::ostream* out) {
    *out << shape.name;
}

// A layer of 8 experts, n_embd 512, n_ff 256, from a real file, on the CPU.
class EngineTest : public testing::TestWithParam<Shape> {
  protected:
    void SetUp() override {
        model::SynthOptions options;
        options.n_layer = 1;
        options.n_expert = kExperts;
        options.n_embd = kEmbd;
        options.n_ff = 256;
        options.gate_type = options.up_type = options.down_type = GetParam().type;
        options.experts_only = true;
        options.merged_gate_up = GetParam().merged;
        if (options.merged_gate_up) { options.architecture = "qwen35moe"; }
        ASSERT_TRUE(model::write_synthetic_model(options, folder_ / "m.gguf"));
        file_ = std::make_unique<model::GgufFile>(model::GgufFile::open(folder_ / "m.gguf").value());
        layer_ = model::read_moe(*file_)->layers.at(0);
        load_backends();
        const auto devices = expert::devices();
        engine_ = Engine::open(choose_device(devices, "CPU").value(), 2).value();
        hold(*engine_, {0, 1, 2, 3, 4, 5, 6, 7});
        std::mt19937 random(5);
        std::normal_distribution<float> normal;
        rows_.resize(kRows * kEmbd);
        std::ranges::generate(rows_, [&] { return normal(random); });
    }

    void hold(Engine& engine, const std::vector<std::uint16_t>& experts) {
        const auto source = [&](std::uint32_t, std::uint32_t e, std::span<std::byte> to) -> Status {
            LINKCPP_TRY(const Bytes slice, model::read_slice(*file_, layer_, e));
            EXPECT_EQ(slice.size(), to.size());
            std::ranges::copy(slice, to.begin());
            return {};
        };
        const Status status = engine.hold(kModel, layer_, experts, source);
        ASSERT_TRUE(status) << status.error().message;
    }

    static Batch batch(std::uint32_t layer, std::span<const float> rows, std::span<const Pair> pairs) {
        return {kModel, layer, kEmbd, rows, pairs, {}};
    }

    std::vector<float> compute(std::span<const float> rows, const std::vector<Pair>& pairs) {
        std::vector<float> out(pairs.size() * kEmbd);
        const Status status = engine_->compute_rows(batch(0, rows, pairs), out);
        EXPECT_TRUE(status) << status.error().message;
        return out;
    }

    static constexpr std::uint64_t kModel = 0x1234;
    static constexpr std::uint32_t kExperts = 8;
    static constexpr std::size_t kEmbd = 512;
    static constexpr std::size_t kRows = 17;
    TestFolder folder_;
    std::unique_ptr<model::GgufFile> file_;
    model::MoeLayer layer_;
    std::unique_ptr<Engine> engine_;
    std::vector<float> rows_;
};

INSTANTIATE_TEST_SUITE_P(
    Types, EngineTest,
    testing::Values(Shape{"F32", GGML_TYPE_F32, false, 1e-9}, Shape{"F16", GGML_TYPE_F16, false, 1e-5},
                    Shape{"Q8_0", GGML_TYPE_Q8_0, false, 2e-4}, Shape{"Q4_K", GGML_TYPE_Q4_K, false, 1e-3},
                    Shape{"Q6_K", GGML_TYPE_Q6_K, false, 1e-3}, Shape{"Q8_0_merged", GGML_TYPE_Q8_0, true, 2e-4}),
    [](const auto& param) { return std::string(param.param.name); });

TEST_P(EngineTest, computes_the_same_from_slices_that_are_mapped) {
    const std::vector<Pair> pairs{{0, 7, 0}, {1, 0, 0}, {2, 3, 0}, {2, 5, 0}};
    const std::vector<float> copied = compute(rows_, pairs);
    const std::uintptr_t page = page_bytes();
    const auto map = [&](std::uint32_t, std::uint32_t e, std::span<std::byte> to) -> Status {
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(to.data()) % page, 0u);
        const UniqueFd fd(::open((folder_ / fmt::format("slice-{}", e)).c_str(), O_RDONLY));
        return map_file(fd.get(), to);
    };
    for (std::uint16_t e = 0; e < kExperts; ++e) {
        folder_.write(fmt::format("slice-{}", e), model::read_slice(*file_, layer_, e).value());
    }
    const Status held = engine_->hold_mapped(kModel, layer_, std::vector<std::uint16_t>{0, 3, 5, 7}, map, 2);
    ASSERT_TRUE(held) << held.error().message;
    EXPECT_EQ(compute(rows_, pairs), copied);
    Bytes again(layer_.slice_bytes());
    ASSERT_TRUE(engine_->read(kModel, layer_.layer, 5, again));
    EXPECT_EQ(again, model::read_slice(*file_, layer_, 5).value());
    EXPECT_EQ(engine_->read(kModel, layer_.layer, 6, again).error().kind, ErrorKind::not_found);
    EXPECT_EQ(engine_->read(kModel + 1, layer_.layer, 5, again).error().kind, ErrorKind::not_found);
}

TEST_P(EngineTest, agrees_with_double_precision_on_every_expert) {
    for (std::uint16_t e = 0; e < kExperts; ++e) {
        const auto reference = ReferenceExpert::make(layer_, model::read_slice(*file_, layer_, e).value()).value();
        const std::vector<double> h(rows_.begin(), rows_.begin() + kEmbd);
        std::vector<double> expected(kEmbd);
        reference.compute(h, expected);
        const std::vector<float> got = compute(std::span(rows_).first(kEmbd), {{0, e, 0}});
        const std::vector<double> got_double(got.begin(), got.end());
        const auto difference = compare(std::span<const double>(got_double), std::span<const double>(expected));
        ASSERT_TRUE(difference);
        EXPECT_LT(difference->nmse, GetParam().tolerance) << "expert " << e;
    }
}

TEST_P(EngineTest, a_pair_has_the_same_bits_however_it_is_batched) {
    std::vector<Pair> pairs;  // ragged: row r has 1 + r % 3 pairs
    for (std::uint16_t r = 0; r < kRows; ++r) {
        for (std::uint16_t k = 0; k <= r % 3; ++k) {
            pairs.push_back({r, static_cast<std::uint16_t>((r + 3 * k) % kExperts), 0});
        }
    }
    const std::vector<float> together = compute(rows_, pairs);
    for (std::size_t i = 0; i < pairs.size(); ++i) {
        const std::vector<float> alone =
            compute(std::span(rows_).subspan(pairs[i].row * kEmbd, kEmbd), {{0, pairs[i].expert, 0}});
        EXPECT_TRUE(std::ranges::equal(alone, std::span(together).subspan(i * kEmbd, kEmbd))) << "pair " << i;
    }
    const std::vector<float> all_of_one = compute(std::span(rows_).first(kEmbd), {{0, 7, 0}, {0, 2, 0}, {0, 5, 0}});
    const std::vector<float> five = compute(std::span(rows_).first(kEmbd), {{0, 5, 0}});
    EXPECT_TRUE(std::ranges::equal(five, std::span(all_of_one).subspan(2 * kEmbd)));
}

TEST_P(EngineTest, a_shard_of_some_experts_computes_what_the_whole_layer_does) {
    const std::vector<float> whole = compute(rows_, {{0, 6, 0}, {1, 1, 0}, {16, 6, 0}});
    hold(*engine_, {1, 6});
    EXPECT_TRUE(engine_->holds(0, 6));
    EXPECT_FALSE(engine_->holds(0, 0));
    EXPECT_EQ(engine_->shard_bytes(), 2 * layer_.slice_bytes());
    EXPECT_EQ(compute(rows_, {{0, 6, 0}, {1, 1, 0}, {16, 6, 0}}), whole);
}

TEST_P(EngineTest, a_request_without_memory_fails_alone_and_those_after_it_are_right) {
    const auto row = std::span(rows_).first(kEmbd);
    const std::vector<Pair> one{{0, 5, 0}};
    const std::vector<float> expected = compute(row, one);  // its graph is kept
    for (const std::size_t n_pairs : {std::size_t{4} * kExperts, kRows * kExperts}) {
        std::vector<Pair> many;
        for (std::size_t i = 0; i < n_pairs; ++i) {
            many.push_back({static_cast<std::uint16_t>(i / kExperts), static_cast<std::uint16_t>(i % kExperts), 0});
        }
        std::vector<float> out(many.size() * kEmbd);
        const auto rows = std::span(rows_).first((n_pairs + kExperts - 1) / kExperts * kEmbd);
        {
            const OutOfMemory none;
            const Status status = engine_->compute_rows(batch(0, rows, many), out);
            ASSERT_FALSE(status) << n_pairs;
            EXPECT_EQ(status.error().kind, ErrorKind::overloaded) << status.error().message;
        }
        EXPECT_EQ(compute(row, one), expected);
        EXPECT_TRUE(engine_->compute_rows(batch(0, rows, many), out));
        EXPECT_TRUE(std::ranges::equal(std::span(out).subspan(5 * kEmbd, kEmbd), expected));
    }
}

TEST_P(EngineTest, sums_are_the_weighted_rows) {
    const std::vector<Pair> pairs{{0, 1, 0.5f}, {0, 4, -2.0f}, {1, 4, 1.0f}};
    const std::vector<float> rows = compute(std::span(rows_).first(2 * kEmbd), pairs);
    std::vector<float> sums(2 * kEmbd);
    ASSERT_TRUE(engine_->compute_sums(batch(0, std::span(rows_).first(2 * kEmbd), pairs), sums));
    for (std::size_t j = 0; j < kEmbd; ++j) {
        const float first = rows[j] * 0.5f;
        EXPECT_EQ(sums[j], first + rows[kEmbd + j] * -2.0f);
        EXPECT_EQ(sums[kEmbd + j], rows[2 * kEmbd + j]);
    }
}

TEST_P(EngineTest, what_is_not_held_is_not_found) {
    hold(*engine_, {1, 6});
    std::vector<float> out(kEmbd);
    const auto one_row = std::span(rows_).first(kEmbd);
    EXPECT_EQ(engine_->compute_rows(batch(0, one_row, std::vector<Pair>{{0, 0, 0}}), out).error().kind,
              ErrorKind::not_found);
    EXPECT_EQ(engine_->compute_rows(batch(0, one_row, std::vector<Pair>{{0, 60000, 0}}), out).error().kind,
              ErrorKind::not_found);
    EXPECT_EQ(engine_->compute_rows(batch(1, one_row, std::vector<Pair>{{0, 1, 0}}), out).error().kind,
              ErrorKind::not_found);
}

TEST_P(EngineTest, a_layer_of_another_model_is_never_computed_with) {
    std::vector<float> out(kEmbd);
    const std::vector<Pair> one{{0, 1, 0}};
    Batch other = batch(0, std::span(rows_).first(kEmbd), one);
    other.model = kModel + 1;
    EXPECT_EQ(engine_->compute_rows(other, out).error().kind, ErrorKind::unsupported);
    EXPECT_EQ(engine_->compute_sums(other, out).error().kind, ErrorKind::unsupported);
}

TEST_P(EngineTest, sizes_that_do_not_fit_are_invalid) {
    std::vector<float> out(kEmbd);
    const std::vector<Pair> one{{0, 1, 0}};
    Batch wide = batch(0, std::span(rows_).first(2 * kEmbd), one);
    wide.n_in = 2 * kEmbd;
    EXPECT_EQ(engine_->compute_sums(wide, std::span(rows_).first(2 * kEmbd)).error().kind, ErrorKind::invalid);
    EXPECT_EQ(engine_->compute_rows(batch(0, std::span(rows_).first(kEmbd - 1), one), out).error().kind,
              ErrorKind::invalid);
    EXPECT_EQ(engine_->compute_rows(batch(0, std::span(rows_).first(kEmbd), one), std::span(out).first(kEmbd / 2))
                  .error()
                  .kind,
              ErrorKind::invalid);
    EXPECT_EQ(
        engine_->compute_rows(batch(0, std::span(rows_).first(kEmbd), std::vector<Pair>{{1, 1, 0}}), out).error().kind,
        ErrorKind::invalid);
    EXPECT_EQ(engine_->compute_rows(batch(0, std::span(rows_).first(kEmbd), {}), {}).error().kind, ErrorKind::invalid);
}

TEST_P(EngineTest, a_source_that_fails_leaves_the_old_shard) {
    const std::vector<Pair> one{{0, 7, 0}};
    const std::vector<float> before = compute(std::span(rows_).first(kEmbd), one);
    const auto source = [](std::uint32_t, std::uint32_t e, std::span<std::byte> to) -> Status {
        std::ranges::fill(to, std::byte{1});
        if (e == 1) { return fail(ErrorKind::corrupt, "no more"); }
        return {};
    };
    const Status status = engine_->hold(kModel, layer_, std::vector<std::uint16_t>{0, 1}, source);
    EXPECT_EQ(status.error().kind, ErrorKind::corrupt);
    EXPECT_EQ(compute(std::span(rows_).first(kEmbd), one), before);
}

// ---- devices
// ---------------------------------------------------------------------------------------------------------

Device fake(std::string name, enum ggml_backend_dev_type type) {
    return {.name = std::move(name), .type = type};
}

TEST(ChooseDevice, takes_the_first_that_is_not_a_cpu_whatever_it_calls_itself) {
    const auto cpu = fake("CPU", GGML_BACKEND_DEVICE_TYPE_CPU);
    const auto igpu = fake("Vulkan0", GGML_BACKEND_DEVICE_TYPE_ACCEL);
    const auto gpu = fake("CUDA0", GGML_BACKEND_DEVICE_TYPE_GPU);
    EXPECT_EQ(choose_device({cpu, igpu, gpu})->name, "Vulkan0");
    EXPECT_EQ(choose_device({cpu, gpu})->name, "CUDA0");
    EXPECT_EQ(choose_device({cpu})->name, "CPU");
    EXPECT_EQ(choose_device({cpu, igpu, gpu}, "cuda0")->name, "CUDA0");
    EXPECT_EQ(choose_device({cpu}, "CUDA0").error().kind, ErrorKind::not_found);
    EXPECT_EQ(choose_device({}).error().kind, ErrorKind::not_found);
}

TEST(Half, round_trips_at_any_alignment) {
    const std::vector<float> values{0, 1, -2.5f, 65504, 1e-3f};
    Bytes bytes(1 + 2 * values.size());
    floats_to_halves(values, std::span(bytes).subspan(1));
    std::vector<float> back(values.size());
    halves_to_floats(ByteView(bytes).subspan(1), back);
    EXPECT_EQ(back[2], -2.5f);
    EXPECT_EQ(back[3], 65504);
    EXPECT_NEAR(back[4], 1e-3, 1e-6);
}

// 8 experts × 97 pairs of 2 KiB: more than what a CPU computes in one stretch.
TEST_P(EngineTest, large_requests_come_back_in_stretches_that_part_no_expert) {
    std::vector<Pair> pairs;
    for (std::uint16_t e = 0; e < kExperts; ++e) {
        for (std::uint16_t i = 0; i < 97; ++i) {
            pairs.push_back({static_cast<std::uint16_t>((i + e) % kRows), e, 0.5f});
        }
    }
    std::vector<float> rows;
    std::vector<std::size_t> firsts;
    ASSERT_TRUE(engine_->compute(batch(0, rows_, pairs), [&](const RowPart& part) -> Status {
        EXPECT_EQ(part.first * kEmbd, rows.size());
        firsts.push_back(part.first);
        rows.insert(rows.end(), part.rows.begin(), part.rows.end());
        return {};
    }));
    ASSERT_EQ(rows.size(), pairs.size() * kEmbd);
    ASSERT_GT(firsts.size(), 1u);
    for (const std::size_t first : firsts) { EXPECT_EQ(first % 97, 0u); }
    for (std::uint16_t e = 0; e < kExperts; ++e) {
        const auto first = std::ptrdiff_t{e} * 97;
        const std::vector<float> alone = compute(rows_, {pairs.begin() + first, pairs.begin() + first + 97});
        EXPECT_TRUE(std::ranges::equal(alone, std::span(rows).subspan(kEmbd * 97 * e, kEmbd * 97))) << "expert " << e;
    }
    // Experts that do not stand together are computed in one go.
    std::ranges::sort(pairs, {}, &Pair::row);
    std::size_t stretches = 0;
    ASSERT_TRUE(engine_->compute(batch(0, rows_, pairs), [&](const RowPart&) -> Status {
        ++stretches;
        return {};
    }));
    EXPECT_EQ(stretches, 1u);
}

TEST_P(EngineTest, an_error_of_the_sink_ends_the_work) {
    const std::vector<Pair> pairs{{0, 1, 0}};
    const auto sink = [](const RowPart&) -> Status { return fail(ErrorKind::disconnected, "gone"); };
    EXPECT_EQ(engine_->compute(batch(0, std::span(rows_).first(kEmbd), pairs), sink).error().kind,
              ErrorKind::disconnected);
}

}  // namespace
}  // namespace linkcpp::expert
