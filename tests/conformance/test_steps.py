"""Rows with steps, in BatchDecode and UnifiedDecode: k tokens in one RPC are k decodes."""

import grpc
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import FULL, Sequence, Session, truncate
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.judge import Judge

pytestmark = pytest.mark.needs("MULTI_STEP")


@pytest.mark.parametrize("steps", [2, 7])
def test_k_steps_are_k_decodes(session: Session, draw: Draw, judge: Judge, steps: int) -> None:
    sequence = session.open(draw.prompt())
    n = sequence.n
    reply = sequence.feed("BatchDecode", steps=steps)
    assert len(reply.tokens) == steps
    assert sequence.n == n + steps
    sequence.decode(3)
    judge.check(sequence)


def test_sampled_steps_use_the_noise_of_their_own_positions(
    session: Session, draw: Draw, judge: Judge
) -> None:
    rules = pb.Sampling(temperature=1.2, seed=draw.seed(), frequency_penalty=0.7)
    sequence = session.open(draw.prompt(), sampling=rules)
    sequence.feed("BatchDecode", steps=6)
    sequence.feed("BatchDecode", steps=3)
    judge.check(sequence)


def test_rows_of_different_steps_share_a_step(session: Session, draw: Draw, judge: Judge) -> None:
    sequences = [session.open(draw.prompt()) for _ in range(3)]
    rows = [s.row(steps=steps) for s, steps in zip(sequences, (4, 1, 6), strict=True)]
    reply = session.step(rows, rpc="BatchDecode")
    assert [len(row.tokens) for row in reply.rows] == [4, 1, 6]
    for sequence, row, answer in zip(sequences, rows, reply.rows, strict=True):
        sequence.took(row, answer)
        sequence.decode(1)
        judge.check(sequence)


@pytest.mark.needs("NATIVE_UNIFIED_DECODE", "VERIFY")
def test_rows_with_steps_go_on_beside_chunks_decodes_verifications_and_openings(
    session: Session, draw: Draw, judge: Judge
) -> None:
    """A draft executor's step: after it, each row is where it would be had it been alone."""
    steps, plain, verified = (session.open(draw.prompt()) for _ in range(3))
    chunked = session.open(long := draw.tokens(40), limit=10)
    opening = session.opening(draw.prompt())
    rows = [
        steps.row(steps=5),
        plain.row(),
        verified.row(drafts=draw.tokens(3)),
        chunked.row(limit=12),
    ]
    reply = session.step(rows, [opening])
    assert [len(row.tokens) for row in reply.rows[:2]] == [5, 1]
    assert reply.rows[3].tokens == []
    for sequence, row, answer in zip((steps, plain, verified, chunked), rows, reply.rows, strict=False):
        sequence.took(row, answer)
    opened = Sequence(session, opening).took_opening(reply.rows[4])
    while chunked.n < len(long):
        chunked.feed("UnifiedDecode")
    for sequence in (steps, plain, verified, chunked, opened):
        sequence.feed("UnifiedDecode", steps=2)
        judge.check(sequence)


def test_steps_after_a_truncation_in_the_same_step(session: Session, draw: Draw, judge: Judge) -> None:
    """What a draft executor does after a draft was wrong: cut, the right token, and on."""
    sequence = session.open(draw.prompt())
    sequence.feed("UnifiedDecode", steps=4)
    n, right = sequence.n - 2, draw.tokens(1)
    row = sequence.row(kv_length=n, tokens=right, steps=3)
    answer = session.step([row], ops=[truncate(sequence.id, n)]).rows[0]
    assert (answer.kv_length, len(answer.tokens)) == (n + 3, 3)
    judge.check_tokens(
        sequence.cached[:n] + right + answer.tokens, n + 1, prompt_length=sequence.prompt_length
    )


def test_steps_behind_tokens_of_the_client(session: Session, draw: Draw, judge: Judge) -> None:
    sequence = session.open(draw.prompt())
    n = sequence.n
    sequence.feed("BatchDecode", tokens=draw.tokens(3), steps=4)
    assert sequence.n == n + 3 + 3
    judge.check(sequence, outputs=4)


def test_a_row_ends_early_at_a_stop_id(session: Session, draw: Draw, judge: Judge) -> None:
    prompt = draw.prompt()
    scout = session.open(prompt)
    scout.decode(6)
    stop = scout.emitted[3]
    sequence = session.open(prompt, sampling=pb.Sampling(stop_token_ids=[stop]))
    expected = scout.emitted.index(stop) + 1
    if expected == 1:  # the very first token: nothing is left to stop
        return
    n = sequence.n
    reply = sequence.feed("BatchDecode", steps=7)
    if judge.exact:
        assert sequence.emitted == scout.emitted[:expected]
    assert sequence.emitted[-1] == stop or len(reply.tokens) == 7
    assert sequence.n == n + len(reply.tokens)
    judge.check(sequence)


def test_min_tokens_holds_the_stop_back(session: Session, draw: Draw, judge: Judge) -> None:
    prompt = draw.prompt()
    scout = session.open(prompt)
    scout.decode(5)
    rules = pb.Sampling(stop_token_ids=scout.emitted, min_tokens=4)
    sequence = session.open(prompt, sampling=rules)
    sequence.feed("BatchDecode", steps=8)
    assert len(sequence.emitted) >= 4
    assert not set(sequence.emitted[:4]) & set(scout.emitted)
    judge.check(sequence)


def test_steps_are_refused_where_they_make_no_sense(session: Session, draw: Draw, judge: Judge) -> None:
    executor = session.executor
    sequence = session.open(draw.prompt())
    cases = [{"steps": executor.limits.max_steps + 1}, {"steps": 2**32 - 1}]
    if executor.can("FULL_LOGITS"):
        cases.append({"steps": 2, "output": FULL})
    for fields in cases:
        row = session.step([sequence.row(**fields)], rpc="BatchDecode").rows[0]
        assert row.code is grpc.StatusCode.INVALID_ARGUMENT, fields
    if executor.can("VERIFY"):
        row = session.step([sequence.row(steps=2, drafts=draw.tokens(1))]).rows[0]
        assert row.code is grpc.StatusCode.INVALID_ARGUMENT
    sequence.decode(2)
    judge.check(sequence)
