"""A backend that is as late as a device can be: nothing is computed before its outputs are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.contract.masks import Masks
from executor_service.contract.plan import OutputMode
from tests.unit.executor.fakes import FakeBackend


class DeferredForward:
    """One launch of a `DeferredBackend`; its rows were read when it was launched."""

    def __init__(
        self, backend: DeferredBackend, rows: list[ForwardRow], before: DeferredForward | None
    ) -> None:
        self._backend, self.rows, self._before = backend, rows, before
        self.results: list[RowOutput] | None = None
        self.lacks = {index for index, row in enumerate(rows) if row.masked_later}

    def wait(self) -> None:
        """It computes when it is asked."""

    def constrain(self, masks: Mapping[int, Masks | None]) -> None:
        assert self.lacks
        assert self.lacks == masks.keys()
        assert self.results is None
        for index, mask in masks.items():
            self.rows[index].masks = mask
        self.lacks = set()

    def outputs(self) -> list[RowOutput]:
        return self._backend.finish(self)

    def compute(self) -> None:
        """What its rows follow is known by now: the order of the launches is the device's."""
        assert not self.lacks, "some masks have not come"
        before = self._before
        self.results = self._backend.compute([self._resolved(row, before) for row in self.rows])
        self._before = None

    @staticmethod
    def _resolved(row: ForwardRow, before: DeferredForward | None) -> ForwardRow:
        if row.follows < 0:
            return row
        assert before is not None
        assert before.results is not None
        ahead = before.results[row.follows]
        # After a row that was not finite comes whatever the device finds there.
        row.history[-1] = ahead.tokens[0] if ahead.tokens is not None else 96
        return replace(row, tokens=row.history[row.start :])


class DeferredBackend(FakeBackend):
    """Two pending forwards at a time; asserts the rules of the border besides those of its parent."""

    max_pending_forwards = 2

    def __init__(self, context_length: int = 256) -> None:
        super().__init__(context_length)
        self.launches = 0
        self.followed = 0  # rows that followed another
        self.masked_later = 0  # of these, rows whose mask came behind their launch
        self.unanswered: deque[DeferredForward] = deque()
        self._stream: deque[DeferredForward | partial[None]] = deque()  # launches and copies, in their order
        self._last: DeferredForward | None = None

    def launch(self, rows: Sequence[ForwardRow]) -> DeferredForward:
        assert rows
        assert len(self.unanswered) < self.max_pending_forwards, "too many launches are unanswered"
        assert not any(forward.lacks for forward in self.unanswered), "some masks have not come"
        for row in rows:
            assert len(row.history) == row.start + len(row.tokens)
            if row.follows >= 0:
                self._check_following(row)
        assert len({row.follows for row in rows if row.follows >= 0}) == sum(row.follows >= 0 for row in rows)
        copies = [
            replace(
                row, tokens=row.tokens.copy(), history=row.history.copy(), block_table=row.block_table.copy()
            )
            for row in rows
        ]
        forward = DeferredForward(self, copies, self._last if self.unanswered else None)
        self._last = forward
        self._stream.append(forward)
        self.unanswered.append(forward)
        self.launches += 1
        return forward

    def _check_following(self, row: ForwardRow) -> None:
        assert self.unanswered, "the row follows what was answered"
        assert self._last is self.unanswered[-1]
        ahead = self._last.rows[row.follows]
        assert (ahead.outputs, ahead.output) == (1, OutputMode.SAMPLE)
        assert (len(row.tokens), row.start) == (1, ahead.start + len(ahead.tokens))
        assert row.sampling is ahead.sampling
        assert row.masked_later == (row.sampling.grammar is not None and row.output is OutputMode.SAMPLE)
        self.followed += 1
        self.masked_later += row.masked_later

    def finish(self, forward: DeferredForward) -> list[RowOutput]:
        assert forward is self.unanswered.popleft(), "answers are asked for out of order"
        while forward.results is None:
            item = self._stream.popleft()
            if isinstance(item, DeferredForward):
                item.compute()
            else:
                item()
        return forward.results

    def compute(self, rows: list[ForwardRow]) -> list[RowOutput]:
        return super().forward(rows)

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        return self.launch(rows).outputs()

    def copy_page(self, source: int, target: int) -> None:
        copy = partial(super().copy_page, source, target)
        if self.unanswered:
            self._stream.append(copy)
        else:
            copy()
