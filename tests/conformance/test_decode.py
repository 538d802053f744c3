"""Decode: which tokens a row feeds, and what it leaves pending."""

import grpc
import pytest

from tests.conformance.kit.client import FULL, NONE, Executor, Session
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.expect import refused
from tests.conformance.kit.judge import Judge

NOTHING_TO_FEED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}


def test_each_decode_feeds_one_token_and_samples_one(session: Session, draw: Draw, judge: Judge) -> None:
    sequence = session.open(draw.prompt())
    for _ in range(8):
        n = sequence.n
        sequence.decode(1)
        assert sequence.n == n + 1
    judge.check(sequence)


def test_decoding_across_a_page_boundary(
    session: Session, draw: Draw, judge: Judge, executor: Executor
) -> None:
    sequence = session.open(draw.tokens(max(1, executor.page - 2)))
    sequence.decode(5)
    judge.check(sequence)


def test_tokens_of_the_client_take_the_place_of_the_sampled_one(
    session: Session, draw: Draw, judge: Judge
) -> None:
    sequence = session.open(draw.prompt())
    n, forced = sequence.n, draw.other(sequence.emitted[-1])
    sequence.feed(tokens=[forced])
    assert sequence.n == n + 1, "the sampled token was kept beside the client's"
    sequence.decode(3)
    judge.check(sequence, outputs=4)


def test_naming_the_sampled_token_changes_nothing(session: Session, draw: Draw, judge: Judge) -> None:
    sequence = session.open(draw.prompt())
    for _ in range(3):
        sequence.feed(tokens=sequence.pending)
    judge.check(sequence)


def test_catching_up_with_several_tokens(
    session: Session, draw: Draw, judge: Judge, executor: Executor
) -> None:
    sequence = session.open(draw.prompt())
    n, more = sequence.n, draw.tokens(executor.page + 1)
    sequence.feed(tokens=more)
    assert sequence.n == n + len(more)
    sequence.decode(2)
    judge.check(sequence, outputs=3)


def test_a_limit_leaves_the_rest_pending(session: Session, draw: Draw, judge: Judge) -> None:
    sequence = session.open(draw.prompt())
    n, emitted = sequence.n, len(sequence.emitted)
    sequence.feed(tokens=draw.tokens(5), limit=3)
    assert (sequence.n, len(sequence.emitted)) == (n + 3, emitted)
    sequence.feed()
    assert (sequence.n, len(sequence.emitted)) == (n + 5, emitted + 1)
    judge.check(sequence, outputs=1)


def test_tokens_are_refused_while_a_prompt_is_pending(session: Session, draw: Draw, judge: Judge) -> None:
    sequence = session.open(draw.prompt(), limit=3)
    assert refused(sequence.feed, tokens=draw.tokens(1)) is grpc.StatusCode.INVALID_ARGUMENT
    sequence.feed("Prefill")
    judge.check(sequence)


@pytest.mark.parametrize("output", [NONE, FULL])
def test_after_a_row_that_sampled_nothing_the_next_must_carry_tokens(
    session: Session, draw: Draw, judge: Judge, executor: Executor, output: int
) -> None:
    if output == FULL and not executor.can("FULL_LOGITS"):
        pytest.skip("FULL_LOGITS is not advertised")
    sequence = session.open(draw.prompt())
    sequence.feed(output=output)
    assert refused(sequence.feed) in NOTHING_TO_FEED
    sequence.feed(tokens=draw.tokens(1))
    judge.check(sequence, outputs=1)


def test_after_truncating_the_next_row_must_carry_tokens(session: Session, draw: Draw, judge: Judge) -> None:
    sequence = session.open(draw.prompt())
    sequence.truncate(sequence.n)
    assert refused(sequence.feed) in NOTHING_TO_FEED
    sequence.feed(tokens=draw.tokens(1))
    judge.check(sequence, outputs=1)


def test_a_cache_truncated_to_nothing_can_begin_again(session: Session, draw: Draw, judge: Judge) -> None:
    sequence = session.open(draw.prompt())
    sequence.truncate(0)
    sequence.feed(tokens=draw.prompt())
    judge.check(sequence, outputs=1)


def test_truncating_a_half_computed_prompt_forgets_the_rest(
    session: Session, draw: Draw, judge: Judge
) -> None:
    sequence = session.open(draw.prompt(), limit=6)
    sequence.truncate(4)
    sequence.feed(tokens=draw.tokens(3))
    assert sequence.n == 7
    judge.check(sequence, outputs=1)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_another_kv_length_than_expected_changes_nothing(
    session: Session, draw: Draw, judge: Judge, wrong: int
) -> None:
    sequence = session.open(draw.prompt())
    for _ in range(2):
        code = refused(sequence.feed, kv_length=sequence.n + wrong)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        sequence.decode(1)
    judge.check(sequence)
