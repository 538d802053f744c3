"""A sequence driven through a Backend by hand: a block table, a history and a KV length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from executor_service.backends.base import Backend, ForwardRow, RowOutput
from executor_service.contract.plan import OutputMode, Sampling


def pages_from(first: int) -> Iterator[int]:
    """Page numbers, shuffled a little so that no test leans on neighbouring pages."""
    n = first
    while True:
        yield n + 1
        yield n
        n += 2


@dataclass
class Driver:
    """One sequence; every method returns the row to put into a forward."""

    pages: Iterator[int]
    page_size: int
    history: list[int] = field(default_factory=list)
    length: int = 0  # KV length
    table: list[int] = field(default_factory=list)

    def feed(
        self,
        tokens: Sequence[int],
        outputs: int = 1,
        output: OutputMode = OutputMode.FULL,
        sampling: Sampling | None = None,
        prompt_length: int = 0,
    ) -> ForwardRow:
        self.history = self.history[: self.length] + [int(token) for token in tokens]
        start, self.length = self.length, len(self.history)
        while len(self.table) * self.page_size < self.length:
            self.table.append(next(self.pages))
        return ForwardRow(
            start=start,
            tokens=np.array(tokens, np.int32),
            history=np.array(self.history, np.int32),
            prompt_length=prompt_length,
            block_table=np.array(self.table, np.int32),
            outputs=outputs,
            output=output,
            sampling=sampling or Sampling(),
        )

    def truncate(self, length: int) -> None:
        self.length = length
        self.table = self.table[: -(-length // self.page_size)]

    def fork(self, backend: Backend, length: int) -> Driver:
        """Share the full pages, copy the partial one."""
        full, part = divmod(length, self.page_size)
        table = self.table[:full]
        if part:
            table = [*table, next(self.pages)]
            backend.copy_page(self.table[full], table[full])
        return Driver(self.pages, self.page_size, self.history[:length], length, table)


def logits_of(output: RowOutput) -> np.ndarray:
    assert output.finite
    assert output.logits is not None
    return output.logits
