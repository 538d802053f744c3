"""Clients that leave in the middle of a step: it is done, or it never was, and its id tells which.

When a client leaves is a matter of time, so both outcomes are right, but nothing between them. What is sent
again is answered either way: with the reply that was kept, or by a step that finds everything as it was.
"""

import threading
from collections.abc import Iterator

import grpc
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.adapters import Adapters
from tests.conformance.kit.client import Executor, Sequence, Session, fork, truncate
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.expect import refused
from tests.conformance.kit.judge import Judge
from tests.conformance.kit.leave import Leave, cancelled, expired, running, settle
from tests.conformance.kit.target import BACKENDS, SLOW

TARGETS = (*BACKENDS, SLOW)
LONGEST = 2000  # tokens; more would only take longer

leaving = pytest.mark.parametrize("leave", [cancelled, expired])


@pytest.fixture
def long(executor: Executor, draw: Draw) -> list[int]:
    """A prompt that takes as long as one can, beside some others."""
    limits, context = executor.limits, executor.info.model.context_length
    room = limits.total_pages * limits.page_size // 2
    return draw.tokens(min(context - 30, limits.max_step_tokens - 30, room, LONGEST))


@leaving
@pytest.mark.needs("FORK")
def test_a_step_with_an_id_is_replayed_or_changes_nothing_and_is_sent_again(
    executor: Executor, session: Session, draw: Draw, judge: Judge, long: list[int], leave: Leave
) -> None:
    decoding, cut = session.open(draw.prompt()), session.open(draw.prompt())
    copy = session.new_id()
    row, opening = decoding.row(), session.opening(long)
    ops = [truncate(cut.id, 5), fork(cut.id, copy, 4)]
    step = session.plan([row], [opening], ops, step_id=1)
    before, caches = settle(session), executor.caches(session.id)
    leave(executor, "UnifiedDecode", pb.UnifiedDecodeRequest(step=step))
    after = settle(session)
    if after.sequences == before.sequences:
        assert after.cache.owned_pages == before.cache.owned_pages, "pages were changed by what never was"
        assert executor.caches(session.id) == caches
    else:
        assert after.sequences == before.sequences + 2, "half of the step was done"

    reply = executor.step(step)
    assert [op.code for op in reply.ops] == [grpc.StatusCode.OK] * 2
    assert executor.step(step).raw == reply.raw
    decoding.took(row, reply.rows[0])
    opened = Sequence(session, opening).took_opening(reply.rows[1])
    copied = Sequence(session, pb.Opening(cache_id=copy))
    copied.cached, cut.cached, cut.pending = cut.cached[:4], cut.cached[:5], []
    for sequence in (cut, copied):
        sequence.feed(tokens=draw.tokens(2))
        judge.check(sequence, outputs=1)
    next_row = opened.row()
    opened.took(next_row, executor.step(session.plan([next_row], step_id=2)).rows[0])
    for sequence in (decoding, opened):
        judge.check(sequence)


@leaving
def test_the_id_behind_it_is_taken_only_if_it_was_done(
    executor: Executor, session: Session, draw: Draw, judge: Judge, long: list[int], leave: Leave
) -> None:
    decoding = session.open(draw.prompt())
    before = settle(session)
    leave(
        executor, "Prefill", pb.PrefillRequest(step=session.plan(openings=[session.opening(long)], step_id=1))
    )
    done = settle(session).sequences > before.sequences
    row = decoding.row()
    behind = session.plan([row], step_id=2)
    if done:
        decoding.took(row, executor.step(behind).rows[0])
    else:
        assert refused(executor.step, behind) is grpc.StatusCode.FAILED_PRECONDITION
    decoding.decode(1)
    judge.check(decoding)


@leaving
def test_a_prefill_leaves_a_complete_cache_or_none(
    executor: Executor, session: Session, judge: Judge, long: list[int], leave: Leave
) -> None:
    opening = session.opening(long)
    before = settle(session)
    leave(executor, "Prefill", pb.PrefillRequest(step=session.plan(openings=[opening])))
    after = settle(session)
    sequence = Sequence(session, opening)
    if after.sequences == before.sequences:
        assert after.cache.owned_pages == before.cache.owned_pages
        sequence.took_opening(session.step(openings=[opening], rpc="Prefill").rows[0])
    else:
        sequence.cached, sequence.pending = list(long), []
        # Which token is pending only the lost reply says: a client that left gives its own.
        sequence.truncate(len(long) - 1)
        sequence.feed(tokens=long[-1:])
    sequence.decode(2)
    judge.check(sequence)


@leaving
@pytest.mark.needs("MULTI_STEP")
def test_a_row_of_several_steps_takes_all_or_none(
    executor: Executor, session: Session, draw: Draw, judge: Judge, leave: Leave
) -> None:
    sequence, steps = session.open(draw.prompt()), executor.limits.max_steps
    row = sequence.row(steps=steps)
    step = session.plan([row], step_id=1)
    leave(executor, "BatchDecode", pb.BatchDecodeRequest(step=step))
    settle(session)
    probe = session.step([sequence.row(kv_length=sequence.n + steps + 1)])
    assert probe.rows[0].code is grpc.StatusCode.FAILED_PRECONDITION
    sequence.took(row, executor.step(step, "BatchDecode").rows[0])
    assert len(sequence.emitted) == 1 + steps
    sequence.decode(1)
    judge.check(sequence)


@leaving
def test_a_chunk_is_whole_or_none(
    executor: Executor, session: Session, judge: Judge, long: list[int], leave: Leave
) -> None:
    sequence = session.open(long, limit=1)
    row = sequence.row(limit=len(long) - 3)
    step = session.plan([row], step_id=1)
    leave(executor, "Prefill", pb.PrefillRequest(step=step))
    settle(session)
    sequence.took(row, executor.step(step, "Prefill").rows[0])
    assert sequence.n == len(long) - 2
    sequence.feed("Prefill")
    judge.check(sequence)


def test_a_step_is_done_for_one_who_replays_it_whoever_else_leaves(
    executor: Executor, session: Session, judge: Judge, long: list[int]
) -> None:
    opening = session.opening(long)
    request = pb.PrefillRequest(step=session.plan(openings=[opening], step_id=1))
    first, second = (executor.begin("Prefill", request) for _ in range(2))
    while not first.done() and not running(executor):
        pass
    first.cancel()
    reply = second.result().result
    assert executor.call("Prefill", request).result == reply
    sequence = Sequence(session, opening)
    sequence.took_opening(executor.step(request.step, "Prefill").rows[0])
    sequence.decode(1)
    judge.check(sequence)


def test_closing_a_stream_cancels_nothing(
    executor: Executor, session: Session, judge: Judge, long: list[int]
) -> None:
    opening = session.opening(long)
    step = session.plan(openings=[opening], step_id=1)
    before = settle(session)
    stream = executor.stream(_hold(step))
    while not running(executor) and executor.status().sequences == before.sequences:
        pass
    stream.cancel()  # type: ignore[attr-defined]
    after = settle(session)
    assert after.sequences == before.sequences + 1
    sequence = Sequence(session, opening)
    sequence.took_opening(executor.step(step).rows[0])
    assert executor.status().tokens_computed == after.tokens_computed, "it was computed again"
    sequence.decode(1)
    judge.check(sequence)


@pytest.mark.needs("FORWARD")
def test_forward_and_warmup_may_be_left(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    sequence = session.open(draw.prompt())
    before = settle(session)
    count = max(1, min(executor.limits.max_rows, executor.limits.max_step_tokens // 20))
    inputs = [pb.ForwardInput(tokens=draw.tokens(20)) for _ in range(count)]
    cancelled(executor, "Forward", pb.ForwardRequest(inputs=inputs, outputs=[pb.FORWARD_OUTPUT_EMBEDDING]))
    cancelled(executor, "Warmup", pb.WarmupRequest())
    assert settle(session).cache == before.cache
    sequence.decode(2)
    judge.check(sequence)


def _hold(step: pb.Step) -> Iterator[pb.Step]:
    """A client that sends one step and then stays."""
    yield step
    threading.Event().wait(5)


@leaving
@pytest.mark.needs("ADAPTERS")
def test_a_prefill_that_never_was_holds_no_slot(
    executor: Executor, session: Session, draw: Draw, long: list[int], leave: Leave
) -> None:
    if not executor.adapters:
        pytest.skip("which adapters can be loaded is not known; --adapters says")
    adapters = Adapters(executor, executor.adapters)
    adapter = adapters.load(adapters.paths[0])
    opening = session.opening(long, adapter=adapter.fingerprint)
    leave(executor, "Prefill", pb.PrefillRequest(step=session.plan(openings=[opening])))
    after = settle(session)
    adapters.close()
    assert after.adapters.used_slots == after.sequences
