"""An executor process whose device is a clock: `python -m tests.support.clocked_executor --step-ms 1.1 ...`.

It takes the flags of the oracle's executor, and says that it has a GPU. All of the service is real, and so is
the host's part of CUDA steps; see `ClockedRunner`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

from executor_service import __main__ as service
from executor_service.backends.base import (
    ForwardOutput,
    ForwardRow,
    ModelDescription,
    PendingForward,
    Progress,
    RowOutput,
    TokenizerBundle,
)
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.oracle_backend.settings import OracleSettings
from executor_service.contract.forward_view import WHOLE, ForwardView
from executor_service.contract.plan import TokenIds
from tests.support.clocked_runner import HIDDEN, VOCABULARY, ClockedRunner, WallClock, no_kernels

_DEFAULT_PAGES = 65_536


class ClockedBackend:
    """A `Backend` with a `ClockedRunner`; it has no tokenizer."""

    max_piece_tokens = 8192
    max_pending_forwards = ClockedRunner.max_pending_forwards

    def __init__(self, settings: OracleSettings) -> None:
        self._settings = settings
        self.info = ModelDescription(
            name="clocked", architecture="clocked", vocab_size=VOCABULARY,
            context_length=settings.context_length, parameters=0, dtype="bfloat16", device="cuda:0",
            hidden_size=HIDDEN, layers=0, kv_bytes_per_token=1, eos_token_ids=(0,), fingerprint=bytes(32),
            has_tokenizer=False,
        )  # fmt: skip

    def load(self, progress: Progress) -> None: ...

    def tokenizer(self) -> TokenizerBundle:
        raise NotImplementedError

    def default_pages(self, page_size: int, rows: int, tokens: int) -> int:
        return _DEFAULT_PAGES

    def page_bytes(self, page_size: int) -> int:
        return page_size

    def allocate(self, pages: int, page_size: int) -> None:
        self._runner = ClockedRunner(WallClock(), pages, page_size, self.info.context_length)

    def capture(self, rows: int, tokens: int, progress: Progress) -> None:
        self._runner.capture(rows, tokens, progress)
        self._runner.step_s = self._settings.step_ms / 1e3

    def launch(self, rows: ForwardRows) -> PendingForward:
        return self._runner.launch(rows)

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        return list(self.launch(ForwardRows(rows)).outputs())

    def copy_page(self, source: int, target: int) -> None:
        self._runner.copy_page(source, target)

    def forward_once(
        self, inputs: Sequence[TokenIds], want: frozenset[str], view: ForwardView = WHOLE
    ) -> list[ForwardOutput]:
        raise NotImplementedError

    def memory_bytes(self) -> dict[str, int]:
        return {}

    def live_bytes(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


def _make_backend(settings: Any, follower_flags: Sequence[str] = ()) -> ClockedBackend:
    assert isinstance(settings, OracleSettings)
    return ClockedBackend(settings)


if __name__ == "__main__":
    with mock.patch("executor_service.runtime.runtime.make_backend", _make_backend), no_kernels():
        status = service.main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)  # as services do
