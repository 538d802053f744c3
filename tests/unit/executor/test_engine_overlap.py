"""A step that is begun while another is under way: what goes on, what waits, what is taken back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.contract.masks import mask_bytes
from executor_service.contract.plan import (
    Opening,
    OutputMode,
    Reason,
    Refusal,
    RequestRefused,
    Row,
    Sampling,
    StepPlan,
)
from tests.support.engine_steps import BegunStep, begin, execute, run
from tests.unit.executor.deferred import DeferredBackend
from tests.unit.executor.fakes import VOCAB, continuation, limits
from tests.unit.executor.harness import Harness, Release, Truncate, fork, opening, plan, row
from tests.unit.executor.table_grammar import TableGrammar, loops

PROMPT = [5, 6, 7, 8, 9, 10]
PENALTY = Sampling(frequency_penalty=0.5)


@pytest.fixture
def device() -> DeferredBackend:
    return DeferredBackend()


@pytest.fixture
def h(device: DeferredBackend) -> Harness:
    return Harness(backend=device)


def tokens_of(step: BegunStep) -> list[list[int]]:
    return [answer.tokens for answer in step.finish().rows]


def refusal_of(step: BegunStep, index: int = 0) -> Refusal:
    refusal = step.finish().rows[index].refusal
    assert refusal is not None
    return refusal


def test_a_row_with_a_grammar_is_launched_before_its_mask_is_known(
    h: Harness, device: DeferredBackend
) -> None:
    """Neither it nor its neighbours wait for the step ahead; the mask comes when that one is finished."""
    grammar = loops(end=0, vocabulary=VOCAB)
    constrained = replace(opening(1, PROMPT), sampling=Sampling(grammar=grammar))
    steps = [h.begin(constrained, opening(2, [1, 2]))]
    for n in range(7):
        steps.append(h.begin(row(2, 2 + n), row(1, 6 + n)))
        assert [step.result is None for step in steps[-2:]] == [True, True]
        assert [forward.lacks for forward in device.unanswered] == [set(), {1}]
    assert device.followed == 14
    answers = [tokens_of(step) for step in steps]
    output = [answers[0][0][0], *(rows[1][0] for rows in answers[1:])]
    assert all(token in grammar.allowed(output[:i]) for i, token in enumerate(output))
    assert [answers[0][1], *(rows[0] for rows in answers[1:])] == [[t] for t in continuation([1, 2], 8)]


def test_a_row_with_a_mask_of_its_own_beside_its_grammars_waits(h: Harness, device: DeferredBackend) -> None:
    grammar = loops(end=0, vocabulary=VOCAB)
    first = h.begin(replace(opening(1, PROMPT), sampling=Sampling(grammar=grammar)))
    bits = np.zeros((1, 8 * mask_bytes(VOCAB)), np.uint8)
    bits[0, 10:16] = 1
    second = h.begin(replace(row(1, 6), masks=np.packbits(bits, axis=-1, bitorder="little")))
    assert first.result is not None
    ((token,),) = tokens_of(second)
    assert 10 <= token < 16
    assert device.followed == 0


def test_a_row_behind_a_token_after_which_nothing_is_allowed_is_refused_in_flight(
    h: Harness, device: DeferredBackend
) -> None:
    dead = TableGrammar({0: {10: 1}, 1: {11: 2}}, ends=set(), vocabulary=VOCAB)
    constrained = replace(opening(1, PROMPT[:3]), sampling=Sampling(grammar=dead))
    h.begin(constrained, opening(2, [1, 2])).finish()
    last = h.begin(row(1, 3), row(2, 2))
    behind = h.begin(row(1, 4), row(2, 3))
    after = h.begin(row(2, 4))
    assert tokens_of(last) == [[11], continuation([1, 2], 2)[1:]]
    assert last.finish().free_pages == 62
    refusal = refusal_of(behind)
    assert (refusal.reason, refusal.message) == (
        Reason.GRAMMAR,
        "rows.cache_ids[0]: the grammar allows no token here",
    )
    assert behind.finish().rows[1].tokens == continuation([1, 2], 3)[2:]
    assert behind.finish().free_pages == 62
    assert tokens_of(after) == [continuation([1, 2], 4)[3:]]
    h.engine.store.check()


def test_rows_continue_from_tokens_that_the_host_does_not_know(h: Harness, device: DeferredBackend) -> None:
    steps = [h.begin(opening(1, PROMPT), opening(2, [1, 2]))]
    for n in range(7):
        steps.append(h.begin(row(2, 2 + n), row(1, 6 + n)))
        assert [step.result is None for step in steps[-2:]] == [True, True]
    assert device.followed == 14
    answers = [tokens_of(step) for step in steps]
    assert [answers[0][0], *(rows[1] for rows in answers[1:])] == [[t] for t in continuation(PROMPT, 8)]
    assert [answers[0][1], *(rows[0] for rows in answers[1:])] == [[t] for t in continuation([1, 2], 8)]
    assert [answer.kv_length for answer in steps[-1].finish().rows] == [9, 13]


def test_no_more_than_two_steps_are_under_way(h: Harness) -> None:
    steps = [h.begin(opening(1, PROMPT)), h.begin(row(1, 6)), h.begin(row(1, 7))]
    assert [step.result is None for step in steps] == [False, True, True]


def test_finishing_a_step_finishes_those_before_it(h: Harness) -> None:
    first, second = h.begin(opening(1, PROMPT)), h.begin(row(1, 6))
    assert tokens_of(second) == [continuation(PROMPT, 2)[1:]]
    assert first.result is not None
    assert first.finish() is first.result


def test_the_rest_of_a_prompt_is_known(h: Harness, device: DeferredBackend) -> None:
    steps = [
        h.begin(opening(1, PROMPT, limit=3)),
        h.begin(row(1, 3, limit=2)),
        h.begin(row(1, 5)),
        h.begin(row(1, 6)),
    ]
    assert [tokens_of(step) for step in steps] == [[[]], [[]], *([[t]] for t in continuation(PROMPT, 2))]
    assert device.followed == 1


def test_a_released_sequence_gives_its_pages_back_at_once_and_its_row_is_answered(h: Harness) -> None:
    h.begin(opening(1, PROMPT), opening(2, [1, 2])).finish()
    discarded = h.begin(row(1, 6), row(2, 2))
    released = h.begin(row(2, 3), opening(3, [7, 7]), ops=(Release((1,)),))
    assert discarded.result is None
    assert h.engine.store.count == 2
    assert h.engine.store.pages.owned == 2
    assert tokens_of(discarded) == [continuation(PROMPT, 2)[1:], continuation([1, 2], 2)[1:]]
    assert released.finish().ops[0].released == 1
    assert tokens_of(released) == [continuation([1, 2], 3)[2:], continuation([7, 7], 1)]
    h.engine.store.check()


def test_pages_of_a_released_sequence_are_written_behind_its_row() -> None:
    small = Harness(limits(total_pages=3), DeferredBackend())
    small.begin(opening(1, PROMPT[:5])).finish()
    discarded = small.begin(row(1, 5))
    taken = small.begin(opening(2, [9] * 12), ops=(Release((1,)),))
    assert discarded.result is None
    assert tokens_of(taken) == [continuation([9] * 12, 1)]
    assert tokens_of(discarded) == [continuation(PROMPT[:5], 2)[1:]]
    again = small.begin(opening(3, PROMPT[:5]), ops=(Release((2,)),)).finish().rows[0]
    assert again.cached_length == 0, "a page that another sequence had written was published"
    small.engine.store.check()


def test_a_row_behind_one_that_is_not_finite_finds_its_sequence_as_it_was(
    h: Harness, device: DeferredBackend
) -> None:
    h.begin(opening(1, PROMPT), opening(2, [1, 2])).finish()
    device.poisoned = {continuation(PROMPT, 1)[0]}
    failed, lost = h.begin(row(1, 6), row(2, 2)), h.begin(row(1, 7), row(2, 3))
    assert refusal_of(failed).reason is Reason.NOT_FINITE
    h.engine.store.check()
    assert refusal_of(lost) == Refusal(Reason.KV_LENGTH, "rows.kv_lengths[0]: expected 7, is 6", 6)
    assert tokens_of(lost)[1] == continuation([1, 2], 3)[2:]
    assert h.engine.store.pages.owned == 3
    device.poisoned = set()
    assert tokens_of(h.begin(row(1, 6))) == [continuation(PROMPT, 2)[1:]], (
        "the sampled token is still pending"
    )


def test_a_row_with_a_bound_behind_one_that_is_not_finite_is_refused_as_that_one_was(
    h: Harness, device: DeferredBackend
) -> None:
    h.begin(opening(1, PROMPT)).finish()
    device.poisoned = {95}
    failed, lost = h.begin(row(1, 6, drafts=[1, 95])), h.begin(bounded(1, 9))
    assert failed.result is None, "it was launched before the failure was known"
    assert refusal_of(lost) == refusal_of(failed)
    assert refusal_of(failed).reason is Reason.NOT_FINITE
    h.engine.store.check()
    assert tokens_of(h.begin(row(1, 6))) == [continuation(PROMPT, 2)[1:]]


RIGHT = continuation(PROMPT, 12)
VERIFIED: list[tuple[str, list[int], list[int], int]] = [
    ("all accepted", RIGHT[1:4], RIGHT[5:7], 10),
    ("some accepted", [*RIGHT[1:3], 95], RIGHT[5:7], 9),
    ("none accepted, and drafts for where the sequence really is", [95] * 3, RIGHT[2:4], 7),
]


@pytest.mark.parametrize(
    ("first", "second", "length"), [case[1:] for case in VERIFIED], ids=[case[0] for case in VERIFIED]
)
def test_drafts_behind_an_unanswered_verification_are_compared_from_where_it_ends(
    h: Harness, device: DeferredBackend, first: list[int], second: list[int], length: int
) -> None:
    """Two sequences, so that pages that are given back are another's next ones."""
    h.begin(opening(1, PROMPT), opening(2, [1, 2])).finish()
    ahead = h.begin(row(1, 6, drafts=first), row(2, 2))
    behind = h.begin(bounded(1, 10, second), row(2, 3, drafts=[95, 95]))
    after = h.begin(bounded(1, 13), bounded(2, 6))
    assert device.open_lengths == 3
    answers = [step.finish().rows for step in (ahead, behind, after)]
    assert answers[0][0].kv_length == length
    emitted = [token for rows in answers for token in rows[0].tokens]
    assert emitted == RIGHT[1 : answers[2][0].kv_length - 5]
    assert [rows[1].tokens for rows in answers] == [[t] for t in continuation([1, 2], 4)[1:]]
    assert h.engine.store.pages.owned == sum(-(-rows.kv_length // 4) for rows in answers[2])
    h.engine.store.check()


def test_a_step_waits_where_only_the_bound_does_not_fit() -> None:
    """Into the context, or into the pages: then it is as if the drafts had been answered first."""
    for bounds, drafts in ((limits(context_length=16), [95] * 6), (limits(total_pages=3), [95] * 2)):
        h = Harness(bounds, DeferredBackend(bounds.context_length))
        h.begin(opening(1, PROMPT)).finish()
        ahead = h.begin(row(1, 6, drafts=drafts))
        behind = h.begin(bounded(1, 7 + len(drafts), [95] * 3))
        assert ahead.result is not None
        assert tokens_of(behind) == [[RIGHT[2]]]
        h.engine.store.check()


def test_a_row_may_come_again_while_the_lost_one_is_under_way(h: Harness, device: DeferredBackend) -> None:
    h.begin(opening(1, PROMPT)).finish()
    device.poisoned = {continuation(PROMPT, 1)[0]}
    failed, lost = h.begin(row(1, 6)), h.begin(row(1, 7))
    failed.finish()
    device.poisoned = set()
    again = h.begin(row(1, 6))
    assert tokens_of(again) == [continuation(PROMPT, 2)[1:]]
    assert refusal_of(lost).reason is Reason.KV_LENGTH


def test_no_row_continues_a_lost_one(h: Harness, device: DeferredBackend) -> None:
    h.begin(opening(1, PROMPT)).finish()
    device.poisoned = {continuation(PROMPT, 1)[0]}
    failed, lost = h.begin(row(1, 6)), h.begin(row(1, 7))
    failed.finish()
    assert lost.result is None
    assert refusal_of(h.begin(row(1, 8))).message == "rows.kv_lengths[0]: expected 8, is 6"


def test_an_opening_that_is_not_finite_lets_go_of_its_hit_in_its_own_reply(
    h: Harness, device: DeferredBackend
) -> None:
    h.begin(opening(1, PROMPT), opening(2, [1, 2])).finish()
    h.begin(ops=(Release((1,)),)).finish()
    device.poisoned = {66}
    failed, behind = h.begin(opening(3, [*PROMPT[:4], 66])), h.begin(row(2, 2))
    assert failed.result is None
    replies = [step.finish() for step in (failed, behind)]
    assert [(reply.free_pages, reply.evictable_pages) for reply in replies] == [(62, 1), (62, 1)]


def test_a_row_behind_an_opening_that_is_not_finite_finds_no_sequence(
    h: Harness, device: DeferredBackend
) -> None:
    device.poisoned = {66}
    failed, lost = h.begin(opening(1, [3] * 8 + [66])), h.begin(row(1, 9))
    assert refusal_of(lost) == Refusal(Reason.CACHE, "rows.cache_ids[0]: unknown or released cache 1")
    assert refusal_of(failed).reason is Reason.NOT_FINITE
    assert (h.engine.store.count, h.engine.store.pages.owned, h.engine.store.pages.cached) == (0, 0, 0)
    device.poisoned = set()
    again = h.begin(opening(1, [3] * 8 + [66])).finish().rows[0]
    assert (again.cached_length, again.refusal) == (0, None), "the id is free, and nothing was published"


def test_a_replay_finds_the_reply_of_a_step_that_is_under_way(h: Harness, device: DeferredBackend) -> None:
    session = h.engine.open_session(0, 0, "").id
    first = h.begin(opening(1, PROMPT), session=session, step_id=1)
    second = h.begin(row(1, 6), session=session, step_id=2)
    again = h.begin(row(1, 6), session=session, step_id=2)
    assert again.finish() is second.finish()
    assert h.begin(opening(1, PROMPT), session=session, step_id=1).finish() is first.finish()
    assert device.launches == 2
    h.begin(row(1, 7), session=session, step_id=3)
    with pytest.raises(RequestRefused, match="expected 4, is 5"):
        h.begin(row(1, 8), session=session, step_id=5)


def penalized(cache_id: int, tokens: list[int], limit: int = 0) -> Opening:
    return replace(opening(cache_id, tokens, limit), sampling=PENALTY)


def bounded(cache_id: int, kv_length: int, drafts: list[int] | None = None) -> Row:
    """A row that gives an upper bound of its length."""
    return replace(row(cache_id, kv_length, drafts=drafts), is_bound=True)


PLAIN = row(1, 6)
WAITING: list[tuple[str, Row | Opening, StepPlan]] = [
    ("given tokens", PLAIN, plan(row(1, 7, tokens=[1]))),
    ("several steps", PLAIN, plan(row(1, 7, steps=2))),
    ("behind drafts", row(1, 6, drafts=[1, 2]), plan(row(1, 7))),
    ("behind drafts, all of them foreseen", row(1, 6, drafts=[1, 2]), plan(row(1, 9))),
    ("behind drafts, with too low a bound", row(1, 6, drafts=[1, 2]), plan(bounded(1, 8))),
    ("behind drafts, up to the context", row(1, 6, drafts=[1] * 20), plan(bounded(1, 27, [1] * 230))),
    ("tokens behind drafts", row(1, 6, drafts=[1, 2]), plan(row(1, 7, tokens=[1]))),
    (
        "behind drafts that nobody asked for",
        row(1, 6, drafts=[1, 2], output=OutputMode.NONE),
        plan(row(1, 9)),
    ),
    ("several steps of another", PLAIN, plan(row(2, 2, steps=3))),
    ("behind several steps", row(1, 6, steps=2), plan(row(2, 2))),
    ("behind top-k", row(1, 6, output=OutputMode.TOP_K, top_k=2), plan(row(1, 7, tokens=[1]))),
    ("truncate", PLAIN, plan(row(2, 2), ops=(Truncate(1, 3),))),
    ("fork", PLAIN, plan(row(2, 2), ops=(fork(1, 9, 3),))),
    ("release of an opening", opening(8, PROMPT), plan(row(2, 2), ops=(Release((8,)),))),
    ("release of a page", row(4, 7), plan(row(2, 2), ops=(Release((4,)),))),
    ("release of drafts", row(1, 6, drafts=[1]), plan(row(2, 2), ops=(Release((1,)),))),
    ("a page to be shared", opening(8, [9] * 5), plan(opening(9, [9] * 8))),
    ("a refused row", PLAIN, plan(row(1, 6))),
    ("no rows", PLAIN, plan(ops=(Release((2,)),))),
]


def prepared(h: Harness) -> None:
    openings = opening(1, PROMPT), opening(2, [1, 2]), penalized(3, [1, 2, 3]), opening(4, [4] * 7)
    h.begin(*openings).finish()


@pytest.mark.parametrize(
    ("first", "second"), [case[1:] for case in WAITING], ids=[case[0] for case in WAITING]
)
def test_a_step_waits_where_the_other_could_change_it(
    h: Harness, first: Row | Opening, second: StepPlan
) -> None:
    alone = Harness()
    for harness in (h, alone):
        prepared(harness)
    ahead = h.begin(first)
    behind = begin(h.engine, second)
    assert ahead.result is not None
    h.engine.store.check()
    expected = [
        execute(alone.engine, plan(first)),
        execute(alone.engine, second),
    ]
    for step, answer in zip((ahead, behind), expected, strict=True):
        assert [(r.kv_length, r.tokens, r.refusal) for r in step.finish().rows] == [
            (r.kv_length, r.tokens, r.refusal) for r in answer.rows
        ]
        assert step.finish().ops == answer.ops


GOING: list[tuple[str, Row | Opening, StepPlan]] = [
    ("drafts", PLAIN, plan(row(1, 7, drafts=[1]))),
    ("a bound", PLAIN, plan(bounded(1, 9))),
    ("behind drafts", row(1, 6, drafts=[1, 2]), plan(bounded(1, 9))),
    ("drafts behind drafts", row(1, 6, drafts=[1, 2]), plan(bounded(1, 9, [3] * 8))),
    ("drafts behind a chunk", opening(8, [8] * 6, limit=3), plan(row(8, 3, drafts=[1]))),
    ("drafts of another", PLAIN, plan(row(2, 2, drafts=[1]))),
    ("behind drafts of another", row(1, 6, drafts=[1, 2]), plan(row(2, 2))),
    ("penalties", row(3, 3), plan(row(3, 4))),
    ("penalties of another", PLAIN, plan(row(3, 3))),
    ("truncate of another", PLAIN, plan(row(1, 7), ops=(Truncate(2, 1),))),
    ("release", PLAIN, plan(row(2, 2), ops=(Release((1, 77)),))),
    ("an opening", PLAIN, plan(row(1, 7), opening(9, [9] * 8))),
    ("all logits", PLAIN, plan(row(1, 7, output=OutputMode.FULL))),
    ("behind a chunk", penalized(8, [8] * 6, limit=3), plan(row(8, 3))),
    ("a page that is too long to share", opening(8, [9] * 5), plan(opening(9, [9] * 4))),
    ("a page with other salt", opening(8, [9] * 5), plan(opening(9, [9] * 5, salt=b"s"))),
    ("a page that stays private", opening(8, [9] * 9, limit=4), plan(opening(9, [9] * 9))),
    ("nothing sampled", PLAIN, plan(row(1, 7, output=OutputMode.NONE))),
]


@pytest.mark.parametrize(("first", "second"), [case[1:] for case in GOING], ids=[case[0] for case in GOING])
def test_a_step_goes_on_where_the_other_can_change_nothing(
    h: Harness, first: Row | Opening, second: StepPlan
) -> None:
    prepared(h)
    ahead = h.begin(first)
    behind = begin(h.engine, second)
    assert (ahead.result, behind.result) == (None, None)
    assert behind.finish().rows[0].refusal is None
    h.engine.store.check()


def test_no_row_is_refused_for_pages_that_drafts_give_back() -> None:
    h = Harness(limits(total_pages=5), DeferredBackend())
    h.begin(opening(1, PROMPT), opening(2, [1, 2, 3, 4])).finish()
    rejected, needy = h.begin(row(1, 6, drafts=[95, 95])), h.begin(row(2, 4))
    assert rejected.result is None, "there are pages for both"
    assert tokens_of(needy) == [continuation([1, 2, 3, 4], 2)[1:]]
    tight = Harness(limits(total_pages=3), DeferredBackend())
    tight.begin(opening(1, [1, 2, 3]), opening(2, [1, 2, 3, 4])).finish()
    rejected, needy = tight.begin(row(1, 3, drafts=[95])), tight.begin(row(2, 4))
    assert rejected.result is not None
    assert tokens_of(needy) == [continuation([1, 2, 3, 4], 2)[1:]]


def test_a_reply_knows_nothing_of_what_was_begun_behind_it(h: Harness) -> None:
    first = h.begin(opening(1, PROMPT))
    second = h.begin(row(1, 6), opening(2, [9] * 20))
    assert first.finish().free_pages == 62
    assert second.finish().free_pages == 57


JOBS: list[Callable[[Harness], object]] = [
    lambda h: h.engine.close_session(h.engine.open_session(0, 0, "").id),
    lambda h: run(h.engine.forward_once([], frozenset())),
]


@pytest.mark.parametrize("job", JOBS)
def test_other_jobs_find_nothing_under_way(
    h: Harness, device: DeferredBackend, job: Callable[[Harness], object]
) -> None:
    step = h.begin(opening(1, PROMPT))
    job(h)
    assert not device.unanswered
    assert step.result is not None
    h.engine.store.check()


@pytest.mark.parametrize("own", [False, True], ids=["session 0", "own session"])
def test_no_lease_runs_out_while_its_step_is_under_way(h: Harness, own: bool) -> None:
    session = h.engine.open_session(0, 500, "").id if own else 0
    step = h.begin(opening(1, PROMPT), session=session, step_id=int(own))
    h.clock.now_s = 100.0
    assert h.engine.expire() == 0
    assert step.result is None
    h.clock.now_s = 200.0
    assert step.finish().rows[0].refusal is None
    assert h.engine.expire() == 0
    h.clock.now_s = 300.0
    assert h.engine.expire() == 1


def test_a_lease_begins_anew_when_its_step_is_done(
    h: Harness, device: DeferredBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = device.compute

    def late(rows: list[ForwardRow]) -> list[RowOutput]:
        h.clock.now_s = 100.0
        return compute(rows)

    monkeypatch.setattr(device, "compute", late)
    assert h.begin(opening(1, PROMPT)).finish().rows[0].refusal is None
    assert h.engine.expire() == 0


def test_leases_run_out_beside_a_step_that_is_under_way(h: Harness) -> None:
    h.begin(opening(1, PROMPT)).finish()
    h.clock.now_s = 100.0
    step = h.begin(opening(2, PROMPT))
    assert h.engine.expire() == 1
    assert step.result is None
    h.engine.store.check()


def test_the_times_of_steps_under_way_do_not_overlap(h: Harness) -> None:
    began_s = time.perf_counter()
    steps = [h.begin(opening(1, PROMPT)), *(h.begin(row(1, n)) for n in range(6, 30))]
    steps[-1].finish()
    assert 0 < h.engine.counters.compute_s <= time.perf_counter() - began_s
    assert sum(step.finish().compute_us for step in steps) <= h.engine.counters.compute_s * 1e6


def test_a_backend_that_computes_at_once_leaves_nothing_under_way() -> None:
    assert Harness().begin(opening(1, PROMPT)).result is not None
