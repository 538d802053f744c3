"""StreamUnifiedDecode: steps in order, several in flight, and no error that ends the stream."""

import grpc
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import Executor, Session, truncate
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.judge import Judge
from tests.conformance.kit.pipe import Pipe
from tests.conformance.kit.reply import CODES, unpack


def test_a_stream_of_decodes_equals_unary_ones(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    sequence, pipe = session.open(draw.prompt()), Pipe(executor)
    for step_id in range(1, 6):
        row = sequence.row()
        pipe.send(session.plan([row], step_id=step_id))
        response = pipe.receive()
        assert not response.HasField("error")
        assert response.result.step_id == step_id
        sequence.took(row, unpack(response.result, 0).rows[0])
    assert pipe.close() == []
    judge.check(sequence)


def test_steps_sent_ahead_are_computed_in_order(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    """No token crosses: each row goes on from what the executor itself sampled. More than fit in flight."""
    sequence, pipe = session.open(draw.prompt()), Pipe(executor)
    count = 3 * executor.limits.max_in_flight
    rows = [sequence.row(kv_length=sequence.n + i) for i in range(count)]
    for step_id, row in enumerate(rows, start=1):
        pipe.send(session.plan([row], step_id=step_id))
    responses = [pipe.receive() for _ in rows]
    assert [response.result.step_id for response in responses] == list(range(1, count + 1))
    for row, response in zip(rows, responses, strict=True):
        sequence.took(row, unpack(response.result, 0).rows[0])
    pipe.close()
    judge.check(sequence)


@pytest.mark.needs("MULTI_STEP")
def test_rows_with_steps_cross_a_stream_as_they_cross_unary_calls(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    sequences, pipe = [session.open(draw.prompt()) for _ in range(2)], Pipe(executor)
    for steps in ((3, 1), (1, 4), (2, 2)):
        rows = [sequence.row(steps=k) for sequence, k in zip(sequences, steps, strict=True)]
        pipe.send(session.plan(rows))
        answers = unpack(pipe.receive().result, 0).rows
        assert [len(answer.tokens) for answer in answers] == list(steps)
        for sequence, row, answer in zip(sequences, rows, answers, strict=True):
            sequence.took(row, answer)
    pipe.close()
    for sequence in sequences:
        judge.check(sequence)


def test_a_step_refused_as_a_whole_is_a_reply_and_the_stream_lives(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    sequence, pipe = session.open(draw.prompt()), Pipe(executor)
    row = sequence.row()
    misshapen = pb.Step(header=session.header(1), rows=pb.Rows(cache_ids=[sequence.id]))
    stranger = pb.Step(header=pb.StepHeader(session_id=session.id ^ 1 or 2))
    refusals = [
        (misshapen, grpc.StatusCode.INVALID_ARGUMENT),
        (stranger, grpc.StatusCode.NOT_FOUND),
        (session.plan([row], step_id=9), grpc.StatusCode.FAILED_PRECONDITION),
        (session.plan([row], step_id=1, epoch=executor.info.epoch ^ 1), grpc.StatusCode.FAILED_PRECONDITION),
    ]
    for step, _ in refusals:
        pipe.send(step)
    pipe.send(session.plan([row], step_id=1))
    for step, code in refusals:
        response = pipe.receive()
        error = response.error
        assert CODES[error.code] is code
        assert error.message
        assert error.reason != pb.ERROR_REASON_UNSPECIFIED
        assert response.step_id == step.header.step_id
    sequence.took(row, unpack(pipe.receive().result, 0).rows[0])
    assert pipe.close() == []
    judge.check(sequence)


def test_a_bad_row_on_a_stream_is_that_rows_error(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    sequence, pipe = session.open(draw.prompt()), Pipe(executor)
    rows = [sequence.row(), sequence.row(cache_id=session.new_id())]
    pipe.send(session.plan(rows))
    reply = unpack(pipe.receive().result, 0)
    assert reply.rows[1].code is grpc.StatusCode.NOT_FOUND
    sequence.took(rows[0], reply.rows[0])
    pipe.close()
    judge.check(sequence)


def test_an_op_never_races_the_steps_around_it(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    sequence, pipe = session.open(draw.prompt()), Pipe(executor)
    n, back = sequence.n, draw.tokens(1)
    pipe.send(session.plan([sequence.row()]))
    pipe.send(session.plan([sequence.row(kv_length=n - 2, tokens=back)], ops=[truncate(sequence.id, n - 2)]))
    pipe.send(session.plan([sequence.row(kv_length=n - 1)]))
    replies = [unpack(pipe.receive().result, 0).rows[0] for _ in range(3)]
    pipe.close()
    assert [reply.kv_length for reply in replies] == [n + 1, n - 1, n]
    known = sequence.cached[: n - 2] + back + replies[1].tokens + replies[2].tokens
    judge.check_tokens(known, n - 1, prompt_length=sequence.prompt_length)


def test_two_streams_of_two_sessions_do_not_wait_for_each_other(
    executor: Executor, session: Session, draw: Draw, judge: Judge
) -> None:
    other = executor.open_session()
    pairs = [(s.open(draw.prompt()), Pipe(executor)) for s in (session, other)]
    for _ in range(4):
        for sequence, pipe in pairs:
            pipe.send(sequence.session.plan([sequence.row()]))
        for sequence, pipe in reversed(pairs):
            sequence.took(sequence.row(), unpack(pipe.receive().result, 0).rows[0])
    for sequence, pipe in pairs:
        pipe.close()
        judge.check(sequence)
    other.close()
