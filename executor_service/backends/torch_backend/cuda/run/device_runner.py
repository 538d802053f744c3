"""`DeviceRunner`: steps on a device that computes by itself while the host goes on.

    launch     rows ─► HostStep ─► one copy ─► resolve, layers, logits, pick, accept ─► one copy back
               what some rows want beyond that (`LatePicks`, `PromptVectors`) ─► copies back
    constrain  masks of rows that follow others ─► one copy ─► their logits, pick again
    outputs    wait for the copies back

The host reads nothing back before `outputs`, so it can launch the next step before this one is computed. The
tokens that the next step continues from, and the lengths at which it starts, are then looked up on the
device, in `_ends`.

Rows may want more than a token drawn from their logits: masks, penalties, biases, logprobs, the logits
themselves, scores and vectors of their prompts. All of that is computed on the device too, from the step's
residual, after everything else of the step. So a mask may come while the step is computed, and the step
is the same for the other rows, and the same CUDA graph.

Of several ranks, rank 0 tells the others each step's numbers, and they `repeat` it: the same graph, with the
collectives in it, after which all ranks have all logits and pick the same tokens. What some rows want beyond
that only rank 0 knows; the others have their part in the logits for it, and are given the rows' ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from executor_service.backends.base import ModelError, PendingForward, Progress
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.cuda.kernels import CudaStep
from executor_service.backends.torch_backend.cuda.launch.launch import dependent_launches
from executor_service.backends.torch_backend.cuda.layout.host_buffers import HostBuffer, HostBuffers
from executor_service.backends.torch_backend.cuda.layout.host_step import HostStep, RankMessage, StepNumbers
from executor_service.backends.torch_backend.cuda.layout.resolve import TokenPages, resolve
from executor_service.backends.torch_backend.cuda.layout.row_ends import RowEnds, accept_launch
from executor_service.backends.torch_backend.cuda.layout.rows import MAX_CONTEXT, Tiling
from executor_service.backends.torch_backend.cuda.layout.step_buffer import (
    Picked,
    StepBuffer,
    StepShape,
    numbers_of,
)
from executor_service.backends.torch_backend.cuda.linear.device_adapters import DeviceSlots
from executor_service.backends.torch_backend.cuda.picking.late_picks import LatePicks
from executor_service.backends.torch_backend.cuda.picking.pick import pick
from executor_service.backends.torch_backend.cuda.run.graphs import Graphs, shapes_of
from executor_service.backends.torch_backend.cuda.run.launched_step import LaunchedStep
from executor_service.backends.torch_backend.cuda.run.step_event import DeviceEvent
from executor_service.backends.torch_backend.cuda.run.warmup_rows import rows_of_every_kind
from executor_service.backends.torch_backend.model.model import Model
from executor_service.backends.torch_backend.model.runner import Numbers, Tell, tell_nobody
from executor_service.backends.torch_backend.model.shard import Shard, Whole
from executor_service.backends.torch_backend.ops.page_format import LayerCache, copy_keys_and_values
from executor_service.backends.torch_backend.ops.row_tensors import LOGITS_ROWS

_MAX_ROWS = 1 << 16  # of a step
_UNFINISHED = 2  # steps that may be enqueued: the host stays no further ahead than rank 0's


class DeviceRunner:
    """Launches the steps of one model over its caches; all calls from one thread."""

    max_pending_forwards = 2

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerCache],
        page_size: int,
        slots: DeviceSlots | None = None,
        shard: Shard | None = None,
        tell: Tell = tell_nobody,
        *,
        dependent: bool = False,
    ) -> None:
        """`slots`: of the rows' adapters; None: rows have none. `shard`: of the model; None: all of it.

        `dependent`: a step's kernels are launched within `dependent_launches`.

        Raises ModelError for a model whose context is above MAX_CONTEXT.
        """
        if model.spec.context_length > MAX_CONTEXT:
            raise ModelError(
                f"context_length {model.spec.context_length} is above {MAX_CONTEXT}: not on CUDA"
            )
        self._model, self._caches, self._page_size, self._slots = model, caches, page_size, slots
        self._shard, self._tell, self._dependent = shard or Whole(), tell, dependent
        self._device = model.kernels.device
        shape = model.attention_shape
        self._tiling = Tiling.of(
            shape.heads_per_kv_head, model.kernels.dtype, shape.head_dim, shape.windows, shape.kv_heads
        )
        self._graphs = Graphs(self._device, self._tiling)
        self._ends = RowEnds.of(_MAX_ROWS, self._device)  # of the last step's rows
        self._numbers = torch.arange(_MAX_ROWS, dtype=torch.int32, device=self._device)
        self._history = TokenPages(caches[0].k.shape[0], page_size, self._device)
        self._late = LatePicks(model, self._history, self._ends, self._shard, tell)
        self._hosts = HostBuffers(self._device)
        self._repeated = RepeatedSteps(self._device, self._hosts, self._shard.timeout_s)

    def capture(self, rows: int, tokens: int, progress: Progress) -> None:
        vocabulary = self._shard.whole_vocabulary(self._model.spec.vocab_size)
        for slot in (-1, 0) if self._slot_count else (-1,):  # compiled here, not in a step
            self.launch(ForwardRows(rows_of_every_kind(vocabulary, slot))).outputs()
        if self._model.capturable:
            self._tell(lambda: np.array([RankMessage.CAPTURE, rows, tokens], np.int32))
            self._capture(rows, tokens, progress)

    def launch(self, rows: ForwardRows) -> PendingForward:
        with torch.inference_mode():
            step = HostStep(rows, self._page_size, self._tiling)
            self._tell(lambda: np.append(np.int32(RankMessage.STEP), step.pack()))
            picked, host = self._run(step)
            timeout_s = self._shard.timeout_s
            return LaunchedStep(self._model, self._late, rows, picked, step, self._hosts, host, timeout_s)

    def repeat(self, message: Numbers) -> None:
        numbers = message[1:]
        with torch.inference_mode():
            if message[0] == RankMessage.STEP:
                self._repeated.add(*self._run(StepNumbers.unpack(numbers, self._tiling.windows)))
            elif message[0] == RankMessage.LATE:
                self._late.repeat(numbers, self._repeated.last)
            else:
                rows, tokens = numbers.tolist()
                self._capture(rows, tokens, lambda *_: None)

    def copy_page(self, source: int, target: int) -> None:
        with torch.inference_mode():
            copy_keys_and_values(self._caches, source, target)
            self._history.copy(source, target)

    def close(self) -> None:
        self._graphs.close()

    @property
    def _slot_count(self) -> int:
        return 0 if self._slots is None else self._slots.count

    def _capture(self, rows: int, tokens: int, progress: Progress) -> None:
        """Capture the CUDA graphs of steps up to this size, and reserve the host buffers that they need."""
        context = self._model.spec.context_length
        shapes = shapes_of(rows, tokens, self._page_size, context, self._tiling, self._slot_count)
        with torch.inference_mode():
            self._graphs.capture(self._compute, shapes, progress)
        self._hosts.reserve(self.max_pending_forwards + 1, max(map(_host_numbers, shapes)))

    def _run(self, step: StepNumbers) -> tuple[Picked, HostBuffer]:
        """Start a step; its results, and its host buffer, which ends with room for the picks."""
        found = self._graphs.find(step.shape)
        shape = found[0] if found else step.shape
        host = self._hosts.take(_host_numbers(shape))
        used = step.write(shape, host.array)
        if found:
            self._graphs.buffer[:used].copy_(host.tensor[:used], non_blocking=True)
            found[1].replay()
            return found[1].picked, host
        buffer = host.tensor[:used].to(self._device, non_blocking=True)
        return self._compute(StepBuffer(buffer, shape, self._tiling)), host

    def _compute(self, step: StepBuffer) -> Picked:
        """Everything that the device does in any step. Nothing is read back, so that it can be captured."""
        with dependent_launches(on=self._dependent):
            return self._enqueue(step)

    def _enqueue(self, step: StepBuffer) -> Picked:
        found = resolve(step.rows, step.attention.values(), self._ends, self._history)
        attention = CudaStep(found.positions, found.pages, found.slots, step.attention)
        changes = None
        if step.adapted is not None:
            assert self._slots is not None
            changes = self._slots.changes_of(step.adapted)
        residual = self._model.residual(found.tokens, attention, self._caches, changes)
        hidden = self._model.final(residual[step.outputs])
        picks = torch.empty(2, len(hidden), dtype=torch.int32, device=self._device)
        for first in range(0, len(hidden), LOGITS_ROWS):
            part = slice(first, first + LOGITS_ROWS)
            logits = self._model.shared_logits(hidden[part])
            pick(logits, step.pick(part, found), picks[0, part], picks[1, part])
        if len(hidden):
            accept_launch(
                self._ends, picks[0], found.tokens, found.positions, step.outputs,
                step.first_outputs, step.last_outputs, self._numbers,
            ).run()  # fmt: skip
        return Picked(found, step.outputs, residual, picks)


def _host_numbers(shape: StepShape) -> int:
    """int32s of a step's host buffer: its inputs, then its picks."""
    return numbers_of(shape) + 2 * shape.outputs


class RepeatedSteps:
    """Gives the steps' host buffers back once the device is done with them."""

    def __init__(self, device: torch.device, hosts: HostBuffers, timeout_s: float | None) -> None:
        """`timeout_s`: as in `Shard`."""
        self._device, self._hosts, self._timeout_s = device, hosts, timeout_s
        self._steps: deque[tuple[DeviceEvent, HostBuffer]] = deque()
        self.last: Picked
        """The results of the step that was added last."""

    def add(self, picked: Picked, host: HostBuffer) -> None:
        """A step that was started, and its buffer of `hosts`; waits for an earlier one if there are many.

        Raises TimeoutError if that takes too long.
        """
        self.last = picked
        self._steps.append((DeviceEvent(self._device, self._timeout_s), host))
        if len(self._steps) > _UNFINISHED:
            done, host = self._steps.popleft()
            done.wait()
            self._hosts.give_back(host)
