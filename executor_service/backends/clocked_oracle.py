"""`ClockedOracle`: the oracle with a step time, which passes on a device of its own while the host goes on.

It stands for a GPU: steps are launched ahead, tokens that the host does not know are looked up where they are
sampled, and whatever the host does meanwhile costs the device nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from executor_service.backends.base import ForwardOutput, ForwardRow, PendingForward, RowOutput
from executor_service.backends.oracle import OracleBackend
from executor_service.backends.oracle_settings import OracleSettings
from executor_service.contract.plan import TokenIds

_NO_TOKEN = 0  # what follows a row that was not finite


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A launch that the device does in its turn."""

    future: Future[list[RowOutput]]

    def wait(self) -> None:
        wait([self.future])

    def outputs(self) -> list[RowOutput]:
        return self.future.result()


class ClockedOracle(OracleBackend):
    """The device is a thread; it does launches, copies and forwards in the order in which they come."""

    max_pending_forwards = 2

    def __init__(self, config: OracleSettings) -> None:
        super().__init__(config)
        self._device = ThreadPoolExecutor(1, thread_name_prefix="oracle")
        self._sampled: list[RowOutput] = []  # of the last launch; the device's

    def launch(self, rows: Sequence[ForwardRow]) -> PendingForward:
        # The arrays are views of what the host changes.
        mine = [replace(row, history=row.history.copy(), block_table=row.block_table.copy()) for row in rows]
        return _OnDevice(self._device.submit(self._compute, mine))

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        return self.launch(rows).outputs()

    def copy_page(self, source: int, target: int) -> None:
        self._device.submit(super().copy_page, source, target)

    def forward_once(self, inputs: Sequence[TokenIds], want: frozenset[str]) -> list[ForwardOutput]:
        return self._device.submit(super().forward_once, inputs, want).result()

    def close(self) -> None:
        self._device.shutdown()
        super().close()

    def _compute(self, rows: list[ForwardRow]) -> list[RowOutput]:
        for row in rows:
            if row.follows >= 0:
                sampled = self._sampled[row.follows].tokens
                row.history[-1] = _NO_TOKEN if sampled is None else sampled[-1]
            row.tokens = row.history[row.start :]
        self._sampled = super().forward(rows)
        return self._sampled


def oracle_of(config: OracleSettings) -> OracleBackend:
    """The oracle, on a device of its own if its steps take time. Raises ValueError."""
    return ClockedOracle(config) if config.step_ms or config.token_us else OracleBackend(config)
