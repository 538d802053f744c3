"""Backends that are as late as a device can be: nothing is computed before its outputs are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from executor_service.backends.acceptance import mask_late, resolved
from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.backends.forward_rows import ForwardOutputs, ForwardRows
from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.backends.reference.paged_attention import PagedAttentionBackend
from executor_service.contract.masks import Masks
from executor_service.contract.plan import OutputMode
from tests.unit.executor.fakes import FakeBackend


class DeferredForward:
    """One launch of a `Deferring` backend; its rows were read when it was launched."""

    def __init__(
        self, backend: Deferring, rows: list[ForwardRow], decodes: int, before: DeferredForward | None
    ) -> None:
        self._backend, self.rows, self._decodes, self._before = backend, rows, decodes, before
        self.results: list[RowOutput] | None = None
        self.lacks = {index for index, row in enumerate(rows) if row.masked_later}

    def wait(self) -> None:
        """It computes when it is asked."""

    def constrain(self, masks: Mapping[int, Masks | None]) -> None:
        assert self.lacks
        assert self.lacks == masks.keys()
        assert self.results is None
        for index, given in masks.items():
            mask_late(self.rows[index], given)
        self.lacks = set()

    def outputs(self) -> ForwardOutputs:
        return ForwardOutputs.of(self._backend.finish(self), self._decodes)

    def compute(self) -> None:
        """What its rows follow is known by now: the order of the launches is the device's."""
        assert not self.lacks, "some masks have not come"
        self.resolve()
        self.results = self._backend.compute(self.rows)
        self._before = None

    def resolve(self) -> None:
        """Look up what its rows follow, which is computed."""
        self.rows = [self._resolved(row) for row in self.rows]

    def _resolved(self, row: ForwardRow) -> ForwardRow:
        if row.follows < 0:
            return row
        before = self._before
        assert before is not None
        assert before.results is not None
        found = resolved(row, before.rows[row.follows], before.results[row.follows])
        assert row.start - row.slack <= found.start <= row.start
        return found


class Deferring:
    """What makes a synchronous backend late, put before it among the bases of a class.

    Two pending forwards at a time; asserts the rules of the border.
    """

    max_pending_forwards = 2

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.launches = 0
        self.open_lengths = 0  # rows that followed one with drafts
        self.followed = 0  # rows that followed another
        self.masked_later = 0  # of these, rows whose mask came after their launch
        self.unanswered: deque[DeferredForward] = deque()
        self._stream: deque[DeferredForward | partial[None]] = deque()  # launches and copies, in their order
        self._last: DeferredForward | None = None

    def launch(self, rows: ForwardRows) -> DeferredForward:
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
        forward = DeferredForward(self, copies, rows.decodes, self._last if self.unanswered else None)
        self._last = forward
        self._stream.append(forward)
        self.unanswered.append(forward)
        self.launches += 1
        return forward

    def _check_following(self, row: ForwardRow) -> None:
        assert self.unanswered, "the row follows what was answered"
        assert self._last is self.unanswered[-1]
        self._last.resolve()  # two are pending at most: what it follows is computed
        ahead = self._last.rows[row.follows]
        assert ahead.output is OutputMode.SAMPLE
        assert ahead.outputs > 0
        assert row.slack == ahead.outputs - 1
        assert row.start == ahead.start + len(ahead.tokens)
        assert row.sampling is ahead.sampling
        assert row.masked_later == (row.sampling.grammar is not None and row.output is OutputMode.SAMPLE)
        self.followed += 1
        self.open_lengths += row.slack > 0
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
        outputs: list[RowOutput] = super().forward(rows)  # type: ignore[misc]
        return outputs

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        return list(self.launch(ForwardRows(rows)).outputs())

    def copy_page(self, source: int, target: int) -> None:
        self._in_order(partial(super().copy_page, source, target))  # type: ignore[misc]

    def load_adapter(self, slot: int, prepared: Any) -> None:
        self._in_order(partial(super().load_adapter, slot, prepared))  # type: ignore[misc]

    def unload_adapter(self, slot: int) -> None:
        self._in_order(partial(super().unload_adapter, slot))  # type: ignore[misc]

    def _in_order(self, work: partial[None]) -> None:
        if self.unanswered:
            self._stream.append(work)
        else:
            work()


class DeferredBackend(Deferring, FakeBackend):
    """The fake as a device."""


class DeferredOracle(Deferring, OracleBackend):
    """The oracle as a device."""


class DeferredAttention(Deferring, PagedAttentionBackend):
    """The reference model as a device."""
