"""A prompt computed in pieces is the prompt computed whole."""

import pytest

from tests.conformance.kit.client import Executor, Session
from tests.conformance.kit.draw import Draw
from tests.conformance.kit.judge import Judge


def test_one_token_at_a_time(session: Session, draw: Draw, judge: Judge) -> None:
    prompt = draw.prompt()
    sequence = session.open(prompt, limit=1)
    for n in range(2, len(prompt) + 1):
        assert sequence.emitted == [], "sampled before the prompt's end"
        sequence.feed("Prefill", limit=1)
        assert sequence.n == n
    sequence.decode(3)
    judge.check(sequence)


@pytest.mark.parametrize("pieces", [2, 3])
def test_pieces_that_straddle_pages(session: Session, draw: Draw, judge: Judge, pieces: int) -> None:
    prompt = draw.prompt()
    limit = -(-len(prompt) // pieces)
    sequence = session.open(prompt, limit=limit)
    while not sequence.emitted:
        before = sequence.n
        sequence.feed("BatchPrefill", limit=limit)
        assert sequence.n == min(before + limit, len(prompt))
    sequence.decode(3)
    judge.check(sequence)


def test_a_chunk_without_a_limit_goes_to_the_end(session: Session, draw: Draw, judge: Judge) -> None:
    prompt = draw.prompt()
    sequence = session.open(prompt, limit=2)
    sequence.feed("Prefill")
    assert sequence.n == len(prompt)
    judge.check(sequence)


def test_chunks_ride_beside_decodes(session: Session, draw: Draw, judge: Judge, executor: Executor) -> None:
    running = session.open(draw.prompt())
    prompt = draw.prompt()
    growing = session.open(prompt, limit=executor.page)
    while not growing.emitted:
        rows = [running.row(), growing.row(limit=executor.page - 1 or 1)]
        reply = session.step(rows)
        running.took(rows[0], reply.rows[0])
        growing.took(rows[1], reply.rows[1])
    running.decode(2)
    growing.decode(2)
    judge.check(running)
    judge.check(growing)
