"""A step in the making: what is taken out of it again leaves no trace."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.account import Account
from scheduler_service.core.request import DraftSource
from scheduler_service.core.schedule import Schedule, ScheduledRow
from scheduler_service.core.sequence import LiveRequest, LiveSequence
from tests.unit.scheduler.harness import make_request

_rows = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 3), st.booleans()), min_size=1, max_size=8
)


def sequence(number: int) -> LiveSequence:
    return LiveRequest(make_request(f"r{number}"), Account(""), number, 4, 0.0).sequences[0]


def fill(rows: list[tuple[LiveSequence, tuple[int, int, int, bool]]]) -> Schedule:
    schedule = Schedule(100, 50)
    for owner, (pages, limit, drafts, _) in rows:
        row = ScheduledRow(owner, 3, pages, limit=limit)
        schedule.add_row(row)
        if drafts:
            schedule.add_drafts(row, (7,) * drafts, DraftSource.NGRAM, pages=1)
    return schedule


@given(_rows)
def test_a_dropped_row_leaves_no_trace(drawn: list[tuple[int, int, int, bool]]) -> None:
    rows = [(sequence(number), row) for number, row in enumerate(drawn)]
    before = [(s.in_flight, s.is_predictable, s.kv, s.state) for s, _ in rows]
    schedule = fill(rows)
    schedule.drop({owner for owner, (*_, dropped) in rows if dropped})
    without = fill([(owner, row) for owner, row in rows if not row[-1]])
    assert schedule.tokens_left == without.tokens_left
    assert schedule.pages_left == without.pages_left
    assert [row.sequence for row in schedule.rows] == [row.sequence for row in without.rows]
    assert [(s.in_flight, s.is_predictable, s.kv, s.state) for s, _ in rows] == before
