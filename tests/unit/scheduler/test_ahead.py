"""Steps in flight: a sequence's next row is on its way before the last one is answered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import EndReason
from scheduler_service.core.in_flight import StepsInFlight
from scheduler_service.core.open_drafts import OpenDrafts
from scheduler_service.core.request import DraftingWish, DraftSource, Request
from scheduler_service.core.schedule import Schedule, ScheduledRow
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.step import Code, PlannedStep, RowAnswer, StepAnswer
from scheduler_service.core.step_log import StepFigures
from scheduler_service.core.waiting.reasons import WaitReason
from tests.unit.scheduler.fake_executor import FakeExecutor, repeating
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request, solo


def ahead(depth: int = 2) -> Harness:
    """A harness with so many steps in flight."""
    return Harness(FakeExecutor(CAPACITY), CoreConfig(max_in_flight=depth))


def sent(harness: Harness) -> list[PlannedStep]:
    """Send all that there is to send."""
    plans = []
    while (plan := harness.plan()) is not None:
        plans.append(plan)
    return plans


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_many_steps_are_in_flight_as_there_may_be(depth: int) -> None:
    harness = ahead(depth)
    harness.add(make_request("a", max_tokens=20))
    sent(harness)
    harness.answer()
    lengths = [row.kv_length for plan in sent(harness) for row in plan.rows]
    assert lengths == [3 + i for i in range(depth)]
    harness.run()
    assert harness.tokens["a", 0] == solo(FakeExecutor(CAPACITY), harness.requests["a"])[0]


@pytest.mark.parametrize(
    ("to_be_busy", "configured", "step_s", "depth"),
    [(2, 0, 0.0019, 3), (2, 0, 0.0021, 2), (2, 2, 0.0019, 2), (1, 0, 0.0019, 2), (1, 0, 0.0021, 1)],
)
def test_one_more_step_is_in_flight_where_steps_are_short(
    to_be_busy: int, configured: int, step_s: float, depth: int
) -> None:
    executor = FakeExecutor(replace(CAPACITY, steps_to_be_busy=to_be_busy, short_step_s=0.002))
    core = StepScheduler(CoreConfig(max_in_flight=configured))
    core.executor_ready(executor.capacity, 0.0)
    core.add(make_request("a", max_tokens=20), 0.0)
    unanswered: list[PlannedStep] = []
    for _ in range(4):
        while (plan := core.plan(0.0)) is not None:
            unanswered.append(plan)
        in_flight = len(unanswered)
        core.apply(replace(executor.execute(unanswered.pop(0)), compute_s=step_s), 0.0)
    assert in_flight == depth


def short(depth: int = 0) -> Harness:
    """A harness whose steps are short: one more is in flight than keep the device busy."""
    harness = Harness(FakeExecutor(replace(CAPACITY, short_step_s=1.0)), CoreConfig(max_in_flight=depth))
    harness.add(make_request("first", max_tokens=1))
    harness.run()
    return harness


def test_openings_do_not_get_a_further_step_of_their_own() -> None:
    """They wait for the answer, and share a step with what comes until then, unless they fill one."""
    harness = short()
    harness.add(make_request("a"))
    assert [len(plan.openings) for plan in sent(harness)] == [1]
    harness.add(make_request("b"))
    assert not sent(harness)
    harness.add(make_request("c", range(64)))
    assert [len(plan.openings) for plan in sent(harness)] == [2]
    harness.answer()
    assert not sent(harness), "a's next row waits for those of b and c"
    harness.answer()
    assert len(sent(harness)[0].rows) == 3


@pytest.mark.parametrize("length", [None, 4])
def test_rows_that_wait_for_answers_are_not_split_among_short_steps(length: int | None) -> None:
    """Both sequences draft, which takes the answers: neither has steps of its own."""
    harness = short()
    for name in "ab":
        harness.add(replace(speculating(length), id=name))
        sent(harness)
    rows = []
    while not harness.idle:
        rows += [len(plan.rows) for plan in sent(harness) if plan.rows]
        harness.answer()
    assert rows.count(2) > 0.9 * len(rows)


def test_text_that_does_not_repeat_goes_on_beside_a_short_step_and_drafts_wait_for_its_answer() -> None:
    for share, ahead_at_least, ahead_at_most in ((0.0, 0.8, 1.0), (1.0, 0.0, 0.3)):
        executor = FakeExecutor(replace(CAPACITY, short_step_s=1.0), repeating(10, share))
        harness = Harness(executor, CoreConfig(max_in_flight=0))
        harness.add(speculating(None))
        depths = []
        while not harness.idle:
            sent(harness)
            assert not any(row.is_bound for plan in harness.unanswered for row in plan.rows)
            depths.append(len(harness.unanswered))
            harness.answer()
        assert ahead_at_least <= depths.count(2) / len(depths) <= ahead_at_most, (share, depths)


def test_releases_alone_are_not_sent_beside_another_step_unless_pages_are_lacking() -> None:
    harness = ahead()
    harness.add(make_request("a", max_tokens=20))
    sent(harness)
    harness.answer()
    sent(harness)
    harness.cancel("a")
    assert not sent(harness)
    harness.answer()
    assert not sent(harness)
    harness.answer()
    assert [plan.releases for plan in sent(harness)] == [(1,)]


@pytest.mark.parametrize(("max_tokens", "drafts"), [(2, False), (3, True)])
def test_a_sequence_too_short_for_drafts_has_no_index(max_tokens: int, drafts: bool) -> None:
    """Its prompt brings its first token, a verification at least one more than it has drafts."""
    harness = ahead()
    harness.add(replace(speculating(), max_tokens=max_tokens))
    (live,) = harness.core._registry
    assert (live.sequences[0].draft_state is not None) == drafts
    harness.run()


def test_releases_wait_a_little_for_the_next_request() -> None:
    config = CoreConfig(release_wait_s=0.05)
    harness = Harness(FakeExecutor(CAPACITY), config)
    for name in "ab":  # b comes while a's release waits
        harness.add(make_request(name, max_tokens=1))
        (plan,) = sent(harness)
        assert (len(plan.openings), plan.releases) == (1, (1,) if name == "b" else ())
        harness.answer()
        assert not sent(harness)
    due_at = harness.core.next_wakeup(harness.now)
    assert due_at == harness.now + 0.05
    harness.now = due_at
    assert [plan.releases for plan in sent(harness)] == [(2,)]
    harness.answer()
    assert harness.core.next_wakeup(harness.now) is None


def test_a_running_sequence_that_lacks_pages_gets_those_of_one_that_ended_at_once() -> None:
    executor = FakeExecutor(replace(CAPACITY, total_pages=4))
    harness = Harness(executor, CoreConfig(release_wait_s=0.05))
    harness.add(make_request("a", range(7), max_tokens=6))
    harness.add(make_request("b", range(20, 27), max_tokens=2))
    while sent(harness) or harness.unanswered:
        harness.answer()
    assert ("a", 0) in harness.finished, "it waits for the pages of b"


def test_nobody_waits_for_the_length_of_an_opening() -> None:
    harness = ahead()
    harness.add(make_request("a"))
    assert len(sent(harness)) == 1


def test_nothing_is_computed_beyond_the_last_token() -> None:
    harness = ahead(4)
    harness.add(make_request("a", max_tokens=3))
    steps = 0
    while not harness.idle:
        steps += sum(bool(plan.rows or plan.openings) for plan in sent(harness))
        harness.answer()
    assert steps == 3


def test_an_end_that_is_known_late_costs_one_row() -> None:
    request = make_request("a", max_tokens=20)
    output = solo(FakeExecutor(CAPACITY), request)[0]
    harness = ahead()
    harness.add(make_request("a", max_tokens=20, stop_token_ids=frozenset({output[4]})))
    rows = 0
    while not harness.idle:
        rows += sum(len(plan.rows) for plan in sent(harness))
        harness.answer()
    end = harness.finished["a", 0]
    assert harness.tokens["a", 0] == output[:5]
    assert (end.reason, end.matched_id) == (EndReason.STOP_TOKEN, output[4])
    assert rows == 5  # four decodes, and the one that was on its way


def test_what_is_cancelled_late_costs_what_is_in_flight() -> None:
    harness = ahead()
    harness.add(make_request("a", max_tokens=20))
    sent(harness)
    harness.answer()
    sent(harness)
    harness.cancel("a")
    while not harness.idle:
        assert all(not plan.rows for plan in sent(harness))
        harness.answer()
    harness.executor.check()


def test_a_row_that_was_sent_after_one_that_is_refused_counts_for_nothing() -> None:
    executor = FakeExecutor(CAPACITY)
    harness = Harness(executor, CoreConfig(max_in_flight=3))
    harness.add(make_request("a", max_tokens=12))
    harness.add(make_request("b", max_tokens=12))
    sent(harness)
    harness.answer()
    executor.refuse[sent(harness)[0].rows[0].cache_id] = Code.RESOURCE_EXHAUSTED
    harness.run()
    for name in "ab":
        assert harness.tokens[name, 0] == solo(FakeExecutor(CAPACITY), harness.requests[name])[0]
    assert harness.finished["a", 0].usage.preemptions == 0
    assert harness.finished["b", 0].usage.preemptions == 1  # the youngest makes room


def speculating(length: int | None = 4, **other: object) -> Request:
    """A request that drafts by n-grams; its prompt repeats itself."""
    wish = DraftingWish(frozenset({DraftSource.NGRAM}), length)
    return make_request("a", [*range(10, 20)] * 2, max_tokens=60, speculation=wish, **other)  # type: ignore[arg-type]


def alone(share: float) -> list[int]:
    """Its output without drafts, in a text that repeats itself at this share of the positions."""
    plain = replace(speculating(), speculation=DraftingWish())
    return solo(FakeExecutor(CAPACITY, repeating(10, share)), plain)[0]


@pytest.mark.parametrize("length", [None, 4])
@pytest.mark.parametrize("depth", [2, 3])
def test_drafts_do_not_wait_for_the_answer_to_those_before_them(length: int | None, depth: int) -> None:
    """Those after an unanswered verification follow its last draft and the token after that."""
    harness = Harness(FakeExecutor(CAPACITY, repeating(10, 0.9)), CoreConfig(max_in_flight=depth))
    harness.add(speculating(length))
    depths, bounds, both = [], 0, 0
    while not harness.idle:
        for plan in sent(harness):
            bounds += sum(row.is_bound for row in plan.rows)
            both += sum(row.is_bound and len(row.drafts) > 0 for row in plan.rows)
        depths.append(len(harness.unanswered))
        harness.answer()
    assert harness.tokens["a", 0] == alone(0.9)
    assert depths[1:10] == [depth] * 9  # until the drafts in flight may reach the last token
    usage = harness.finished["a", 0].usage
    assert usage.accepted_tokens > 20
    assert bounds >= both > (5 if length else 0)


def test_drafts_behind_rejected_ones_are_sent_for_where_the_sequence_is_likely_to_be() -> None:
    """A text that repeats but for one token: what follows in the second row is right all the same."""
    drafts = OpenDrafts()
    drafts.send(0, (1, 2, 3))
    drafts.send(2, (6,))
    assert drafts.count == 4
    assert drafts.expected([1, 2, 3, 4, 5, 6, 7, 8], 4) == 8
    assert drafts.expected([1, 9, 5, 6, 7, 8, 9, 9], 3) == 5
    assert drafts.expected([7, 5, 4, 6, 6, 6, 6, 6], 3) == 3
    drafts.answer()
    drafts.answer()
    assert (drafts.count, drafts.expected([6, 7], 1)) == (1, 2)
    drafts.answer()
    assert (drafts.count, drafts.expected([6], 0)) == (0, 0)


def test_a_row_behind_drafts_that_lacks_a_page_waits_and_preempts_nobody() -> None:
    """Until their answer shows how many pages are needed."""
    capacity = replace(CAPACITY, total_pages=22, page_size=4)
    harness = Harness(FakeExecutor(capacity, repeating(10, 0.5)), CoreConfig(max_in_flight=2))
    harness.add(speculating(8))
    harness.add(make_request("b", max_tokens=12))
    harness.run()
    for name in "ab":
        assert harness.finished[name, 0].usage.preemptions == 0
    assert harness.tokens["a", 0] == alone(0.5)


def test_pages_are_set_aside_anew_when_drafts_were_rejected() -> None:
    """After three accepted drafts a row would end on the page where it begins; after none it needs one."""
    harness = ahead()
    harness.add(make_request("a", range(5), max_tokens=40))
    sent(harness)
    harness.answer()
    (sequence,) = harness.core._pool.running
    in_flight = StepsInFlight()
    for kv_length, drafts, is_bound in ((5, (1, 2, 3), False), (9, (), True)):
        row = ScheduledRow(sequence, kv_length, 1 - is_bound)
        row.drafts, row.is_bound = drafts, is_bound
        schedule = Schedule(64, 9)
        schedule.add_row(row)
        in_flight.send(schedule, (), row.pages, StepFigures(0.0, 0.0, 0, WaitReason.NONE))
    assert in_flight.pages == 1
    answer = StepAnswer(1, [RowAnswer(kv_length=8, tokens=[1, 2, 9])], [], 9, 0)
    in_flight.take(answer, page_size=4)
    assert in_flight.pages == 1
    assert [row.pages for step in in_flight for row in step.rows] == [1]


def test_rows_behind_refused_drafts_preempt_nobody_twice() -> None:
    executor = FakeExecutor(CAPACITY, repeating(10, 0.9))
    harness = Harness(executor, CoreConfig(max_in_flight=3))
    harness.add(speculating(4))
    sent(harness)
    harness.answer()
    (cache_id,) = {row.cache_id for plan in sent(harness) for row in plan.rows}
    for _ in range(3):
        executor.refuse[cache_id] = Code.RESOURCE_EXHAUSTED
        harness.answer()
    harness.run()
    assert harness.tokens["a", 0] == alone(0.9)
    assert harness.finished["a", 0].usage.preemptions == 0
