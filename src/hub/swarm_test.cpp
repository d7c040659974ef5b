#include "hub/swarm.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "base/clock.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "hub/placement_file.h"

namespace linkcpp::hub {
namespace {

using namespace std::chrono_literals;
namespace fb = wire::fb;

constexpr std::uint64_t kSlice = 1000;

model::Manifest sample_manifest() {
    model::Manifest manifest;
    manifest.model.name = "sample";
    for (std::uint32_t l = 0; l < 3; ++l) {
        model::MoeLayer layer;
        layer.layer = l;
        layer.n_expert = 12;
        layer.tensors.push_back({.role = model::Role::down, .slab_bytes = kSlice});
        manifest.model.layers.push_back(layer);
        manifest.slices.emplace_back(12);
    }
    return manifest;
}

class SwarmTest : public testing::Test {
  protected:
    void join(const std::string& id, std::uint64_t memory = 1 << 20) {
        fb::HelloT hello;
        hello.role = fb::Role::worker;
        hello.name = id;
        hello.memory_bytes = memory;
        hello.token = "secret";
        swarm_.joined(id, hello, clock_.now());
        says(swarm_, id, {});
    }
    // The first that a worker says after it has joined: what it holds.
    void says(Swarm& swarm, const std::string& id, const plan::Holdings& held) {
        fb::ShardT shard;
        shard.state = fb::ShardState::ready;
        shard.epoch = 7;  // some hub's before this one
        shard.model_id = wire::encode_digest(sha256(as_bytes("model")));
        wire::SliceSet slices;
        for (std::uint32_t l = 0; l < held.size(); ++l) {
            slices.push_back({l, {}});
            for (std::uint16_t e = 0; e < held[l].size(); ++e) {
                if (held[l][e]) { slices.back().experts.push_back(e); }
            }
        }
        shard.held = wire::encode_slices(slices);
        swarm.reported(id, shard, clock_.now());
    }
    // Everything that workers would do: load what they are assigned, say so and show it, until nothing changes.
    void settle() {
        clock_.advance(1s);
        for (int i = 0; i < 10; ++i) {
            const auto changed = swarm_.replan(clock_.now());
            if (changed.empty()) { return; }
            for (const std::string& id : changed) { ready(id); }
        }
        FAIL() << "placement does not come to rest";
    }
    void ready(const std::string& id) {
        loaded(id);
        swarm_.admitted(id, swarm_.workers().at(id).epoch);
    }
    void loaded(const std::string& id) {
        fb::ShardT shard;
        shard.state = fb::ShardState::ready;
        shard.epoch = swarm_.workers().at(id).epoch;
        swarm_.reported(id, shard, clock_.now());
    }
    std::uint64_t slices(const std::string& id) const { return plan::count(swarm_.workers().at(id).ready); }

    model::Manifest manifest_ = sample_manifest();
    FakeClock clock_;
    Swarm swarm_{manifest_, sha256(as_bytes("model")), {}};
};

TEST_F(SwarmTest, three_workers_get_a_third_each) {
    for (const char* id : {"a", "b", "c"}) { join(id); }
    EXPECT_TRUE(swarm_.replan(clock_.now()).empty()) << "others may be about to join";
    settle();
    EXPECT_EQ(swarm_.missing_slices(), 0u);
    for (const char* id : {"a", "b", "c"}) { EXPECT_EQ(slices(id), 12u); }
    EXPECT_TRUE(swarm_.routes().complete);
    EXPECT_EQ(swarm_.routes().workers.size(), 3u);
}

TEST_F(SwarmTest, the_token_is_not_kept) {
    join("a");
    EXPECT_TRUE(swarm_.workers().at("a").hello.token.empty());
}

TEST_F(SwarmTest, a_newcomer_gets_its_share_and_coverage_never_breaks) {
    join("a");
    settle();
    EXPECT_EQ(slices("a"), 36u);
    join("b");
    clock_.advance(1s);
    EXPECT_EQ(swarm_.replan(clock_.now()), (std::vector<std::string>{"b"})) << "a keeps what b does not have yet";
    EXPECT_EQ(swarm_.missing_slices(), 0u);
    ready("b");
    EXPECT_EQ(swarm_.missing_slices(), 0u);
    EXPECT_EQ(swarm_.replan(clock_.now()), (std::vector<std::string>{"a"}));
    EXPECT_EQ(swarm_.missing_slices(), 0u);
    ready("a");
    EXPECT_EQ(slices("a"), 18u);
    EXPECT_EQ(slices("b"), 18u);
}

TEST_F(SwarmTest, a_worker_that_comes_back_in_time_finds_its_share) {
    join("a");
    join("b");
    settle();
    const auto before = swarm_.workers().at("b").share;
    swarm_.left("b", clock_.now());
    EXPECT_EQ(swarm_.missing_slices(), 18u);
    clock_.advance(5s);
    EXPECT_TRUE(swarm_.replan(clock_.now()).empty());
    join("b");
    settle();
    EXPECT_EQ(swarm_.workers().size(), 2u) << "counted once";
    EXPECT_EQ(swarm_.workers().at("b").share, before);
    EXPECT_EQ(swarm_.missing_slices(), 0u);
}

TEST_F(SwarmTest, the_slices_of_one_who_stays_away_go_to_others) {
    join("a");
    join("b");
    settle();
    swarm_.left("b", clock_.now());
    clock_.advance(20s);
    settle();
    EXPECT_EQ(swarm_.workers().size(), 1u);
    EXPECT_EQ(slices("a"), 36u);
}

TEST_F(SwarmTest, the_slices_of_one_who_says_goodbye_go_to_others_at_once) {
    join("a");
    join("b");
    settle();
    swarm_.said_goodbye("b", clock_.now());
    swarm_.left("b", clock_.now());
    settle();
    EXPECT_EQ(swarm_.workers().size(), 1u);
    EXPECT_EQ(slices("a"), 36u);
    swarm_.said_goodbye("nobody", clock_.now());
}

TEST_F(SwarmTest, an_old_epoch_is_not_believed) {
    join("a");
    clock_.advance(1s);
    ASSERT_EQ(swarm_.replan(clock_.now()).size(), 1u);
    fb::ShardT shard;
    shard.state = fb::ShardState::ready;
    shard.epoch = swarm_.workers().at("a").epoch + 1;
    EXPECT_FALSE(swarm_.reported("a", shard, clock_.now()));
    EXPECT_EQ(swarm_.missing_slices(), 36u);
}

TEST_F(SwarmTest, what_a_worker_held_for_an_earlier_hub_is_no_answer_to_this_one) {
    join("a");
    fb::ShardT old;
    old.state = fb::ShardState::ready;
    old.epoch = 1;  // as this hub's first assignment would be, were it not for first_epoch
    EXPECT_FALSE(swarm_.reported("a", old, clock_.now()));
    clock_.advance(1s);
    ASSERT_EQ(swarm_.replan(clock_.now()).size(), 1u);
    ready("a");
    EXPECT_EQ(swarm_.missing_slices(), 0u) << "the same words again are an answer now";

    Swarm restarted(manifest_, {}, {.first_epoch = 1000});
    fb::HelloT hello;
    hello.memory_bytes = 1 << 20;
    restarted.joined("a", hello, clock_.now());
    says(restarted, "a", {});
    clock_.advance(1s);
    ASSERT_EQ(restarted.replan(clock_.now()).size(), 1u);
    EXPECT_FALSE(restarted.reported("a", old, clock_.now()));
    EXPECT_EQ(restarted.missing_slices(), 36u);
}

TEST_F(SwarmTest, too_little_memory_leaves_slices_missing_and_is_no_loop) {
    join("a", 10 * kSlice);
    settle();
    EXPECT_EQ(slices("a"), 10u);
    EXPECT_EQ(swarm_.missing_slices(), 26u);
    EXPECT_FALSE(swarm_.routes().complete);
}

TEST_F(SwarmTest, expected_workers_are_waited_for_but_not_for_ever) {
    Swarm swarm(manifest_, {}, {.expected_workers = 2});
    fb::HelloT hello;
    hello.memory_bytes = 1 << 20;
    swarm.joined("a", hello, clock_.now());
    says(swarm, "a", {});
    clock_.advance(1s);
    EXPECT_TRUE(swarm.replan(clock_.now()).empty());
    clock_.advance(30s);
    EXPECT_EQ(swarm.replan(clock_.now()).size(), 1u);
}

TEST_F(SwarmTest, a_worker_that_cannot_load_gives_its_slices_to_others_and_is_asked_again) {
    join("bad");
    join("good");
    clock_.advance(1s);
    for (const std::string& id : swarm_.replan(clock_.now())) {
        if (id == "good") { ready(id); }
    }
    fb::ShardT failed;
    failed.state = fb::ShardState::failed;
    failed.epoch = swarm_.workers().at("bad").epoch;
    failed.error = "disk full";
    swarm_.reported("bad", failed, clock_.now());
    EXPECT_FALSE(swarm_.settled());
    settle();
    EXPECT_EQ(swarm_.missing_slices(), 0u);
    EXPECT_EQ(slices("good"), 36u);
    EXPECT_TRUE(swarm_.settled());
    EXPECT_EQ(swarm_.workers().at("bad").shard.error, "disk full");  // for people to see
    swarm_.reported("bad", failed, clock_.now());                    // heartbeats repeat it
    EXPECT_TRUE(swarm_.replan(clock_.now()).empty());

    clock_.advance(swarm_.options().retry);
    settle();
    EXPECT_EQ(slices("bad"), 18u);
    EXPECT_EQ(slices("good"), 18u);
    EXPECT_EQ(swarm_.missing_slices(), 0u);
}

TEST_F(SwarmTest, nothing_is_routed_to_a_worker_before_it_is_admitted) {
    join("a");
    clock_.advance(1s);
    swarm_.replan(clock_.now());
    loaded("a");
    EXPECT_EQ(swarm_.missing_slices(), 36u);
    EXPECT_FALSE(swarm_.settled());
    EXPECT_FALSE(swarm_.admitted("a", swarm_.workers().at("a").epoch + 1)) << "for something else than it holds";
    EXPECT_EQ(swarm_.missing_slices(), 36u);
    EXPECT_TRUE(swarm_.admitted("a", swarm_.workers().at("a").epoch));
    EXPECT_EQ(swarm_.missing_slices(), 0u);
}

TEST_F(SwarmTest, a_worker_keeps_what_the_other_has_loaded_but_was_not_admitted_for) {
    join("a");
    settle();
    join("b");
    clock_.advance(1s);
    swarm_.replan(clock_.now());
    loaded("b");
    EXPECT_TRUE(swarm_.replan(clock_.now()).empty()) << "b may compute wrong";
    EXPECT_EQ(swarm_.missing_slices(), 0u);
    swarm_.admitted("b", swarm_.workers().at("b").epoch);
    EXPECT_EQ(swarm_.replan(clock_.now()), (std::vector<std::string>{"a"}));
    EXPECT_EQ(swarm_.missing_slices(), 0u);
}

TEST_F(SwarmTest, a_worker_that_is_given_more_serves_what_it_had_meanwhile) {
    join("a");
    join("b");
    settle();
    swarm_.said_goodbye("b", clock_.now());
    clock_.advance(1s);
    EXPECT_EQ(swarm_.replan(clock_.now()), (std::vector<std::string>{"a"}));
    EXPECT_EQ(swarm_.missing_slices(), 18u);
    loaded("a");
    EXPECT_EQ(swarm_.missing_slices(), 18u);
    ready("a");
    EXPECT_EQ(swarm_.missing_slices(), 0u);
}

TEST_F(SwarmTest, a_worker_that_is_back_must_be_admitted_again) {
    join("a");
    settle();
    swarm_.left("a", clock_.now());
    join("a");
    clock_.advance(1s);
    swarm_.replan(clock_.now());
    loaded("a");
    EXPECT_EQ(swarm_.missing_slices(), 36u);
}

TEST_F(SwarmTest, a_worker_in_quarantine_loses_its_slices_to_the_others_at_once) {
    join("a");
    join("b");
    settle();
    swarm_.set_quarantined("a", true, clock_.now());
    EXPECT_EQ(swarm_.missing_slices(), 18u);
    settle();
    EXPECT_EQ(swarm_.missing_slices(), 0u);
    EXPECT_EQ(slices("a"), 0u);
    EXPECT_EQ(slices("b"), 36u);
    EXPECT_TRUE(swarm_.settled());
    swarm_.left("a", clock_.now());
    join("a");
    settle();
    EXPECT_EQ(slices("a"), 0u) << "coming back does not help";
    EXPECT_FALSE(swarm_.admitted("a", swarm_.workers().at("a").epoch));
    swarm_.set_quarantined("a", false, clock_.now());
    settle();
    EXPECT_EQ(slices("a"), 18u);
}

TEST_F(SwarmTest, a_worker_that_is_cleared_at_once_is_given_its_slices_again) {
    join("a");
    settle();
    swarm_.set_quarantined("a", true, clock_.now());
    swarm_.set_quarantined("a", false, clock_.now());
    settle();
    EXPECT_EQ(slices("a"), 36u);
    EXPECT_EQ(swarm_.missing_slices(), 0u);
}

TEST_F(SwarmTest, a_worker_that_cannot_be_probed_is_asked_again_later) {
    join("a");
    join("b");
    settle();
    swarm_.failed("a", "says nothing", clock_.now());
    settle();
    EXPECT_EQ(slices("b"), 36u);
    clock_.advance(1min);
    settle();
    EXPECT_EQ(slices("a"), 18u);
}

TEST_F(SwarmTest, a_hub_that_is_started_again_finds_everything_where_it_was) {
    for (const char* id : {"a", "b", "c"}) { join(id); }
    settle();
    ASSERT_TRUE(swarm_.set_drained("c", true, clock_.now()));
    settle();
    const Digest id = sha256(as_bytes("model"));
    const TestFolder folder;
    const std::filesystem::path path = folder / "placement.json";
    ASSERT_TRUE(write_placement(swarm_.workers(), path, manifest_.model, id));
    const auto before = swarm_.workers();

    auto known = read_placement(path, manifest_.model, id);
    ASSERT_TRUE(known) << known.error().message;
    Swarm again(manifest_, id, {.first_epoch = 1000});
    again.remember(*std::move(known), clock_.now());
    EXPECT_FALSE(again.settled());
    for (const char* worker : {"a", "c"}) {  // b takes longer
        again.joined(worker, before.at(worker).hello, clock_.now());
        says(again, worker, before.at(worker).ready);
    }
    clock_.advance(1s);
    for (const std::string& changed : again.replan(clock_.now())) {
        EXPECT_EQ(again.workers().at(changed).assigned, before.at(changed).share) << changed;
    }
    EXPECT_EQ(plan::count(again.workers().at("a").assigned), 18u);
    EXPECT_TRUE(again.workers().at("c").drained);
    clock_.advance(20s);
    again.joined("b", before.at("b").hello, clock_.now());
    says(again, "b", before.at("b").ready);
    clock_.advance(1s);
    (void)again.replan(clock_.now());
    EXPECT_EQ(again.workers().at("b").assigned, before.at("b").share);
    EXPECT_EQ(again.workers().at("a").assigned, before.at("a").share);

    EXPECT_TRUE(read_placement(path, manifest_.model, sha256(as_bytes("another")))->empty());
    for (const char* text : {"", "{}", "[]", R"({"model": 3})", R"({"workers": [1]})"}) {
        ASSERT_TRUE(write_file_atomically(path, text));
        EXPECT_FALSE(read_placement(path, manifest_.model, id)) << text;
    }
    EXPECT_TRUE(read_placement(folder / "none.json", manifest_.model, id)->empty());
}

TEST_F(SwarmTest, nobody_gives_away_what_it_computed_with_while_the_hub_was_away) {
    for (const char* id : {"a", "b"}) { join(id); }
    settle();
    const auto before = swarm_.workers();
    Swarm again(manifest_, sha256(as_bytes("model")), {.first_epoch = 1000});
    std::vector<RememberedWorker> known;
    for (const auto& [id, worker] : before) { known.push_back({.id = id, .name = id, .share = worker.share}); }
    again.remember(known, clock_.now());
    for (const char* worker : {"a", "b", "c"}) {  // c is new, and a is to be emptied
        fb::HelloT hello = before.at("a").hello;
        again.joined(worker, hello, clock_.now());
        says(again, worker, worker == std::string("c") ? plan::Holdings() : before.at(worker).ready);
    }
    ASSERT_TRUE(again.set_drained("a", true, clock_.now()));
    const auto answer = [&](const std::string& id, bool proven) {
        fb::ShardT shard;
        shard.state = fb::ShardState::ready;
        shard.epoch = again.workers().at(id).epoch;
        again.reported(id, shard, clock_.now());
        if (proven) { again.admitted(id, shard.epoch); }
    };
    const auto holds_all_it_had = [&](const std::string& id) {
        const auto& had = before.at(id).ready;
        const auto& has = again.workers().at(id).assigned;
        for (std::size_t l = 0; l < had.size(); ++l) {
            for (std::size_t e = 0; e < had[l].size(); ++e) {
                if (had[l][e] && !has[l][e]) { return false; }
            }
        }
        return true;
    };
    clock_.advance(1s);
    (void)again.replan(clock_.now());
    EXPECT_TRUE(holds_all_it_had("a"));
    EXPECT_TRUE(holds_all_it_had("b"));
    for (const char* id : {"a", "b", "c"}) { answer(id, false); }
    (void)again.replan(clock_.now());
    EXPECT_TRUE(holds_all_it_had("a")) << "the others have loaded it, and not shown that they can compute with it";
    EXPECT_TRUE(holds_all_it_had("b"));
    for (int i = 0; i < 10; ++i) {
        for (const char* id : {"a", "b", "c"}) { answer(id, true); }
        (void)again.replan(clock_.now());
        EXPECT_EQ(again.missing_slices(), 0u) << i;
    }
    EXPECT_EQ(plan::count(again.workers().at("a").assigned), 0u);
    EXPECT_EQ(plan::count(again.workers().at("b").assigned), 18u);
    EXPECT_EQ(plan::count(again.workers().at("c").assigned), 18u);
}

TEST_F(SwarmTest, what_a_worker_says_it_holds_is_believed_only_of_this_model) {
    fb::HelloT hello;
    hello.memory_bytes = 1 << 20;
    plan::Holdings all = plan::nothing(manifest_.model);
    for (auto& layer : all) { layer.assign(12, true); }
    all.push_back(plan::ExpertSet(12, true));  // a layer that there is not
    all[0].resize(40, true);                   // and experts
    swarm_.joined("a", hello, clock_.now());
    EXPECT_TRUE(swarm_.replan(clock_.now() + 1s).empty()) << "it has not said yet what it holds";
    says(swarm_, "a", all);
    EXPECT_EQ(slices("a"), 36u);
    EXPECT_EQ(swarm_.missing_slices(), 36u) << "it has shown nothing yet";
    swarm_.joined("b", hello, clock_.now());
    fb::ShardT shard;
    shard.model_id = wire::encode_digest(sha256(as_bytes("another")));
    shard.held = wire::encode_slices({{0, {0, 1, 2}}});
    swarm_.reported("b", shard, clock_.now());
    EXPECT_EQ(slices("b"), 0u);
}

TEST_F(SwarmTest, where_memory_is_tight_nothing_is_given_away_early_and_all_comes_to_rest) {
    // a holds the first half of each layer, b the other; the share that the new hub remembers is the other way round.
    const auto half = [&](bool first) {
        plan::Holdings out = plan::nothing(manifest_.model);
        for (auto& layer : out) {
            for (std::size_t e = 0; e < 12; ++e) { layer[e] = (e < 6) == first; }
        }
        return out;
    };
    swarm_.remember({{.id = "a", .name = "a", .share = half(false)}, {.id = "b", .name = "b", .share = half(true)}},
                    clock_.now());
    fb::HelloT hello;
    hello.memory_bytes = 18 * kSlice;
    for (const char* id : {"a", "b"}) {
        swarm_.joined(id, hello, clock_.now());
        says(swarm_, id, half(id == std::string("a")));
    }
    clock_.advance(1s);
    EXPECT_EQ(swarm_.replan(clock_.now()), (std::vector<std::string>{"a", "b"}));
    for (const char* id : {"a", "b"}) { EXPECT_EQ(swarm_.workers().at(id).assigned, half(id == std::string("a"))); }
    for (const char* id : {"a", "b"}) { ready(id); }
    EXPECT_EQ(swarm_.missing_slices(), 0u);
    settle();
    EXPECT_EQ(swarm_.missing_slices(), 0u);
    for (const char* id : {"a", "b"}) { EXPECT_EQ(swarm_.workers().at(id).assigned, half(id == std::string("b"))); }
}

TEST_F(SwarmTest, one_who_does_not_come_back_to_the_new_hub_loses_its_slices) {
    RememberedWorker known{.id = "a", .name = "a", .memory_bytes = 1 << 20, .share = plan::nothing(manifest_.model)};
    for (auto& layer : known.share) { layer.assign(12, true); }
    swarm_.remember({known}, clock_.now());
    join("b");
    clock_.advance(29s);
    (void)swarm_.replan(clock_.now());
    EXPECT_LT(plan::count(swarm_.workers().at("b").assigned), 36u);
    clock_.advance(2s);
    settle();
    EXPECT_EQ(slices("b"), 36u);
    EXPECT_FALSE(swarm_.workers().contains("a"));
}

TEST_F(SwarmTest, a_drained_worker_keeps_each_slice_until_another_has_it) {
    join("a");
    settle();
    ASSERT_TRUE(swarm_.set_drained("a", true, clock_.now()));
    EXPECT_FALSE(swarm_.set_drained("a", true, clock_.now())) << "it is so already";
    EXPECT_FALSE(swarm_.set_drained("nobody", true, clock_.now()));
    settle();
    EXPECT_EQ(swarm_.missing_slices(), 0u) << "nobody else has them";
    join("b");
    clock_.advance(1s);
    for (const std::string& id : swarm_.replan(clock_.now())) {
        EXPECT_EQ(id, "b");
        loaded(id);
    }
    EXPECT_EQ(swarm_.missing_slices(), 0u) << "b has not shown yet what it can do";
    EXPECT_EQ(plan::count(swarm_.workers().at("a").assigned), 36u);
    ready("b");
    settle();
    EXPECT_EQ(plan::count(swarm_.workers().at("a").assigned), 0u);
    EXPECT_EQ(slices("b"), 36u);
    ASSERT_TRUE(swarm_.set_drained("a", false, clock_.now()));
    settle();
    EXPECT_EQ(slices("a"), 18u);
    EXPECT_EQ(swarm_.missing_slices(), 0u);
}

TEST_F(SwarmTest, coordinators_go_by_an_epoch_once_the_worker_has_heard_of_it) {
    join("a");
    settle();
    const std::uint32_t first = swarm_.routes().workers[0]->epoch;
    EXPECT_EQ(first, swarm_.workers().at("a").epoch);
    join("b");
    clock_.advance(1s);
    (void)swarm_.replan(clock_.now());
    ready("b");
    (void)swarm_.replan(clock_.now());  // a is told to give up what b has
    ASSERT_NE(swarm_.workers().at("a").epoch, first);
    EXPECT_EQ(swarm_.routes().workers[0]->epoch, first);
    fb::ShardT shard;
    shard.state = fb::ShardState::loading;
    shard.epoch = swarm_.workers().at("a").epoch;
    EXPECT_TRUE(swarm_.reported("a", shard, clock_.now()));
    EXPECT_EQ(swarm_.routes().workers[0]->epoch, shard.epoch);
    EXPECT_FALSE(swarm_.reported("a", shard, clock_.now())) << "nothing new";
}

TEST_F(SwarmTest, a_worker_is_found_by_its_name_its_id_or_enough_of_it) {
    for (const char* id : {"abcdef1", "abcdef2", "ffffff"}) { join(id); }
    EXPECT_EQ(swarm_.find("ffffff").value(), "ffffff");
    EXPECT_EQ(swarm_.find("abcdef1").value(), "abcdef1");
    EXPECT_EQ(swarm_.find("abcdef").error().kind, ErrorKind::invalid);
    EXPECT_EQ(swarm_.find("fffff").error().kind, ErrorKind::not_found);
    EXPECT_EQ(swarm_.find("").error().kind, ErrorKind::not_found);
    fb::HelloT hello;
    hello.name = "abcdef1";
    swarm_.joined("bbbbbb1", hello, clock_.now());
    EXPECT_EQ(swarm_.find("abcdef1").value(), "abcdef1") << "whatever others call themselves";
}

}  // namespace
}  // namespace linkcpp::hub
