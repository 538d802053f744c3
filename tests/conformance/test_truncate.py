"""TruncateKv: what is cut is as if it had never been fed."""

import grpc
import pytest

from tests.conformance.kit.client import Executor, Session
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.expect import pages, refused
from tests.conformance.kit.judge import Judge


@pytest.mark.parametrize("back", [1, 2, 5])
def test_regrowing_with_other_tokens_equals_a_fresh_cache(
    session: Session, draw: Draw, judge: Judge, back: int
) -> None:
    sequence = session.open(draw.prompt())
    sequence.decode(6)
    length = sequence.n - back
    sequence.truncate(length)
    sequence.feed(tokens=draw.tokens(1))
    assert sequence.n == length + 1
    sequence.decode(6)
    judge.check(sequence, outputs=7)


def test_every_cut_regrows_right(session: Session, draw: Draw, judge: Judge) -> None:
    """Within a page, at a boundary, across several."""
    sequence = session.open(draw.prompt())
    for length in range(sequence.n - 1, 0, -3):
        sequence.truncate(length)
        sequence.feed(tokens=draw.tokens(2))
        judge.check(sequence, outputs=1)


def test_cutting_nothing_keeps_everything_but_the_pending_token(
    session: Session, draw: Draw, judge: Judge
) -> None:
    sequence = session.open(draw.prompt())
    token = sequence.pending
    result = sequence.truncate(sequence.n)
    assert result.ops[0].kv_length == sequence.n
    sequence.feed(tokens=token)
    judge.check(sequence, outputs=1)


def test_whole_pages_come_free_at_once(session: Session, draw: Draw, executor: Executor) -> None:
    sequence = session.open(draw.tokens(4 * executor.page))
    sequence.decode(1)
    before = session.step()
    for length in (3 * executor.page + 1, 2 * executor.page, executor.page - 1 or 1, 0):
        held = pages(sequence.n, executor.page)
        result = sequence.truncate(length)
        available = result.free_pages + result.evictable_pages
        assert available == before.available_pages + held - pages(length, executor.page)
        before = session.step()
        assert before.available_pages == available


def test_it_is_idempotent(session: Session, draw: Draw, judge: Judge) -> None:
    sequence = session.open(draw.prompt())
    length = sequence.n - 3
    for _ in range(2):
        assert sequence.truncate(length).ops[0].kv_length == length
    sequence.feed(tokens=draw.tokens(1))
    judge.check(sequence, outputs=1)


def test_the_old_kv_length_is_no_longer_true(session: Session, draw: Draw) -> None:
    sequence = session.open(draw.prompt())
    n = sequence.n
    sequence.truncate(n - 2)
    code = refused(sequence.feed, kv_length=n, tokens=draw.tokens(1))
    assert code is grpc.StatusCode.FAILED_PRECONDITION


def test_what_was_cut_off_is_not_found_again_as_a_prefix(session: Session, draw: Draw, judge: Judge) -> None:
    """Cut in mid-page, regrow differently, and open both contents afresh."""
    executor = session.executor
    prompt = draw.tokens(2 * executor.page + 2)
    sequence = session.open(prompt)
    length = 2 * executor.page - 1
    sequence.truncate(length)
    sequence.feed(tokens=[draw.other(prompt[length]), *draw.tokens(executor.page)])
    regrown = list(sequence.cached)
    judge.check(sequence, outputs=1)
    for tokens in (prompt, regrown, prompt[:length] + draw.tokens(3)):
        again = session.open(tokens)
        again.decode(2)
        judge.check(again)


@pytest.mark.parametrize("length", ["n + 1", "2^31", "2^32 - 1"])
def test_it_can_not_lengthen(session: Session, draw: Draw, judge: Judge, length: str) -> None:
    sequence = session.open(draw.prompt())
    lengths = {"n + 1": sequence.n + 1, "2^31": 2**31, "2^32 - 1": 2**32 - 1}
    assert refused(sequence.truncate, lengths[length]) is grpc.StatusCode.INVALID_ARGUMENT
    sequence.decode(1)
    judge.check(sequence)


def test_an_unknown_or_released_cache_is_not_found(session: Session, draw: Draw) -> None:
    sequence = session.open(draw.prompt())
    session.release(sequence)
    assert refused(sequence.truncate, 0) is grpc.StatusCode.NOT_FOUND
