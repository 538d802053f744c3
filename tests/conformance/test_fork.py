"""ForkCache: a copy that shares pages and nothing else."""

import grpc
import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import Executor, Session, decode_together
from tests.conformance.kit.client import fork as fork_op
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.expect import pages, refused
from tests.conformance.kit.judge import Judge

pytestmark = pytest.mark.needs("FORK")


def test_a_fork_continues_as_its_source_does(session: Session, draw: Draw, judge: Judge) -> None:
    source = session.open(draw.prompt())
    token = source.pending
    copy = session.fork(source, source.n)
    copy.feed(tokens=token)
    decode_together([source], 1)
    decode_together([copy, source], 4)
    judge.check(source)
    judge.check(copy)
    assert judge.exact is False or copy.cached == source.cached


@pytest.mark.parametrize("first", ["source", "fork"])
def test_both_go_their_own_way(session: Session, draw: Draw, judge: Judge, first: str) -> None:
    """Whoever writes into the shared partial page first must not be seen by the other."""
    source = session.open(draw.prompt())
    source.decode(2)
    copy = session.fork(source, source.n)
    order = [(source, draw.other(source.pending[0])), (copy, source.pending[0])]
    for sequence, token in order if first == "source" else reversed(order):
        sequence.feed(tokens=[token])
        sequence.decode(2)
    decode_together([source, copy], 2)
    judge.check(source, outputs=5)
    judge.check(copy)


def test_forks_at_every_length(session: Session, draw: Draw, judge: Judge, executor: Executor) -> None:
    source = session.open(draw.prompt())
    for length in sorted({1, executor.page, executor.page + 1, 2 * executor.page, source.n - 1, source.n}):
        copy = session.fork(source, length)
        copy.feed(tokens=draw.tokens(2))
        copy.decode(2)
        assert copy.n == length + 4
        judge.check(copy, outputs=3)
        session.release(copy)
    source.decode(3)
    judge.check(source)


def test_a_fork_outlives_its_source(session: Session, draw: Draw, judge: Judge) -> None:
    source = session.open(draw.prompt())
    copy = session.fork(source, source.n - 1)
    source.truncate(1)
    source.feed(tokens=draw.tokens(3))
    session.release(source)
    filler = session.open(draw.prompt())
    copy.feed(tokens=draw.tokens(1))
    copy.decode(3)
    judge.check(copy, outputs=4)
    judge.check(filler)


def test_several_completions_of_one_prompt_under_their_own_seeds(
    session: Session, draw: Draw, judge: Judge
) -> None:
    """How n > 1 is done: fork at P - 1 and feed the prompt's last token under each seed."""
    prompt = draw.prompt()
    rules = [pb.Sampling(temperature=1.0, seed=draw.seed()) for _ in range(3)]
    first = session.open(prompt, sampling=rules[0])
    forks = [session.fork(first, len(prompt) - 1, sampling) for sampling in rules[1:]]
    for copy in forks:
        copy.feed(tokens=prompt[-1:])
    decode_together([first, *forks], 4)
    for sequence in (first, *forks):
        judge.check(sequence)


def test_a_fork_has_nothing_pending(session: Session, draw: Draw) -> None:
    source = session.open(draw.prompt())
    copy = session.fork(source, source.n)
    assert refused(copy.feed) in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}


def test_full_pages_are_shared_and_the_partial_one_is_copied_when_written(
    session: Session, draw: Draw, executor: Executor
) -> None:
    source = session.open(draw.prompt())
    before = executor.status().cache.owned_pages
    copy = session.fork(source, source.n)
    assert executor.status().cache.owned_pages <= before + 1
    copy.feed(tokens=draw.tokens(1))
    grown = pages(copy.n, executor.page) - source.n // executor.page
    assert executor.status().cache.owned_pages == before + grown


def test_truncating_a_fork_gives_back_only_its_own_pages(
    session: Session, draw: Draw, judge: Judge, executor: Executor
) -> None:
    source = session.open(draw.prompt())
    copy = session.fork(source, source.n)
    before = session.step().available_pages
    copy.truncate(0)
    assert session.step().available_pages == before
    source.decode(2)
    judge.check(source)


def test_what_can_not_be_forked_is_refused(session: Session, draw: Draw, judge: Judge) -> None:
    source, used = session.open(draw.prompt()), session.open(draw.prompt())
    fresh = session.new_id
    cases = [
        (fork_op(fresh(), fresh(), 1), grpc.StatusCode.NOT_FOUND),
        (fork_op(source.id, used.id, 1), grpc.StatusCode.ALREADY_EXISTS),
        (fork_op(source.id, source.id, 1), grpc.StatusCode.ALREADY_EXISTS),
        (fork_op(source.id, 0, 1), grpc.StatusCode.INVALID_ARGUMENT),
        (fork_op(source.id, fresh(), source.n + 1), grpc.StatusCode.INVALID_ARGUMENT),
        (fork_op(source.id, fresh(), 1, pb.Sampling(temperature=-1)), grpc.StatusCode.INVALID_ARGUMENT),
    ]
    reply = session.step(ops=[op for op, _ in cases])
    assert [op.code for op in reply.ops] == [code for _, code in cases]
    for sequence in (source, used):
        sequence.decode(2)
        judge.check(sequence)
