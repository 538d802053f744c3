"""`ClockedRunner`: a `DeviceRunner` whose device is a clock, to measure the host's part of its steps.

Everything of the runner is real but what the device does: kernels are not launched, and torch's operations
work on a model without layers and a small vocabulary. A step takes `step_s`, and waiting for its results
waits for that. The tokens mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

import torch

from executor_service.backends.base import PendingForward
from executor_service.backends.forward_rows import ForwardOutputs, ForwardRows
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from executor_service.backends.torch_backend.cuda.layout.resolve import new_resolved
from executor_service.backends.torch_backend.cuda.layout.step_buffer import Picked, StepBuffer
from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner
from executor_service.backends.torch_backend.ops.kernels import AttentionShape
from executor_service.backends.torch_backend.ops.page_format import LayerCache
from executor_service.contract.masks import Masks

HIDDEN, VOCABULARY = 8, 512  # of the model


class DeviceClock(Protocol):
    """By which a device computes; seconds."""

    def now(self) -> float: ...

    def wait_until(self, time_s: float) -> None: ...


class CpuClock:
    """CPU time of this thread, and the time for which it waited: other load does not matter."""

    def __init__(self) -> None:
        self._waited_s = 0.0

    def now(self) -> float:
        return time.thread_time() + self._waited_s

    def wait_until(self, time_s: float) -> None:
        self._waited_s += max(time_s - self.now(), 0.0)


class WallClock:
    """The time that passes."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, time_s: float) -> None:
        while (left_s := time_s - self.now()) > 0:
            time.sleep(left_s)


@dataclass(frozen=True)
class Clocked:
    """A launch whose results are there at a time by the clock."""

    inner: PendingForward
    clock: DeviceClock
    ready_s: float

    def wait(self) -> None:
        self.clock.wait_until(self.ready_s)

    def constrain(self, masks: Mapping[int, Masks | None]) -> None:
        self.inner.constrain(masks)

    def outputs(self) -> ForwardOutputs:
        self.wait()
        return self.inner.outputs()


class ClockedRunner(DeviceRunner):
    """Its steps take `step_s` seconds, one after another."""

    def __init__(self, clock: DeviceClock, pages: int, page_size: int, context_length: int) -> None:
        head = torch.zeros(HIDDEN, VOCABULARY)
        model: Any = SimpleNamespace(
            spec=SimpleNamespace(vocab_size=VOCABULARY, context_length=context_length, layers=0),
            attention_shape=AttentionShape(heads_per_kv_head=4, head_dim=128),
            kernels=SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16),
            final=lambda x: x,
            shared_logits=lambda x: x @ head,
            capturable=True,
        )
        page = torch.zeros(pages, 1)
        super().__init__(model, [LayerCache(page, page, page)], page_size)
        self.step_s = 0.0
        self._clock, self._ready_s = clock, 0.0
        self._computed: dict[tuple[int, int], Picked] = {}

    def launch(self, rows: ForwardRows) -> PendingForward:
        inner = super().launch(rows)
        self._ready_s = max(self._clock.now(), self._ready_s) + self.step_s
        return Clocked(inner, self._clock, self._ready_s)

    def _compute(self, step: StepBuffer) -> Picked:
        size = step.rows.tokens.numel(), step.outputs.numel()
        if (picked := self._computed.get(size)) is None:
            found = new_resolved(*size, step.outputs.device)
            picks = torch.ones(2, size[1], dtype=torch.int32)
            picked = Picked(found, step.outputs, torch.zeros(size[0], HIDDEN), picks)
            self._computed[size] = picked
        return picked


@contextmanager
def no_kernels() -> Iterator[None]:
    """Within it no kernel is launched."""
    with mock.patch.object(Launch, "run", return_value=None):
        yield
