"""step_id: a step is done once, however often it is sent."""

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import Executor, Session, truncate
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.expect import refused
from tests.conformance.kit.judge import Judge

INVALID = grpc.StatusCode.INVALID_ARGUMENT
OUT_OF_ORDER = grpc.StatusCode.FAILED_PRECONDITION


def test_an_exact_replay_gets_the_stored_reply_and_changes_nothing(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    sequence = session.open(draw.prompt())
    step = session.plan([sequence.row()], [session.opening(draw.prompt())], step_id=1)
    first = executor.step(step)
    before = executor.status()
    for _ in range(3):
        assert executor.step(step).raw == first.raw
    after = executor.status()
    assert after.sequences == before.sequences
    assert after.tokens_sampled == before.tokens_sampled
    sequence.took(sequence.row(), first.rows[0])
    sequence.decode(3)
    judge.check(sequence)


def test_a_replayed_op_is_not_applied_again(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    """The cache grows after the cut; a replay of the cut must leave it alone."""
    sequence = session.open(draw.prompt())
    cut = session.plan(ops=[truncate(sequence.id, 4)], step_id=1)
    executor.step(cut)
    sequence.cached, sequence.pending = sequence.cached[:4], []
    sequence.feed(tokens=draw.tokens(3))
    assert executor.step(cut).ops[0].kv_length == 4
    sequence.decode(2)
    judge.check(sequence, outputs=3)


@pytest.mark.needs("MULTI_STEP")
@pytest.mark.needs("VERIFY")
def test_steps_and_verify_rows_are_replayed_too(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    sequence = session.open(draw.prompt())
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("BatchDecode", {"steps": 3}),
        ("ForwardVerify", {"drafts": draw.tokens(3)}),
    ]
    for step_id, (rpc, fields) in enumerate(kinds, start=1):
        row = sequence.row(**fields)
        step = session.plan([row], step_id=step_id)
        replies = [executor.step(step, rpc) for _ in range(2)]
        assert replies[0].raw == replies[1].raw
        sequence.took(row, replies[0].rows[0])
    sequence.decode(2)
    judge.check(sequence)


def test_a_replay_of_a_running_step_joins_it(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    sequence = session.open(draw.prompt())
    request = pb.UnifiedDecodeRequest(step=session.plan([sequence.row()], step_id=1))
    calls = [executor.begin("UnifiedDecode", request) for _ in range(4)]
    results = [call.result().result for call in calls]
    assert all(result == results[0] for result in results)
    sequence.cached += sequence.pending
    sequence.pending = list(results[0].rows.tokens)
    sequence.emitted += sequence.pending
    sequence.decode(2)
    judge.check(sequence)


def test_the_same_id_with_other_content_is_refused(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    sequence = session.open(draw.prompt())
    row = sequence.row()
    reply = executor.step(session.plan([row], step_id=1))
    sequence.took(row, reply.rows[0])
    assert refused(executor.step, session.plan([sequence.row()], step_id=1)) is INVALID
    assert refused(executor.step, session.plan(ops=[truncate(sequence.id, 0)], step_id=1)) is INVALID
    sequence.decode(1)
    judge.check(sequence)


def test_the_span_is_no_part_of_a_steps_content(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    if executor.info.contract_revision < 4:
        pytest.skip("traceparent came with revision 4")
    sequence = session.open(draw.prompt())
    row = sequence.row()
    step = session.plan([row], step_id=1)
    replies = []
    for span in ("", f"00-{'ab' * 16}-{'cd' * 8}-01", "no traceparent"):
        step.header.traceparent = span
        replies.append(executor.step(step).raw)
    assert replies == [replies[0]] * 3
    sequence.took(row, executor.step(step).rows[0])
    too_long = session.plan([sequence.row()], step_id=2)
    too_long.header.traceparent = "0" * 129
    assert refused(executor.step, too_long) is INVALID
    sequence.decode(1)
    judge.check(sequence)


@pytest.mark.parametrize("step_id", [2, 2**64 - 1])
def test_a_gap_is_refused(
    executor: Executor, session: Session, draw: Draw, judge: Judge, step_id: int
) -> None:
    sequence = session.open(draw.prompt())
    row = sequence.row()
    assert refused(executor.step, session.plan([row], step_id=step_id)) is OUT_OF_ORDER
    sequence.took(row, executor.step(session.plan([row], step_id=1)).rows[0])
    judge.check(sequence)


def test_the_last_replies_are_kept_and_older_ones_forgotten(
    executor: Executor, session: Session, draw: Draw
) -> None:
    sequence = session.open(draw.prompt())
    kept = session.opened.max_in_flight
    steps, replies = [], []
    for step_id in range(1, kept + 3):
        row = sequence.row()
        steps.append(session.plan([row], step_id=step_id))
        reply = executor.step(steps[-1])
        sequence.took(row, reply.rows[0])
        replies.append(reply.raw)
    for step, raw in zip(steps[-kept:], replies[-kept:], strict=True):
        assert executor.step(step).raw == raw
    for step in steps[:-kept]:
        assert refused(executor.step, step) is OUT_OF_ORDER


def test_a_refused_step_does_not_use_its_id_up(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    sequence = session.open(draw.prompt())
    row = sequence.row()
    misshapen = pb.Step(header=session.header(1), rows=pb.Rows(cache_ids=[sequence.id]))
    stale = session.plan([row], step_id=1, epoch=executor.info.epoch ^ 1)
    assert refused(executor.step, misshapen) is INVALID
    assert refused(executor.step, stale) is OUT_OF_ORDER
    sequence.took(row, executor.step(session.plan([row], step_id=1)).rows[0])
    judge.check(sequence)


def test_a_step_whose_rows_all_failed_is_replayed_as_such(
    executor: Executor, session: Session, draw: Draw
) -> None:
    sequence = session.open(draw.prompt())
    step = session.plan([sequence.row(kv_length=sequence.n + 1)], step_id=1)
    first = executor.step(step)
    assert first.rows[0].code is grpc.StatusCode.FAILED_PRECONDITION
    sequence.decode(1)  # now the length would be right
    assert executor.step(step).raw == first.raw


def test_unnumbered_steps_come_between_numbered_ones(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    sequence = session.open(draw.prompt())
    for step_id in (1, 0, 2, 0, 0, 3):
        row = sequence.row()
        sequence.took(row, executor.step(session.plan([row], step_id=step_id)).rows[0])
    judge.check(sequence)


def test_each_session_counts_for_itself(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    other = executor.open_session()
    mine, theirs = session.open(draw.prompt()), other.open(draw.prompt())
    for sequence in (mine, theirs):
        row = sequence.row()
        sequence.took(row, executor.step(sequence.session.plan([row], step_id=1)).rows[0])
        judge.check(sequence)
    other.close()


def test_unary_ops_count_like_other_steps(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    sequence = session.open(draw.prompt())
    request = pb.TruncateKvRequest(
        header=session.header(step_id=1), truncate=pb.Truncate(cache_id=sequence.id, length=5)
    )
    first = executor.call("TruncateKv", request)
    sequence.cached, sequence.pending = sequence.cached[:5], []
    sequence.feed(tokens=draw.tokens(2))
    assert executor.call("TruncateKv", request) == first
    row = sequence.row()
    sequence.took(row, executor.step(session.plan([row], step_id=2)).rows[0])
    judge.check(sequence, outputs=2)


def test_a_stream_that_broke_is_taken_up_again_by_replay(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    sequence = session.open(draw.prompt())
    row = sequence.row()
    step = session.plan([row], step_id=1)
    broken = executor.stream(_hold(step))
    first = next(broken)
    broken.cancel()  # type: ignore[attr-defined]
    again = next(executor.stream(iter([step])))
    assert again == first
    sequence.took(row, executor.step(step).rows[0])
    sequence.decode(2)
    judge.check(sequence)


def _hold(step: pb.Step) -> Iterator[pb.Step]:
    """A client that sends one step and then stays."""
    yield step
    threading.Event().wait(5)
