"""Ops of a step: applied in order, and before its rows."""

import grpc
import pytest

from tests.conformance.kit.client import Row, Sequence, Session, fork, release, truncate
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.judge import Judge


def test_a_step_may_hold_ops_alone(session: Session, draw: Draw) -> None:
    sequence = session.open(draw.prompt())
    reply = session.step(ops=[truncate(sequence.id, 3), release(sequence.id)])
    assert (reply.ops[0].kv_length, reply.ops[1].released) == (3, 1)
    assert reply.rows == []


def test_a_row_finds_what_the_steps_truncate_left(session: Session, draw: Draw, judge: Judge) -> None:
    sequence = session.open(draw.prompt())
    length = sequence.n - 4
    row = Row(sequence.id, length, tokens=draw.tokens(2))
    reply = session.step([row], ops=[truncate(sequence.id, length)])
    sequence.cached, sequence.pending = sequence.cached[:length], []
    sequence.took(row, reply.rows[0])
    judge.check(sequence, outputs=1)


@pytest.mark.needs("FORK")
def test_a_row_finds_what_the_steps_fork_made(session: Session, draw: Draw, judge: Judge) -> None:
    source = session.open(draw.prompt())
    length, copy_id = source.n - 1, session.new_id()
    rows = [source.row(), Row(copy_id, length, tokens=draw.tokens(1))]
    reply = session.step(rows, ops=[fork(source.id, copy_id, length)])
    assert reply.ops[0].kv_length == length
    known = source.cached[:length]
    source.took(rows[0], reply.rows[0])
    judge.check(source)
    assert reply.rows[1].kv_length == length + 1
    judge.check_tokens([*known, *rows[1].tokens, *reply.rows[1].tokens], length + 1)


def test_a_row_for_a_cache_that_the_step_releases_is_not_found(session: Session, draw: Draw) -> None:
    sequence = session.open(draw.prompt())
    reply = session.step([sequence.row()], ops=[release(sequence.id)])
    assert reply.rows[0].code is grpc.StatusCode.NOT_FOUND


@pytest.mark.needs("FORK")
def test_ops_come_in_order(session: Session, draw: Draw, judge: Judge) -> None:
    """Fork, then cut the source, then release it: each sees what the one before it left."""
    source = session.open(draw.prompt())
    copy_id = session.new_id()
    ops = [
        fork(source.id, copy_id, source.n - 2),
        truncate(source.id, 1),
        fork(source.id, session.new_id(), 2),  # no longer that long
        release(source.id),
        truncate(source.id, 0),  # no longer there
    ]
    reply = session.step(ops=ops)
    codes = [op.code for op in reply.ops]
    assert codes[:2] == [grpc.StatusCode.OK] * 2
    assert codes[2:] == [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND]
    copy = Sequence(session, session.opening(source.cached[:-2], cache_id=copy_id))
    copy.cached, copy.pending = source.cached[:-2], []
    copy.feed(tokens=draw.tokens(1))
    judge.check(copy, outputs=1)


def test_pages_released_by_an_op_serve_the_same_steps_opening(
    session: Session, draw: Draw, judge: Judge
) -> None:
    """The pool may be full: what an op gives back is there for the rows."""
    old = session.open(draw.prompt())
    opening = session.opening(draw.prompt())
    reply = session.step(openings=[opening], ops=[release(old.id)])
    judge.check(Sequence(session, opening).took_opening(reply.rows[0]))


def test_releasing_is_idempotent(session: Session, draw: Draw) -> None:
    kept, gone = session.open(draw.prompt()), session.open(draw.prompt())
    assert session.release(gone, gone) == 1
    assert session.release(gone) == 0
    assert session.release(kept) == 1
