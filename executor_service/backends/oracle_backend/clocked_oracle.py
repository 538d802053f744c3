"""`ClockedOracle`: the oracle with a modelled step time, computed asynchronously as on a GPU.

A thread stands for the device. Steps can be launched before their predecessors are computed; input tokens
and lengths that the host does not know yet are taken from the previous launch. Host work overlaps with steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from executor_service.adapters.weights import AdapterWeights
from executor_service.backends.acceptance import mask_late, resolved
from executor_service.backends.base import ForwardOutput, PendingForward
from executor_service.backends.forward_rows import ForwardOutputs, ForwardRow, ForwardRows, RowOutput
from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.backends.oracle_backend.settings import OracleSettings
from executor_service.contract.forward_view import WHOLE, ForwardView
from executor_service.contract.masks import Masks
from executor_service.contract.plan import TokenIds


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A launch in the device thread's queue."""

    future: Future[list[RowOutput]]
    masks: Future[Mapping[int, Masks | None]]
    decodes: int

    def constrain(self, masks: Mapping[int, Masks | None]) -> None:
        self.masks.set_result(masks)

    def wait(self) -> None:
        wait([self.future])

    def outputs(self) -> ForwardOutputs:
        return ForwardOutputs.of(self.future.result(), self.decodes)


class ClockedOracle(OracleBackend):
    """The oracle on a device thread, which runs launches, copies and forwards in call order."""

    max_pending_forwards = 2

    def __init__(self, config: OracleSettings) -> None:
        super().__init__(config)
        self._device = ThreadPoolExecutor(1, thread_name_prefix="oracle")
        # The last launch; used by the device thread only.
        self._rows: list[ForwardRow] = []
        self._outputs: list[RowOutput] = []
        self._masks: Future[Mapping[int, Masks | None]] | None = None  # of the launch that is computed

    def launch(self, rows: ForwardRows) -> PendingForward:
        # The host may change the arrays after this returns: copy them.
        mine = [
            replace(
                row, tokens=row.tokens.copy(), history=row.history.copy(), block_table=row.block_table.copy()
            )
            for row in rows
        ]
        masks: Future[Mapping[int, Masks | None]] = Future()
        return _OnDevice(self._device.submit(self._compute, mine, masks), masks, rows.decodes)

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        return list(self.launch(ForwardRows(rows)).outputs())

    def load_adapter(self, slot: int, prepared: AdapterWeights) -> None:
        self._device.submit(super().load_adapter, slot, prepared)

    def unload_adapter(self, slot: int) -> None:
        self._device.submit(super().unload_adapter, slot)

    def copy_page(self, source: int, target: int) -> None:
        self._device.submit(super().copy_page, source, target)

    def forward_once(
        self, inputs: Sequence[TokenIds], want: frozenset[str], view: ForwardView = WHOLE
    ) -> list[ForwardOutput]:
        return self._device.submit(super().forward_once, inputs, want, view).result()

    def close(self) -> None:
        self._device.shutdown()
        super().close()

    def _compute(self, rows: list[ForwardRow], masks: Future[Mapping[int, Masks | None]]) -> list[RowOutput]:
        self._masks = masks
        self._rows = [
            resolved(row, self._rows[row.follows], self._outputs[row.follows]) if row.follows >= 0 else row
            for row in rows
        ]
        self._outputs = super().forward(self._rows)
        return self._outputs

    def _take_masks(self, rows: Sequence[ForwardRow], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        assert self._masks is not None
        ends = np.cumsum([row.outputs for row in rows])
        kept = np.ones(len(logits), np.bool_)
        for index, masks in self._masks.result().items():
            kept[ends[index] - mask_late(rows[index], masks) : ends[index]] = False
        return logits[kept]


def oracle_of(config: OracleSettings) -> OracleBackend:
    """The oracle; with a modelled step time, on a device thread. Raises ValueError."""
    return ClockedOracle(config) if config.step_ms or config.token_us else OracleBackend(config)
