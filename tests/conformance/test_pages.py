"""Pages: reserved all or nothing, refused without harm, and never lost."""

from collections.abc import Iterator

import grpc
import pytest

from tests.conformance.kit.client import NONE, Executor, Sequence, Session
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.expect import balanced, pages, refused
from tests.conformance.kit.judge import Judge

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
FILLABLE_TOKENS = 100_000


class Pool:
    """All pages of the executor, to be used up and given back."""

    def __init__(self, session: Session, draw: Draw) -> None:
        self.session, self.draw, self.page = session, draw, session.executor.page
        self._fillers: list[Sequence] = []

    @property
    def available(self) -> int:
        return self.session.step().available_pages

    def fill(self, leave: int) -> None:
        """Open fillers until exactly `leave` pages are available."""
        limits, info = self.session.executor.limits, self.session.executor.info
        most = min(limits.max_step_tokens, info.model.context_length) // self.page
        while (missing := self.available - leave) > 0:
            tokens = self.draw.tokens(min(missing, most) * self.page)
            self._fillers.append(self.session.open(tokens, output=NONE))
        assert self.available == leave

    def drain(self) -> None:
        """Give the fillers' pages back."""
        self.session.release(*self._fillers)
        self._fillers.clear()


@pytest.fixture
def pool(session: Session, draw: Draw) -> Iterator[Pool]:
    limits = session.executor.limits
    if limits.total_pages * limits.page_size > FILLABLE_TOKENS:
        pytest.skip(f"{limits.total_pages} pages are too many to fill; start the executor with fewer")
    pool = Pool(session, draw)
    yield pool
    pool.drain()


def test_the_ledger_follows_every_move(executor: Executor, session: Session, draw: Draw) -> None:
    page = executor.page
    assert balanced(executor).owned_pages == 0
    a = session.open(draw.prompt())
    assert balanced(executor).owned_pages == pages(a.n, page)
    b = session.open(draw.tokens(page))
    assert balanced(executor).owned_pages == pages(a.n, page) + 1
    b.decode(1)
    assert balanced(executor).owned_pages == pages(a.n, page) + 2
    a.truncate(1)
    assert balanced(executor).owned_pages == 1 + 2
    session.release(a, b)
    assert balanced(executor).owned_pages == 0


def test_replies_name_the_pages_that_are_available(executor: Executor, session: Session, draw: Draw) -> None:
    session.open(draw.prompt())
    reply, cache = session.step(), balanced(executor)
    assert reply.raw.free_pages == cache.free_pages
    assert reply.raw.evictable_pages == cache.cached_pages


def test_an_opening_that_does_not_fit_takes_nothing(
    session: Session, draw: Draw, judge: Judge, pool: Pool
) -> None:
    running = session.open(draw.short())
    pool.fill(leave=2)
    row, opening = running.row(), session.opening(draw.prompt())
    reply = session.step([row], [opening])
    assert reply.rows[1].code is EXHAUSTED
    held = pages(running.n, pool.page)
    running.took(row, reply.rows[0])
    assert pool.available == 2 - (pages(running.n, pool.page) - held)
    pool.drain()
    judge.check(running)
    judge.check(session.open(list(opening.tokens), cache_id=opening.cache_id))


def test_a_chunk_that_does_not_fit_changes_nothing(
    session: Session, draw: Draw, judge: Judge, pool: Pool
) -> None:
    sequence = session.open(draw.prompt(), limit=pool.page)
    pool.fill(leave=1)
    assert refused(sequence.feed, "Prefill") is EXHAUSTED
    sequence.feed("Prefill", limit=pool.page)
    pool.drain()
    sequence.feed("Prefill")
    sequence.decode(1)
    judge.check(sequence)


def test_a_decode_without_a_page_waits_and_its_neighbours_go_on(
    session: Session, draw: Draw, judge: Judge, pool: Pool
) -> None:
    full, roomy = session.open(draw.tokens(pool.page)), session.open(draw.tokens(pool.page + 1))
    pool.fill(leave=0)
    for _ in range(min(3, pool.page - 1)):
        rows = [full.row(), roomy.row()]
        reply = session.step(rows)
        assert reply.rows[0].code is EXHAUSTED
        roomy.took(rows[1], reply.rows[1])
    pool.drain()
    for sequence in (full, roomy):
        sequence.decode(2)
        judge.check(sequence)


@pytest.mark.needs("VERIFY")
def test_drafts_beyond_the_page_budget_are_refused_whole(
    session: Session, draw: Draw, judge: Judge, pool: Pool
) -> None:
    sequence = session.open(draw.tokens(max(1, pool.page - 2)))
    pool.fill(leave=0)
    code = refused(session.executor.step, session.plan([sequence.row(drafts=draw.tokens(1))]), "Decode")
    assert code is grpc.StatusCode.INVALID_ARGUMENT  # not what Decode is for, pages or not
    drafts = draw.tokens(min(4, session.executor.limits.max_drafts))
    assert session.step([sequence.row(drafts=drafts)], rpc="ForwardVerify").rows[0].code is EXHAUSTED
    pool.drain()
    sequence.verify(drafts)
    sequence.decode(2)
    judge.check(sequence)


@pytest.mark.needs("MULTI_STEP")
def test_steps_beyond_the_page_budget_are_refused_whole(
    session: Session, draw: Draw, judge: Judge, pool: Pool
) -> None:
    sequence = session.open(draw.tokens(max(1, pool.page - 2)))
    pool.fill(leave=0)
    assert session.step([sequence.row(steps=4)], rpc="BatchDecode").rows[0].code is EXHAUSTED
    pool.drain()
    sequence.feed("BatchDecode", steps=4)
    judge.check(sequence)


@pytest.mark.needs("FORK")
def test_the_copy_on_write_counts_in_the_reservation(
    session: Session, draw: Draw, judge: Judge, pool: Pool
) -> None:
    if pool.page < 2:
        pytest.skip("a page of one token is never partial")
    source = session.open(draw.short())
    copy = session.fork(source, source.n)
    pool.fill(leave=0)
    assert refused(copy.feed, tokens=draw.tokens(1)) is EXHAUSTED
    assert refused(source.feed) is EXHAUSTED
    session.release(copy)
    source.decode(1)
    judge.check(source)


def test_cached_pages_make_room_when_they_are_needed(
    session: Session, draw: Draw, judge: Judge, pool: Pool
) -> None:
    """Fill the pool with published pages, release them, and use every one for something else."""
    prompts = [draw.prompt() for _ in range(3)]
    for prompt in prompts:
        session.release(session.open(prompt))
    total = session.executor.limits.total_pages
    assert pool.available == total
    pool.fill(leave=0)
    pool.drain()
    for prompt in prompts:
        sequence = session.open(prompt)
        sequence.decode(2)
        judge.check(sequence)


def test_a_page_that_served_another_holds_nothing_of_it(
    session: Session, draw: Draw, judge: Judge, pool: Pool
) -> None:
    """Round after round through the same pages, with cuts, so that every page changes hands."""
    pool.fill(leave=3 * pages(len(draw.prompt()) + 3, pool.page))  # two, and a probe of the judge's
    for _ in range(12):
        sequences = [session.open(draw.prompt()) for _ in range(2)]
        for sequence in sequences:
            sequence.decode(2)
            judge.check(sequence)
        sequences[0].truncate(pool.page)
        sequences[1].decode(1)
        sequences[0].feed(tokens=draw.tokens(3))
        judge.check(sequences[0], outputs=1)
        judge.check(sequences[1])
        session.release(*sequences)


@pytest.mark.needs("FORK")
def test_sequences_have_a_limit_of_their_own(session: Session, draw: Draw, judge: Judge) -> None:
    limit = session.executor.limits.max_sequences
    if limit > 4096:
        pytest.skip(f"{limit} sequences are too many to open")
    source = session.open(draw.short())
    forks = [session.fork(source, 1) for _ in range(limit - 1)]
    assert refused(session.fork, source, 1) is EXHAUSTED
    opening = session.opening(draw.short())
    assert session.step(openings=[opening]).rows[0].code is EXHAUSTED
    session.release(forks.pop())
    judge.check(session.open(list(opening.tokens), cache_id=opening.cache_id))
    source.decode(2)
    judge.check(source)
