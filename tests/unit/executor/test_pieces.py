"""Long steps in pieces: what each forward feeds, and answers that do not show it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.backends.base import Backend
from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.cache.block_table import BlockTable
from executor_service.cache.sequence import CachedSequence
from executor_service.contract.plan import OutputMode, Row, Sampling
from executor_service.steps.accepted_row import AcceptedRow
from executor_service.steps.pieces import cut
from tests.unit.executor.deferred import DeferredBackend
from tests.unit.executor.fakes import EMPTY, FakeBackend, limits
from tests.unit.executor.harness import Harness, opening, row
from tests.unit.executor.two_ways import TwoWays, seen


def job(fed: int, outputs: int = 1) -> AcceptedRow:
    nothing = BlockTable(b"")
    sequence = CachedSequence(
        nothing, EMPTY, length=0, prompt_length=fed, sampling=Sampling(), salt=b"", renewed_s=0.0
    )
    made = AcceptedRow(0, sequence, 0, fed, fed, fed, OutputMode.SAMPLE, 0)
    made.outputs = outputs
    return made


@pytest.mark.parametrize(
    ("rows", "fed"),
    [
        ([(3, 1)], [3]),
        ([(9, 1)], [4]),
        ([(1, 1), (1, 1), (9, 1)], [1, 1, 2]),
        ([(4, 1), (1, 1)], [4]),
        ([(9, 0)], [4]),
        ([(5, 3)], [2]),  # outputs stay together
        ([(3, 1), (3, 3), (1, 1)], [3, 1]),  # and so wait for room, which others take
        ([(9, 9), (1, 1)], [9]),  # more outputs than there is ever room for
        ([(1, 1), (9, 9)], [1]),
    ],
)
def test_a_forward_takes_rows_in_order_while_there_is_room(
    rows: list[tuple[int, int]], fed: list[int]
) -> None:
    assert [count for _, count in cut([job(*item) for item in rows], 4)] == fed


@given(
    rows=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 8)), min_size=1, max_size=8),
    room=st.integers(1, 12),
)
def test_every_forward_goes_on_and_outputs_come_whole(rows: list[tuple[int, int]], room: int) -> None:
    jobs = [job(fed, min(fed, outputs)) for fed, outputs in rows]
    while jobs:
        pieces = cut(jobs, room)
        total = sum(count for _, count in pieces)
        assert total
        assert total <= room or len(pieces) == 1
        for piece, count in pieces:
            assert 0 < count <= piece.fed
            assert count == piece.fed or count <= piece.fed - piece.outputs
            piece.fed -= count
        jobs = [item for item in jobs if item.fed]


@pytest.mark.parametrize("backend", [FakeBackend, DeferredBackend, OracleBackend])
def test_a_step_in_pieces_answers_like_a_step_in_one(backend: type[Backend]) -> None:
    steps: list[list[Row]] = [
        [row(1, 8), row(2, 3, limit=6)],
        [row(1, 9, drafts=[1, 2, 3, 4, 5, 6]), row(2, 9)],
        [row(3, 20, steps=7, output=OutputMode.SAMPLE), row(2, 17, output=OutputMode.FULL)],
        [row(2, 18, tokens=[7] * 9)],
    ]
    openings = opening(1, [1] * 8), opening(2, list(range(17)), limit=3), opening(3, [5] * 20, seed=4)
    answers = []
    for piece in (256, 4):
        h = Harness(limits(max_piece_tokens=piece), backend())
        replies = [h.step(*openings)]
        for rows in steps:
            n = {item: sequence.length for item, sequence in h.engine.store.sessions.get(0).caches.items()}
            for item in rows:
                item.kv_length = n[item.cache_id]
            replies.append(h.step(*rows))
        assert all(answer.refusal is None for reply in replies for answer in reply.rows)
        answers.append([seen(reply, exact=True) for reply in replies])
    assert answers[0] == answers[1]


def test_no_forward_feeds_more_than_a_piece() -> None:
    h = Harness(limits(max_piece_tokens=5))
    h.step(opening(1, [1, 2]), opening(2, list(range(17))))
    h.step(row(1, 2, steps=4), row(2, 17), opening(3, [3] * 12))
    assert h.backend.forwards == [[2, 3], [5], [5], [4], [1, 1, 3], [1, 4], [1, 4], [1, 1]]


@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 25), piece=st.integers(1, 9), late=st.booleans())
@settings(max_examples=60, deadline=None)
def test_random_plans_in_pieces_answer_like_in_one(seed: int, steps: int, piece: int, late: bool) -> None:
    whole = limits(total_pages=600, context_length=48)
    ways = TwoWays(seed, whole)
    pieces = limits(total_pages=600, context_length=48, max_piece_tokens=piece)
    ways.overlapped = Harness(pieces, DeferredBackend(48) if late else FakeBackend(48))
    ways.run(steps)
