"""The prefix cache: a hit saves work and changes no token."""

import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import Executor, Session
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.judge import Judge

pytestmark = pytest.mark.needs("PREFIX_CACHE")


def whole_pages(tokens: int, page: int) -> int:
    return tokens // page * page


def test_a_prompt_seen_before_is_a_hit_of_at_most_all_but_one_token(
    session: Session, draw: Draw, judge: Judge, executor: Executor
) -> None:
    for length in (2 * executor.page + 3, 3 * executor.page):
        prompt = draw.tokens(length)
        first = session.open(prompt)
        again = session.open(prompt)
        assert first.hit == 0
        assert whole_pages(length - 1, executor.page) <= again.hit <= length - 1
        first.decode(2)
        again.decode(2)
        judge.check(first)
        judge.check(again)


def test_a_released_prompt_is_still_a_hit(
    session: Session, draw: Draw, judge: Judge, executor: Executor
) -> None:
    prompt = draw.prompt()
    session.release(session.open(prompt))
    again = session.open(prompt)
    assert again.hit >= whole_pages(len(prompt) - 1, executor.page)
    again.decode(3)
    judge.check(again)


def test_a_hit_counts_in_kv_length_and_a_limit_starts_behind_it(
    session: Session, draw: Draw, judge: Judge, executor: Executor
) -> None:
    prompt = draw.prompt()
    session.release(session.open(prompt))
    again = session.open(prompt, limit=1)
    assert again.n == again.hit + 1
    while not again.emitted:
        again.feed("Prefill", limit=2)
    judge.check(again)


@pytest.mark.parametrize("pages", [0, 1])
@pytest.mark.parametrize("part", ["nothing", "one token", "half a page", "all but one token"])
def test_a_hit_never_goes_beyond_what_is_shared(
    session: Session, draw: Draw, judge: Judge, executor: Executor, pages: int, part: str
) -> None:
    page = executor.page
    tokens = {"nothing": 0, "one token": 1, "half a page": page // 2, "all but one token": page - 1}[part]
    common = pages * page + tokens
    prompt = draw.prompt()
    session.open(prompt).decode(1)
    near = [*prompt[:common], draw.other(prompt[common]), *prompt[common + 1 :]]
    other = session.open(near)
    assert whole_pages(common, page) <= other.hit <= common
    other.decode(3)
    judge.check(other)


def test_a_page_depends_on_all_before_it(
    session: Session, draw: Draw, judge: Judge, executor: Executor
) -> None:
    """The second page of one prompt after the first page of another."""
    a, b = draw.tokens(3 * executor.page), draw.tokens(3 * executor.page)
    session.open(a)
    session.open(b)
    mixed = session.open(a[: executor.page] + b[executor.page :])
    assert mixed.hit <= executor.page
    mixed.decode(3)
    judge.check(mixed)


def test_a_page_that_is_not_full_is_not_shared(
    session: Session, draw: Draw, judge: Judge, executor: Executor
) -> None:
    """Open a beginning, then longer prompts that agree and disagree with it in its last page."""
    prompt = draw.prompt()
    short = session.open(prompt)
    longer = session.open(prompt + draw.tokens(executor.page))
    assert longer.hit <= len(prompt)
    short.decode(3)
    longer.decode(3)
    judge.check(short)
    judge.check(longer)


def test_sharers_write_into_pages_of_their_own(
    session: Session, draw: Draw, judge: Judge, executor: Executor
) -> None:
    prompt = draw.tokens(2 * executor.page)
    sharers = [session.open([*prompt, token]) for token in draw.tokens(3)]
    for sequence in sharers:
        sequence.truncate(2 * executor.page - 1)
        sequence.feed(tokens=draw.tokens(2))
    for sequence in sharers:
        sequence.decode(2)
        judge.check(sequence, outputs=3)
    fresh = session.open(prompt)
    fresh.decode(2)
    judge.check(fresh)


def test_what_a_sequence_generated_can_be_resumed(
    session: Session, draw: Draw, judge: Judge, executor: Executor
) -> None:
    """As after a preemption: prompt and output come back as one opening."""
    prompt = draw.prompt()
    first = session.open(prompt)
    first.decode(executor.page)
    known = [*first.cached, *first.pending]
    session.release(first)
    resumed = session.open(known, prompt_length=len(prompt))
    assert resumed.hit <= len(known) - 1
    resumed.decode(3)
    judge.check(resumed)


def test_a_page_whose_last_token_was_not_stored_yet_is_not_a_hit(
    session: Session, draw: Draw, judge: Judge, executor: Executor
) -> None:
    """The token sampled last would fill the page, but it is only pending."""
    first = session.open(draw.tokens(2 * executor.page - 1))
    known = [*first.cached, *first.pending]
    session.release(first)
    resumed = session.open(known + draw.tokens(2))
    assert resumed.hit < len(known)
    resumed.decode(2)
    judge.check(resumed)


def test_salts_are_kept_apart(session: Session, draw: Draw, executor: Executor) -> None:
    prompt, salts = draw.prompt(), [draw.salt(), draw.salt()]
    first = [session.open(prompt, salt=salt) for salt in salts]
    plain = session.open(prompt)
    assert [sequence.hit for sequence in (*first, plain)] == [0, 0, 0]
    again = [session.open(prompt, salt=salt) for salt in salts]
    for cold, warm in zip(first, again, strict=True):
        assert warm.hit >= whole_pages(len(prompt) - 1, executor.page)
        cold.decode(4)
        warm.decode(4)
    if executor.info.backend == "oracle":  # where rounding can't move a token, demand the same ones
        assert [s.emitted for s in first] == [s.emitted for s in again]


def test_a_salted_hit_continues_as_the_salted_cold_run(session: Session, draw: Draw, judge: Judge) -> None:
    prompt, salt = draw.prompt(), draw.salt()
    cold, warm = session.open(prompt, salt=salt), session.open(prompt, salt=salt)
    for sequence in (cold, warm):
        sequence.decode(4)
    assert not judge.exact or cold.emitted == warm.emitted


def test_hits_are_counted(session: Session, draw: Draw, executor: Executor) -> None:
    prompt = draw.prompt()
    session.open(prompt)
    before = executor.status().cache
    again = session.open(prompt)
    after = executor.status().cache
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == again.hit
    assert after.prefix_query_tokens - before.prefix_query_tokens == len(prompt)


def test_sampling_does_not_see_where_the_prefix_came_from(session: Session, draw: Draw, judge: Judge) -> None:
    prompt = draw.prompt()
    rules = pb.Sampling(temperature=1.0, seed=draw.seed(), repetition_penalty=1.3)
    session.open(prompt)
    warm = session.open(prompt, sampling=rules)
    assert warm.hit > 0
    warm.decode(4)
    judge.check(warm)
