"""Prefill, BatchPrefill: what an opening computes, and the KV length it leaves."""

import pytest
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import FULL, NONE, Executor, Session
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.judge import Judge


def test_a_whole_prompt_leaves_its_length_and_samples_once(
    session: Session, draw: Draw, judge: Judge
) -> None:
    prompt = draw.prompt()
    sequence = session.open(prompt)
    assert sequence.n == len(prompt)
    assert len(sequence.emitted) == 1
    judge.check(sequence)


def test_a_prompt_of_one_token(session: Session, draw: Draw, judge: Judge) -> None:
    sequence = session.open(draw.tokens(1))
    assert sequence.n == 1
    sequence.decode(2)
    judge.check(sequence)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_prompts_around_a_page_boundary(
    session: Session, draw: Draw, judge: Judge, executor: Executor, extra: int
) -> None:
    sequence = session.open(draw.tokens(max(1, 2 * executor.page + extra)))
    sequence.decode(3)
    assert sequence.n == max(1, 2 * executor.page + extra) + 3
    judge.check(sequence)


def test_a_limit_stops_short_of_the_end_and_samples_nothing(session: Session, draw: Draw) -> None:
    prompt = draw.prompt()
    sequence = session.open(prompt, limit=len(prompt) - 1)
    assert sequence.n == len(prompt) - 1
    assert sequence.emitted == []


def test_a_limit_beyond_the_end_is_the_end(session: Session, draw: Draw, judge: Judge) -> None:
    prompt = draw.prompt()
    sequence = session.open(prompt, limit=len(prompt) + 7)
    assert sequence.n == len(prompt)
    judge.check(sequence)


def test_many_openings_in_one_step_each_get_their_own_answer(
    session: Session, draw: Draw, judge: Judge, executor: Executor
) -> None:
    count = min(4, executor.limits.max_rows)
    prompts = [draw.prompt()[i:] for i in range(count)]
    sequences = session.open_all([session.opening(prompt) for prompt in prompts])
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.n == len(prompt)
        judge.check(sequence)


def test_tokens_behind_prompt_length_are_output(session: Session, draw: Draw, judge: Judge) -> None:
    """As after a preemption: the penalties see them as output, and nothing else changes."""
    known = draw.prompt()
    rules = pb.Sampling(presence_penalty=50, frequency_penalty=30)
    sequence = session.open(known, prompt_length=len(known) - 4, sampling=rules)
    assert sequence.n == len(known)
    sequence.decode(3)
    judge.check(sequence)


@pytest.mark.parametrize("output", [NONE, FULL])
def test_an_opening_that_samples_nothing_still_fills_the_cache(
    session: Session, draw: Draw, judge: Judge, executor: Executor, output: pb.OutputMode.ValueType
) -> None:
    if output == FULL and not executor.can("FULL_LOGITS"):
        pytest.skip("FULL_LOGITS is not advertised")
    prompt = draw.prompt()
    sequence = session.open(prompt[:-1], output=output)
    assert (sequence.n, sequence.emitted) == (len(prompt) - 1, [])
    sequence.feed(tokens=prompt[-1:])
    assert sequence.n == len(prompt)
    judge.check(sequence)
