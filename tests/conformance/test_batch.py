"""UnifiedDecode, BatchDecode: rows side by side are the rows alone, and one bad row harms no other."""

from collections.abc import Callable

import grpc
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import Executor, Row, Sequence, Session, decode_together, truncate
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.expect import codes_of, refused
from tests.conformance.kit.judge import Judge


def test_a_batch_decodes_what_each_row_would_alone(
    session: Session, draw: Draw, judge: Judge, executor: Executor
) -> None:
    count = min(5, executor.limits.max_rows)
    sequences = [session.open(draw.prompt()[: 3 + 5 * i]) for i in range(count)]
    decode_together(sequences, 6)
    for sequence in sequences:
        judge.check(sequence)


def test_openings_chunks_decodes_and_catch_ups_share_a_step(
    session: Session, draw: Draw, judge: Judge
) -> None:
    decoding, chunked, behind = session.open(draw.prompt()), session.open(draw.prompt(), limit=3), None
    behind = session.open(draw.short())
    opening = session.opening(draw.prompt())
    rows = [decoding.row(), chunked.row(), behind.row(tokens=draw.tokens(4))]
    reply = session.step(rows, [opening])
    for sequence, row, answer in zip((decoding, chunked, behind), rows, reply.rows, strict=False):
        sequence.took(row, answer)
    opened = Sequence(session, opening).took_opening(reply.rows[3])
    for sequence in (decoding, chunked, behind, opened):
        sequence.decode(2)
        judge.check(sequence, outputs=3)


def test_rows_may_come_in_any_order_and_leave_others_out(session: Session, draw: Draw, judge: Judge) -> None:
    a, b, c = (session.open(draw.prompt()) for _ in range(3))
    for group in ([c, a], [b], [a, b, c], [b, c]):
        decode_together(group, 1)
    for sequence in (a, b, c):
        judge.check(sequence)


def test_identical_prompts_in_one_step_are_different_sequences(
    session: Session, draw: Draw, judge: Judge
) -> None:
    prompt = draw.prompt()
    twins = session.open_all([session.opening(prompt), session.opening(prompt)])
    twins[0].feed(tokens=[draw.other(twins[0].emitted[-1])])
    twins[1].decode(3)
    twins[0].decode(2)
    judge.check(twins[0], outputs=3)
    judge.check(twins[1])


BadRow = Callable[[Session, Sequence, Draw], Row]

BAD_ROWS: dict[str, tuple[BadRow, grpc.StatusCode]] = {
    "unknown cache": (lambda s, q, d: Row(s.new_id(), 3), grpc.StatusCode.NOT_FOUND),
    "wrong KV length": (lambda s, q, d: q.row(kv_length=q.n + 1), grpc.StatusCode.FAILED_PRECONDITION),
    "token beyond the vocabulary": (
        lambda s, q, d: q.row(tokens=[s.executor.vocab]),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    "largest token": (lambda s, q, d: q.row(tokens=[2**32 - 1]), grpc.StatusCode.INVALID_ARGUMENT),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_bad_row_changes_nothing_and_its_neighbours_go_on(
    session: Session, draw: Draw, judge: Judge, bad: str
) -> None:
    make, code = BAD_ROWS[bad]
    left, victim, right = (session.open(draw.prompt()) for _ in range(3))
    for _ in range(2):
        rows = [left.row(), make(session, victim, draw), right.row()]
        reply = session.step(rows)
        assert reply.rows[1].code is code
        left.took(rows[0], reply.rows[0])
        right.took(rows[2], reply.rows[2])
    for sequence in (left, victim, right):
        sequence.decode(2)
        judge.check(sequence)


def test_a_bad_opening_harms_no_row(session: Session, draw: Draw, judge: Judge) -> None:
    running = session.open(draw.prompt())
    openings = [session.opening([]), session.opening(draw.prompt())]
    rows = [running.row()]
    reply = session.step(rows, openings)
    assert reply.rows[1].code is grpc.StatusCode.INVALID_ARGUMENT
    running.took(rows[0], reply.rows[0])
    opened = Sequence(session, openings[1]).took_opening(reply.rows[2])
    for sequence in (running, opened):
        sequence.decode(2)
        judge.check(sequence)


def test_a_bad_op_harms_neither_ops_nor_rows(session: Session, draw: Draw, judge: Judge) -> None:
    running, cut = session.open(draw.prompt()), session.open(draw.prompt())
    rows = [running.row()]
    ops = [truncate(session.new_id(), 0), truncate(cut.id, cut.n + 1), truncate(cut.id, cut.n - 2)]
    reply = session.step(rows, ops=ops)
    codes = [op.code for op in reply.ops]
    assert codes == [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OK]
    assert reply.ops[2].kv_length == cut.n - 2
    running.took(rows[0], reply.rows[0])
    running.decode(2)
    judge.check(running)


def test_two_rows_for_one_cache_are_refused(session: Session, draw: Draw, judge: Judge) -> None:
    sequence = session.open(draw.prompt())
    before = session.executor.status().tokens_sampled
    codes = codes_of(session.executor, session.plan([sequence.row(), sequence.row()]), 2)
    assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * 2
    assert session.executor.status().tokens_sampled == before
    sequence.decode(2)
    judge.check(sequence)


@pytest.mark.parametrize("rpc", ["Decode", "Prefill"])
def test_the_unary_rpcs_answer_a_bad_row_as_their_status(session: Session, draw: Draw, rpc: str) -> None:
    step = session.plan([Row(session.new_id(), 1, tokens=draw.tokens(1))])
    assert refused(session.executor.step, step, rpc) is grpc.StatusCode.NOT_FOUND


def test_defaults_may_be_left_out_of_the_packed_arrays(session: Session, draw: Draw, judge: Judge) -> None:
    a, b = session.open(draw.prompt()), session.open(draw.prompt())
    for _ in range(3):
        lean = pb.Rows(cache_ids=[a.id, b.id], kv_lengths=[a.n, b.n])
        reply = session.executor.step(pb.Step(header=session.header(), rows=lean))
        a.took(a.row(), reply.rows[0])
        b.took(b.row(), reply.rows[1])
    judge.check(a)
    judge.check(b)
