#include "hub/admission.h"

#include <set>

#include <gtest/gtest.h>

#include "base/clock.h"
#include "model/synth.h"
#include "trust/test_layer.h"

namespace linkcpp::hub {
namespace {

using namespace std::chrono_literals;
namespace fb = wire::fb;

constexpr std::int64_t kWall = 1'000'000;

// A model of two kinds of layers, three of each, and workers of which admission is told all that a hub would tell it.
class AdmissionTest : public testing::Test {
  protected:
    AdmissionTest() {
        model::MoeLayer layer = layer_.shard.layer;
        for (std::uint32_t i = 0; i < 6; ++i) {
            layer.layer = i;
            manifest_.model.layers.push_back(layer);
            manifest_.slices.emplace_back(layer.n_expert);
        }
        for (std::size_t i = 1; i < 6; i += 2) { manifest_.model.layers[i].tensors.back().type = GGML_TYPE_Q5_0; }
        swarm_ = std::make_unique<Swarm>(manifest_, Digest{}, Swarm::Options{});
        admission_ = std::make_unique<Admission>(manifest_.model, Admission::Options{}, 5);
    }
    void join(const std::string& id) {
        fb::HelloT hello;
        hello.name = id;
        hello.memory_bytes = 1u << 30;
        swarm_->joined(id, hello, clock_.now());
        swarm_->reported(id, fb::ShardT(), clock_.now());
        admission_->joined(id, id);
    }
    void load(const std::string& id) {
        clock_.advance(1s);
        swarm_->replan(clock_.now());
        fb::ShardT shard;
        shard.state = fb::ShardState::ready;
        shard.epoch = epoch(id);
        swarm_->reported(id, shard, clock_.now());
    }
    std::uint32_t epoch(const std::string& id) const { return swarm_->workers().at(id).epoch; }
    std::vector<std::pair<std::string, fb::ProbeT>> due() { return admission_->due(*swarm_, clock_.now()); }

    // What a worker answers, whatever the numbers are.
    std::optional<ProbeAnswer> answer(const std::string& id, const fb::ProbeT& probe, Admission::Change& change) {
        const model::MoeLayer& layer = *manifest_.model.find(probe.layer);
        const auto input = trust::make_input(layer, probe.experts, probe.seed, probe.n_tokens).value();
        std::optional<ProbeAnswer> complete;
        for (const trust::Part part : trust::parts_of(layer)) {
            EXPECT_FALSE(complete);
            const trust::PartShape shape = trust::shape_of(part, layer, input);
            fb::ProbeRowsT rows;
            rows.sequence = probe.sequence;
            rows.part = static_cast<std::uint8_t>(part);
            rows.rows.resize(shape.n * shape.n_rows);
            complete = admission_->received(id, rows, kWall, change);
        }
        return complete;
    }
    Admission::Change judged(const std::string& id, const fb::ProbeT& probe, bool passed) {
        Admission::Change change;
        EXPECT_TRUE(answer(id, probe, change));
        trust::Findings findings;
        findings.parts[trust::Part::batch].n_rows = 3;
        findings.parts[trust::Part::batch].n_wrong = passed ? 0 : 1;
        return admission_->judged(id, probe.sequence, findings, clock_.now(), kWall);
    }
    // Lets a worker pass all that is asked of it until it is admitted.
    Admission::Change pass(const std::string& id) {
        Admission::Change change;
        while (change.outcome == Admission::Outcome::pending) {
            const auto probes = due();
            if (probes.empty()) { break; }
            for (const auto& [worker, probe] : probes) {
                EXPECT_EQ(worker, id);
                change = judged(worker, probe, true);
            }
        }
        return change;
    }
    void admit(const std::string& id) {
        join(id);
        load(id);
        const Admission::Change change = pass(id);
        ASSERT_EQ(change.outcome, Admission::Outcome::admitted);
        ASSERT_TRUE(swarm_->admitted(id, change.epoch));
    }

    trust::testing::TestLayer layer_{trust::testing::TestLayer::small(GGML_TYPE_Q8_0)};
    model::Manifest manifest_;
    FakeClock clock_;
    std::unique_ptr<Swarm> swarm_;
    std::unique_ptr<Admission> admission_;
};

TEST_F(AdmissionTest, a_worker_is_probed_with_each_kind_of_layer_that_it_has_loaded_and_then_admitted) {
    join("a");
    EXPECT_TRUE(due().empty()) << "it holds nothing yet";
    load("a");
    std::set<std::uint32_t> kinds;
    Admission::Change change;
    for (int i = 0; i < 2; ++i) {
        const auto probes = due();
        ASSERT_EQ(probes.size(), 1u);
        EXPECT_TRUE(due().empty()) << "one at a time";
        kinds.insert(probes[0].second.layer % 2);
        EXPECT_EQ(change.outcome, Admission::Outcome::pending);
        change = judged("a", probes[0].second, true);
    }
    EXPECT_EQ(kinds.size(), 2u);
    EXPECT_EQ(change.outcome, Admission::Outcome::admitted);
    EXPECT_EQ(change.epoch, epoch("a"));
    EXPECT_EQ(admission_->records().at("a").trust, Trust::admitted);
    EXPECT_GT(plan::count(admission_->records().at("a").probed), 0u);
}

TEST_F(AdmissionTest, it_is_probed_again_at_intervals_until_every_slice_was_looked_at) {
    admit("a");
    EXPECT_TRUE(due().empty());
    EXPECT_EQ(admission_->next(clock_.now()), clock_.now() + 2min);
    std::set<std::uint64_t> seeds;
    for (int i = 0; i < 6; ++i) {
        clock_.advance(2min);
        const auto probes = due();
        ASSERT_EQ(probes.size(), 1u);
        seeds.insert(probes[0].second.seed);
        EXPECT_EQ(judged("a", probes[0].second, true).outcome, Admission::Outcome::pending);
    }
    EXPECT_EQ(seeds.size(), 6u) << "the same input again says nothing new";
    EXPECT_EQ(plan::count(admission_->records().at("a").probed), swarm_->total_slices());
}

TEST_F(AdmissionTest, it_is_probed_again_when_it_is_back_and_when_it_has_loaded_more) {
    admit("a");
    admission_->left("a");
    swarm_->left("a", clock_.now());
    EXPECT_EQ(admission_->records().at("a").trust, Trust::unproven);
    admit("a");
    join("b");
    load("b");
    ASSERT_EQ(pass("b").outcome, Admission::Outcome::admitted);
    swarm_->admitted("b", epoch("b"));
    load("a");  // gives half away
    swarm_->admitted("a", epoch("a"));
    swarm_->said_goodbye("b", clock_.now());
    admission_->left("b");
    load("a");
    const auto probes = due();
    ASSERT_EQ(probes.size(), 1u) << "it has loaded what b had";
    const plan::Holdings fresh = swarm_->unproven(swarm_->workers().at("a"));
    for (const std::uint16_t expert : probes[0].second.experts) { EXPECT_TRUE(fresh[probes[0].second.layer][expert]); }
}

TEST_F(AdmissionTest, wrong_rows_put_it_in_quarantine_until_it_is_cleared) {
    admit("a");
    clock_.advance(2min);
    const auto probes = due();
    ASSERT_EQ(probes.size(), 1u);
    const Admission::Change change = judged("a", probes[0].second, false);
    EXPECT_EQ(change.outcome, Admission::Outcome::wrong);
    EXPECT_NE(change.why.find("1 row of 3 wrong"), std::string::npos) << change.why;
    EXPECT_TRUE(admission_->is_quarantined("a"));
    EXPECT_EQ(admission_->records().at("a").in_doubt_since, kWall);
    EXPECT_FALSE(admission_->quarantine("a", "again", kWall)) << "the first reason stays";
    admission_->left("a");
    admission_->joined("a", "a");
    EXPECT_TRUE(admission_->is_quarantined("a")) << "coming back does not help";
    EXPECT_FALSE(admission_->clear("b", kWall));
    EXPECT_EQ(admission_->clear("a", kWall).value(), "a");
    EXPECT_FALSE(admission_->is_quarantined("a"));
    EXPECT_FALSE(admission_->clear("a", kWall));
}

TEST_F(AdmissionTest, of_several_that_fit_a_name_none_is_cleared) {
    for (const char* id : {"abcdef1", "abcdef2"}) {
        admission_->joined(id, "phone");
        ASSERT_TRUE(admission_->quarantine(id, "wrong", kWall));
    }
    EXPECT_EQ(admission_->clear("phone", kWall).error().kind, ErrorKind::invalid);
    EXPECT_EQ(admission_->clear("abcdef", kWall).error().kind, ErrorKind::invalid);
    EXPECT_EQ(admission_->clear("abcde", kWall).error().kind, ErrorKind::not_found) << "a slip of the finger";
    EXPECT_FALSE(admission_->clear("", kWall));
    EXPECT_EQ(admission_->clear("abcdef2", kWall).value(), "abcdef2");
    EXPECT_EQ(admission_->clear("phone", kWall).value(), "abcdef1");
}

TEST_F(AdmissionTest, an_error_nonsense_or_silence_is_no_answer) {
    const auto refused = [&](const std::function<void(fb::ProbeRowsT&)>& change_rows) {
        join("a");
        load("a");
        const auto probes = due();
        fb::ProbeRowsT rows;
        rows.sequence = probes.at(0).second.sequence;
        rows.part = static_cast<std::uint8_t>(trust::Part::sums);
        change_rows(rows);
        Admission::Change change;
        EXPECT_FALSE(admission_->received("a", rows, kWall, change));
        return change;
    };
    EXPECT_EQ(refused([](fb::ProbeRowsT& rows) { rows.error = "no such expert"; }).outcome, Admission::Outcome::failed);
    EXPECT_EQ(refused([](fb::ProbeRowsT& rows) { rows.rows.resize(7); }).outcome, Admission::Outcome::failed);
    EXPECT_EQ(refused([](fb::ProbeRowsT& rows) { rows.part = 99; }).outcome, Admission::Outcome::failed);
    EXPECT_EQ(refused([](fb::ProbeRowsT& rows) { ++rows.sequence; }).outcome, Admission::Outcome::pending)
        << "an answer to another question is none";
    EXPECT_TRUE(admission_->overdue(clock_.now()).empty());
    clock_.advance(3min);
    const auto overdue = admission_->overdue(clock_.now());
    ASSERT_EQ(overdue.size(), 1u);
    EXPECT_EQ(overdue[0].outcome, Admission::Outcome::failed);
    EXPECT_FALSE(admission_->is_quarantined("a")) << "to say nothing is not to lie";
}

TEST_F(AdmissionTest, what_was_asked_about_an_old_assignment_counts_no_more) {
    join("a");
    join("b");
    load("a");
    const auto probes = due();
    ASSERT_EQ(probes.size(), 1u);
    swarm_->said_goodbye("b", clock_.now());
    load("a");
    due();
    const Admission::Change change =
        admission_->judged("a", probes[0].second.sequence, trust::Findings{}, clock_.now(), kWall);
    EXPECT_EQ(change.outcome, Admission::Outcome::pending);
    EXPECT_TRUE(change.worker.empty());
}

TEST_F(AdmissionTest, a_judgement_that_fails_is_not_the_workers_fault) {
    const auto fail_to_judge = [&](const std::string& id, const fb::ProbeT& probe) {
        Admission::Change change;
        EXPECT_TRUE(answer(id, probe, change));
        return admission_->judged(id, probe.sequence, fail(ErrorKind::corrupt, "the file has changed"), clock_.now(),
                                  kWall);
    };
    admit("a");
    clock_.advance(2min);
    EXPECT_EQ(fail_to_judge("a", due().at(0).second).outcome, Admission::Outcome::pending);
    EXPECT_EQ(admission_->records().at("a").trust, Trust::admitted);
    EXPECT_EQ(swarm_->missing_slices(), 0u);
    EXPECT_TRUE(due().empty());
    clock_.advance(2min);
    EXPECT_EQ(judged("a", due().at(0).second, true).outcome, Admission::Outcome::pending);

    swarm_->said_goodbye("a", clock_.now());
    admission_->left("a");
    join("b");
    load("b");
    EXPECT_EQ(fail_to_judge("b", due().at(0).second).outcome, Admission::Outcome::pending);
    EXPECT_TRUE(due().empty()) << "not again at once";
    clock_.advance(2min);
    EXPECT_EQ(pass("b").outcome, Admission::Outcome::admitted);
}

TEST_F(AdmissionTest, one_that_is_away_is_in_quarantine_when_it_comes) {
    EXPECT_TRUE(admission_->quarantine("a", "an audit", kWall));
    join("a");
    EXPECT_TRUE(admission_->is_quarantined("a"));
    EXPECT_EQ(admission_->records().at("a").name, "a");
}

TEST_F(AdmissionTest, those_in_quarantine_are_known_to_the_next_hub) {
    std::map<std::string, TrustRecord> kept;
    kept["a"].name = "phone";
    kept["a"].trust = Trust::quarantined;
    kept["a"].why = "wrong";
    kept["b"].name = "laptop";
    kept["b"].served_since = kWall - 100;
    admission_->restore(kept);
    join("a");
    EXPECT_TRUE(admission_->is_quarantined("a"));
    EXPECT_EQ(admission_->records().at("a").why, "wrong");
    join("b");
    EXPECT_FALSE(admission_->is_quarantined("b"));
    EXPECT_TRUE(admission_->quarantine("b", "an audit", kWall));
    EXPECT_EQ(admission_->records().at("b").in_doubt_since, kWall - 100);
}

// Neither coming back, nor being cleared and found wrong again, makes it a worker that has never served.
TEST_F(AdmissionTest, all_that_a_key_has_ever_computed_is_in_doubt) {
    admit("a");
    admission_->left("a");
    join("a");
    load("a");
    EXPECT_TRUE(admission_->quarantine("a", "an audit", kWall + 50));
    EXPECT_EQ(admission_->records().at("a").in_doubt_since, kWall);
    ASSERT_TRUE(admission_->clear("a", kWall + 60));
    EXPECT_TRUE(admission_->quarantine("a", "the next probe", kWall + 61));
    EXPECT_EQ(admission_->records().at("a").in_doubt_since, kWall);
    admission_->joined("new", "new");
    EXPECT_TRUE(admission_->quarantine("new", "a probe", kWall));
    EXPECT_EQ(admission_->records().at("new").in_doubt_since, 0) << "never used";
}

}  // namespace
}  // namespace linkcpp::hub
