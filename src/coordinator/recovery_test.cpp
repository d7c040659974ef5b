#include "coordinator/recovery.h"

#include <gtest/gtest.h>

namespace linkcpp::coordinator {
namespace {

using namespace std::chrono_literals;

// 10 ms for the work of one unit and 1 ms on the way: a holder as the tests know it.
constexpr Duration kWork = 10ms;
constexpr Duration kWay = 1ms;

class HolderWatchTest : public testing::Test {
  protected:
    TimePoint now() const { return clock_.now(); }
    void advance(Duration by) { clock_.advance(by); }

    std::uint64_t send(double units = 1, std::size_t n_rows = 1) {
        watch_.sent(++last_id_, units, n_rows, now());
        return last_id_;
    }
    HolderWatch::Rows answer(std::uint64_t id, double units = 1) {
        return watch_.rows_came(id, 0, 1, static_cast<std::uint64_t>(units * kWork / 1us), now());
    }
    // As many answers as it takes for the measures to settle.
    void measure() {
        for (int i = 0; i < 200; ++i) {
            const std::uint64_t id = send();
            advance(kWork + kWay);
            answer(id);
        }
    }

    Patience patience_;
    FakeClock clock_;
    HolderWatch watch_{patience_};
    std::uint64_t last_id_ = 0;
};

TEST_F(HolderWatchTest, measures_what_answers_take) {
    EXPECT_EQ(watch_.us_per_unit(now()), 0);
    measure();
    EXPECT_NEAR(watch_.us_per_unit(now()), 10'000, 1);
    EXPECT_NEAR(watch_.wait_us(now()), 1'000, 1);
    EXPECT_NEAR(watch_.sure_wait_us(now()), 800, 1) << "0.2 ms are this program's own";
    const std::uint64_t id = send(3);
    advance(3 * kWork + kWay);
    EXPECT_FALSE(watch_.is_late(id, now()));
    EXPECT_EQ(answer(id, 3), HolderWatch::Rows::last);
    EXPECT_FALSE(watch_.busy());
}

TEST_F(HolderWatchTest, who_owes_nothing_is_never_late_or_hung) {
    measure();
    advance(1h);
    EXPECT_TRUE(watch_.preferred(now()));
    EXPECT_EQ(watch_.to_give_up(now()), std::nullopt);
    EXPECT_EQ(watch_.next(now()), std::nullopt);
}

TEST_F(HolderWatchTest, good_becomes_late_by_the_margin_and_good_again_by_its_answer) {
    measure();
    const std::uint64_t id = send();
    const TimePoint expected = now() + kWork + kWay;
    clock_.advance(kWork + kWay + patience_.late - 1ms);
    EXPECT_FALSE(watch_.is_late(id, now()));
    EXPECT_TRUE(watch_.preferred(now()));
    ASSERT_TRUE(watch_.next(now()));
    EXPECT_NEAR(to_seconds(*watch_.next(now()) - expected), to_seconds(patience_.late), 1e-4);
    advance(2ms);
    EXPECT_TRUE(watch_.is_late(id, now()));
    EXPECT_FALSE(watch_.preferred(now()));
    EXPECT_EQ(watch_.to_give_up(now()), std::nullopt);
    answer(id);
    EXPECT_TRUE(watch_.preferred(now()));
}

TEST_F(HolderWatchTest, the_margin_grows_with_the_scatter_and_with_the_work) {
    measure();
    for (int i = 0; i < 100; ++i) {  // now and then 100 ms more
        const std::uint64_t id = send();
        advance(kWork + (i % 2 == 0 ? 100ms : 0ms));
        answer(id);
    }
    std::uint64_t id = send();
    advance(kWork + 150ms);
    EXPECT_FALSE(watch_.is_late(id, now()));
    answer(id);
    measure();
    id = send(50);  // 0.5 s of work: late only when it has taken twice as long
    advance(kWork * 90);
    EXPECT_FALSE(watch_.is_late(id, now()));
    advance(kWork * 15);
    EXPECT_TRUE(watch_.is_late(id, now()));
}

TEST_F(HolderWatchTest, who_was_slow_for_a_moment_is_not_taken_for_slow_for_ever) {
    measure();
    for (int i = 0; i < 50; ++i) {
        const std::uint64_t id = send();
        advance(1s);
        watch_.heard(now());
        watch_.rows_came(id, 0, 1, 900'000, now());
    }
    EXPECT_GT(watch_.us_per_unit(now()), 800'000);
    const std::uint64_t hangs = send();  // its scatter is some 100 ms, and yet it is late before it is hung
    advance(1s + patience_.hang);
    EXPECT_TRUE(watch_.is_late(hangs, now()));
    watch_.lost(Fault::hung, now());
    watch_.connected(now());
    advance(1min);  // others were chosen all the time
    EXPECT_LT(watch_.us_per_unit(now()), 1000);
    const std::uint64_t id = send();
    advance(kWork + kWay);
    answer(id);
    EXPECT_NEAR(watch_.us_per_unit(now()), 10'000, 1000) << "the new measure counts, not the old";
}

TEST_F(HolderWatchTest, chance_prefers_nobody) {
    for (int i = 0; i < 400; ++i) {  // 0.2 or 1.8 ms on the way
        const std::uint64_t id = send();
        advance(kWork + (i % 2 == 0 ? 200us : 1800us));
        answer(id);
    }
    EXPECT_NEAR(watch_.wait_us(now()), 1'000, 200);
    EXPECT_EQ(watch_.sure_wait_us(now()), 0);
}

TEST_F(HolderWatchTest, requests_wait_in_line) {
    measure();
    const std::uint64_t first = send(5);
    const std::uint64_t second = send(5);
    advance(kWork * 9);
    EXPECT_FALSE(watch_.is_late(second, now()));
    answer(first, 5);
    advance(kWork * 2);
    EXPECT_FALSE(watch_.is_late(second, now()));
    EXPECT_EQ(answer(second, 5), HolderWatch::Rows::last);
}

TEST_F(HolderWatchTest, who_is_silent_is_hung_and_who_pulses_is_not) {
    measure();
    const std::uint64_t id = send();
    for (int i = 0; i < 50; ++i) {  // 5 s of pulses
        advance(100ms);
        watch_.heard(now());
        EXPECT_EQ(watch_.to_give_up(now()), std::nullopt);
    }
    EXPECT_TRUE(watch_.is_late(id, now()));
    advance(patience_.hang - 1ms);
    EXPECT_EQ(watch_.to_give_up(now()), std::nullopt);
    advance(1ms);
    EXPECT_EQ(watch_.to_give_up(now()), Fault::hung);
    watch_.lost(Fault::hung, now());
    EXPECT_FALSE(watch_.busy());
    EXPECT_TRUE(watch_.rests(now()));
    EXPECT_EQ(watch_.count(Fault::hung), 1u);
    EXPECT_EQ(answer(id), HolderWatch::Rows::unknown);
}

TEST_F(HolderWatchTest, who_pulses_for_ever_is_stuck_and_rows_are_progress) {
    measure();
    std::uint64_t id = send();
    const auto pulse_for = [&](Duration time) {
        for (Duration t{}; t < time; t += 100ms) {
            advance(100ms);
            watch_.heard(now());
        }
    };
    pulse_for(patience_.stuck - 1s);
    EXPECT_EQ(watch_.to_give_up(now()), std::nullopt);
    pulse_for(2s);
    EXPECT_EQ(watch_.to_give_up(now()), Fault::stuck);
    watch_.lost(Fault::stuck, now());
    id = send(1, 3);
    for (std::size_t row = 0; row < 3; ++row) {
        pulse_for(patience_.stuck - 1s);
        EXPECT_EQ(watch_.to_give_up(now()), std::nullopt);
        EXPECT_EQ(watch_.rows_came(id, row, 1, 5, now()),
                  row == 2 ? HolderWatch::Rows::last : HolderWatch::Rows::more_to_come);
    }
    EXPECT_EQ(watch_.to_give_up(now()), std::nullopt);
}

TEST_F(HolderWatchTest, a_request_that_is_passed_over_is_late_and_then_stuck) {
    measure();
    const std::uint64_t passed = send();
    for (int i = 0; i < 200; ++i) {
        const std::uint64_t id = send();
        advance(100ms);
        answer(id);
    }
    EXPECT_TRUE(watch_.is_late(passed, now()));
    EXPECT_EQ(watch_.to_give_up(now()), Fault::stuck);
}

TEST_F(HolderWatchTest, rows_that_have_come_before_and_answers_that_nobody_asked_for_are_unknown) {
    const std::uint64_t id = send(1, 4);
    EXPECT_EQ(watch_.rows_came(id, 0, 2, 5, now()), HolderWatch::Rows::more_to_come);
    EXPECT_EQ(watch_.rows_came(id, 0, 2, 5, now()), HolderWatch::Rows::unknown);
    EXPECT_EQ(watch_.rows_came(id, 1, 1, 5, now()), HolderWatch::Rows::unknown);
    EXPECT_EQ(watch_.rows_came(id, 2, 2, 5, now()), HolderWatch::Rows::last);
    EXPECT_EQ(watch_.rows_came(id, 2, 2, 5, now()), HolderWatch::Rows::unknown);
    EXPECT_EQ(watch_.rows_came(id + 1, 0, 4, 5, now()), HolderWatch::Rows::unknown);
    EXPECT_FALSE(watch_.refused(id, Fault::refused, now()));
}

TEST_F(HolderWatchTest, rest_doubles_with_each_failure_in_a_row_and_an_answer_ends_it) {
    Duration rest = 1s;
    for (int i = 0; i < 6; ++i) {
        EXPECT_TRUE(watch_.refused(send(), Fault::refused, now()));
        EXPECT_TRUE(watch_.rests(now() + rest - 1ms)) << i;
        EXPECT_FALSE(watch_.preferred(now() + rest - 1ms)) << i;
        EXPECT_FALSE(watch_.rests(now() + rest)) << i;
        rest *= 2;
    }
    for (int i = 0; i < 100; ++i) { watch_.refused(send(), Fault::refused, now()); }
    EXPECT_FALSE(watch_.rests(now() + 65s));
    answer(send());
    EXPECT_FALSE(watch_.rests(now()));
    watch_.refused(send(), Fault::refused, now());
    EXPECT_FALSE(watch_.rests(now() + 1s));
}

TEST_F(HolderWatchTest, to_hang_up_or_to_have_moved_is_forgiven_twice) {
    for (const Fault fault : {Fault::dead, Fault::moved}) {
        HolderWatch watch(patience_);
        for (int i = 0; i < 3; ++i) {
            watch.connected(now());
            watch.sent(1, 1, 1, now());
            watch.lost(fault, now());
            EXPECT_EQ(watch.rests(now()), i == 2) << to_string(fault) << i;
        }
    }
}

TEST_F(HolderWatchTest, a_holder_that_nobody_has_measured_is_late_when_a_dead_one_would_be) {
    const std::uint64_t id = send(1000);
    advance(patience_.hang - 1ms);
    watch_.heard(now());
    EXPECT_FALSE(watch_.is_late(id, now()));
    advance(2ms);
    EXPECT_TRUE(watch_.is_late(id, now()));
    EXPECT_EQ(watch_.to_give_up(now()), std::nullopt);
}

TEST_F(HolderWatchTest, while_nobody_reads_nobody_is_hung_and_nothing_is_measured) {
    measure();
    const double before = watch_.wait_us(now());
    const std::uint64_t id = send();
    advance(1min);
    watch_.away(1min);
    EXPECT_EQ(watch_.to_give_up(now()), std::nullopt);
    EXPECT_FALSE(watch_.is_late(id, now()));
    EXPECT_EQ(answer(id), HolderWatch::Rows::last);
    EXPECT_EQ(watch_.wait_us(now()), before);
    send();
    for (int i = 0; i < 200; ++i) {  // the pauses between a token's layers do not hide a hung holder
        advance(10ms);
        watch_.away(8ms);
    }
    EXPECT_EQ(watch_.to_give_up(now()), Fault::hung);
}

TEST_F(HolderWatchTest, deadlines_are_by_the_holders_clock) {
    EXPECT_EQ(watch_.deadline_us(1, now()), 0u);
    advance(1min);
    watch_.clock_read(5'000'000, now());
    EXPECT_EQ(watch_.deadline_us(0, now()), 5'000'000u + patience_.stuck / 1us);
    advance(1s);
    watch_.clock_read(5'500'000, now());  // read half a second late
    EXPECT_EQ(watch_.deadline_us(0, now()), 6'000'000u + patience_.stuck / 1us);
    watch_.connected(now());
    EXPECT_EQ(watch_.deadline_us(0, now()), 0u);
}

TEST(TwiceBudget, is_a_share_of_what_is_done_and_a_few_saved) {
    TwiceBudget budget(0.1);
    int n = 0;
    while (budget.spend()) { ++n; }
    EXPECT_EQ(n, 16);
    for (int i = 0; i < 1000; ++i) {
        budget.earn();
        n += budget.spend() ? 1 : 0;
    }
    EXPECT_NEAR(n, 116, 1);
    TwiceBudget none(0);
    none.earn();
    EXPECT_FALSE(none.spend());
}

TEST(Stall, is_over_when_nothing_has_come_for_so_long) {
    const TimePoint start = TimePoint{} + 1h;
    Stall stall(1s);
    EXPECT_FALSE(stall.is_over(start));
    stall.begin(start);
    stall.begin(start + 900ms);
    EXPECT_FALSE(stall.is_over(start + 1s));
    EXPECT_TRUE(stall.is_over(start + 1001ms));
    stall.end();
    EXPECT_FALSE(stall.is_over(start + 1h));
    stall.begin(start + 1h);
    EXPECT_FALSE(stall.is_over(start + 1h + 1s));
}

}  // namespace
}  // namespace linkcpp::coordinator
