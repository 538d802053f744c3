"""ForwardVerify: drafts are judged, accepted and rolled back so that nothing but speed changes."""

import grpc
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import FULL, Executor, Row, Sequence, Session
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.expect import refused
from tests.conformance.kit.judge import Judge
from tests.conformance.kit.pipe import Pipe
from tests.conformance.kit.reply import unpack

pytestmark = pytest.mark.needs("VERIFY")

DRAFTS = 4


def drafts_for(session: Session, sequence: Sequence, count: int) -> list[int]:
    """What `sequence` will emit next, found out by a copy of it."""
    scout = session.open(
        [*sequence.cached, *sequence.pending],
        sampling=sequence.sampling,
        prompt_length=sequence.prompt_length,
    )
    scout.decode(count - 1)
    session.release(scout)
    return scout.emitted


def expect(sequence: Sequence, drafts: list[int], n: int) -> int:
    """Check the arithmetic of one verify row's answer; the number of accepted drafts."""
    tokens = sequence.last.tokens
    accepted = len(tokens) - 1
    assert tokens[:-1] == drafts[:accepted], "an accepted draft is the token that was sampled"
    if accepted < len(drafts):
        assert tokens[-1] != drafts[accepted], "a draft that was sampled was not accepted"
    assert sequence.n == n + 1 + accepted
    return accepted


@pytest.mark.parametrize("right", range(DRAFTS + 1))
def test_the_longest_right_prefix_is_accepted(session: Session, draw: Draw, judge: Judge, right: int) -> None:
    """none, some, all; and what was rejected leaves no trace in what follows."""
    sequence = session.open(draw.prompt())
    drafts = drafts_for(session, sequence, DRAFTS)
    if right < DRAFTS:
        drafts[right] = draw.other(drafts[right])
    n = sequence.n
    sequence.verify(drafts)
    accepted = expect(sequence, drafts, n)
    assert not judge.exact or accepted == right
    sequence.decode(4)
    judge.check(sequence)


def test_speculating_all_the_way_equals_decoding(session: Session, draw: Draw, judge: Judge) -> None:
    """Drafts of every quality, row after row, across pages."""
    sequence = session.open(draw.prompt())
    for right in (3, 0, 1, DRAFTS, 2, 0, DRAFTS):
        drafts = drafts_for(session, sequence, DRAFTS)
        drafts[right:] = [draw.other(token) for token in drafts[right:]]
        n = sequence.n
        sequence.verify(drafts)
        expect(sequence, drafts, n)
    judge.check(sequence)


@pytest.mark.parametrize("right", [0, 2, DRAFTS])
def test_drafts_sent_behind_unanswered_ones_are_compared_from_where_these_end(
    executor: Executor, session: Session, draw: Draw, judge: Judge, right: int
) -> None:
    """Verifications by pairs; the second one's length is a bound, and its drafts are for full acceptance."""
    sequence, pipe = session.open(draw.prompt()), Pipe(executor)
    for _ in range(3):
        ahead = drafts_for(session, sequence, 2 * DRAFTS + 1)
        first, second = ahead[:DRAFTS], ahead[DRAFTS + 1 :]
        first[right:] = [draw.other(token) for token in first[right:]]
        bound = sequence.n + 1 + DRAFTS
        rows = [sequence.row(drafts=first), Row(sequence.id, bound, drafts=second, is_bound=True)]
        for row in rows:
            pipe.send(session.plan([row]))
        for row, drafts in zip(rows, (first, second), strict=True):
            n = sequence.n
            sequence.took(row, unpack(pipe.receive().result, 0).rows[0])
            accepted = expect(sequence, drafts, n)
            assert not judge.exact or row.is_bound or accepted == right
            assert not judge.exact or right < DRAFTS or accepted == DRAFTS
    pipe.close()
    judge.check(sequence)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampled_tokens_are_verified_like_greedy_ones(
    session: Session, draw: Draw, judge: Judge, temperature: float
) -> None:
    rules = pb.Sampling(
        temperature=temperature, top_p=0.9, seed=draw.seed(), repetition_penalty=1.2, presence_penalty=0.5
    )
    sequence = session.open(draw.prompt(), sampling=rules)
    for right in (2, DRAFTS, 0):
        drafts = drafts_for(session, sequence, DRAFTS)
        drafts[right:] = [draw.other(token) for token in drafts[right:]]
        n = sequence.n
        sequence.verify(drafts)
        accepted = expect(sequence, drafts, n)
        assert not judge.exact or accepted == right
    judge.check(sequence)


def test_drafts_behind_tokens_of_the_client(session: Session, draw: Draw, judge: Judge) -> None:
    """As after a truncate: the row carries its tokens, and drafts follow them."""
    sequence = session.open(draw.prompt())
    sequence.truncate(sequence.n - 2)
    n, tokens = sequence.n, draw.tokens(3)
    sequence.verify(draw.tokens(2), tokens=tokens)
    assert sequence.n == n + len(tokens) + len(sequence.last.tokens) - 1
    sequence.decode(2)
    judge.check(sequence, outputs=len(sequence.last.tokens) + 2)


def test_verify_rows_ride_beside_other_rows(session: Session, draw: Draw, judge: Judge) -> None:
    plain, speculated, chunked = (
        session.open(draw.prompt()),
        session.open(draw.prompt()),
        session.open(draw.prompt(), limit=2),
    )
    drafts = drafts_for(session, speculated, DRAFTS)
    drafts[2] = draw.other(drafts[2])
    rows = [plain.row(), speculated.row(drafts=drafts), chunked.row(limit=5)]
    reply = session.step(rows)
    for sequence, row, answer in zip((plain, speculated, chunked), rows, reply.rows, strict=True):
        sequence.took(row, answer)
    for sequence in (plain, speculated):
        sequence.decode(2)
        judge.check(sequence)
    chunked.feed()
    judge.check(chunked)


@pytest.mark.needs("FULL_LOGITS")
def test_the_manual_route_full_logits_then_truncate(session: Session, draw: Draw, judge: Judge) -> None:
    """Without acceptance every position is cached, and the client cuts what it rejects."""
    sequence = session.open(draw.prompt())
    drafts = drafts_for(session, sequence, DRAFTS)
    drafts[2] = draw.other(drafts[2])
    known, n = [*sequence.cached, *sequence.pending, *drafts], sequence.n
    reply = sequence.verify(drafts, output=FULL)
    assert (sequence.n, reply.tokens) == (n + 1 + DRAFTS, [])
    assert reply.logits.shape[0] == DRAFTS + 1
    judge.check_same(reply.logits, judge.logits(known, n))
    sequence.truncate(n + 3)
    sequence.feed(tokens=[int(reply.logits[2].argmax())])
    sequence.decode(2)
    judge.check(sequence, outputs=3)


def test_rejected_drafts_hold_no_pages(session: Session, draw: Draw) -> None:
    page = session.executor.page
    sequence = session.open(draw.tokens(page))
    wrong = [
        draw.other(token)
        for token in drafts_for(session, sequence, min(page, session.executor.limits.max_drafts))
    ]
    solo = session.step().available_pages
    sequence.verify(wrong)
    if sequence.n == page + 1:
        assert session.step().available_pages == solo - 1


def test_drafts_are_refused_where_they_make_no_sense(session: Session, draw: Draw, judge: Judge) -> None:
    executor = session.executor
    sequence = session.open(draw.prompt())
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert (
        refused(session.executor.step, session.plan([sequence.row(drafts=draw.tokens(1))]), "Decode")
        is invalid
    )
    bad: list[list[int]] = [[executor.vocab], [0, 2**32 - 1], [0] * (executor.limits.max_drafts + 1)]
    for drafts in bad:
        assert session.step([sequence.row(drafts=drafts)], rpc="ForwardVerify").rows[0].code is invalid
    sequence.decode(2)
    judge.check(sequence)


def test_drafts_are_counted(session: Session, draw: Draw) -> None:
    executor = session.executor
    sequence = session.open(draw.prompt())
    drafts = drafts_for(session, sequence, DRAFTS)
    before = executor.status()
    accepted = len(sequence.verify(drafts).tokens) - 1
    after = executor.status()
    assert after.drafts_verified - before.drafts_verified == DRAFTS
    assert after.drafts_accepted - before.drafts_accepted == accepted
