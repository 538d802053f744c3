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
residual, behind everything else of the step. So a mask may come while the step is computed, and the step
is the same for the other rows, and the same CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from executor_service.backends.base import ForwardRow, ModelError, PendingForward, Progress, RowOutput
from executor_service.backends.forward_rows import ForwardOutputs, others_of
from executor_service.backends.torch_backend.batch import LOGITS_ROWS
from executor_service.backends.torch_backend.cuda.device_adapters import DeviceSlots
from executor_service.backends.torch_backend.cuda.every_kind import rows_of_every_kind
from executor_service.backends.torch_backend.cuda.graphs import Graphs, Picked, shapes_of
from executor_service.backends.torch_backend.cuda.host_buffers import HostBuffer, HostBuffers
from executor_service.backends.torch_backend.cuda.host_step import HostStep
from executor_service.backends.torch_backend.cuda.kernels import CudaStep
from executor_service.backends.torch_backend.cuda.late_answers import LateAnswers
from executor_service.backends.torch_backend.cuda.late_picks import LatePicks
from executor_service.backends.torch_backend.cuda.pick import pick
from executor_service.backends.torch_backend.cuda.prompt_vectors import PromptVectors, wants_vectors
from executor_service.backends.torch_backend.cuda.resolve import resolve
from executor_service.backends.torch_backend.cuda.row_ends import RowEnds, accept_launch
from executor_service.backends.torch_backend.cuda.rows import MAX_CONTEXT, Tiling
from executor_service.backends.torch_backend.cuda.step_buffer import StepBuffer, StepShape, numbers_of
from executor_service.backends.torch_backend.cuda.token_pages import TokenPages
from executor_service.backends.torch_backend.layer_cache import LayerCache, copy_keys_and_values
from executor_service.backends.torch_backend.model import Model
from executor_service.contract.masks import Masks
from executor_service.contract.plan import OutputMode

_MAX_ROWS = 1 << 16  # of a step


class DeviceRunner:
    """Launches the steps of one model over its caches; all calls from one thread."""

    max_pending_forwards = 2

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerCache],
        page_size: int,
        slots: DeviceSlots | None = None,
    ) -> None:
        """`slots`: of the rows' adapters; None: rows have none.

        Raises ModelError for a model whose context is above MAX_CONTEXT.
        """
        if model.spec.context_length > MAX_CONTEXT:
            raise ModelError(
                f"context_length {model.spec.context_length} is above {MAX_CONTEXT}: not on CUDA"
            )
        self._model, self._caches, self._page_size, self._slots = model, caches, page_size, slots
        self._device = model.kernels.device
        shape = model.attention_shape
        self._tiling = Tiling.of(shape.heads_per_kv_head, model.kernels.dtype, shape.head_dim, shape.windows)
        self._graphs = Graphs(self._device, self._tiling)
        self._ends = RowEnds.of(_MAX_ROWS, self._device)  # of the last step's rows
        self._numbers = torch.arange(_MAX_ROWS, dtype=torch.int32, device=self._device)
        self._history = TokenPages(caches[0].k.shape[0], page_size, self._device)
        self._late = LatePicks(model, self._history, self._ends)
        self._hosts = HostBuffers(self._device)

    def capture(self, rows: int, tokens: int, progress: Progress) -> None:
        spec, slots = self._model.spec, 0 if self._slots is None else self._slots.count
        for slot in (-1, 0) if slots else (-1,):  # compiled here, not in a step
            self.launch(rows_of_every_kind(spec.vocab_size, slot)).outputs()
        if not self._model.capturable:
            return
        shapes = shapes_of(rows, tokens, self._page_size, spec.context_length, self._tiling, slots)
        with torch.inference_mode():
            self._graphs.capture(self._compute, shapes, progress)
        self._hosts.reserve(self.max_pending_forwards + 1, max(map(_host_numbers, shapes)))

    def launch(self, rows: Sequence[ForwardRow]) -> PendingForward:
        with torch.inference_mode():
            step = HostStep(rows, self._page_size, self._tiling)
            found = self._graphs.find(step.shape)
            shape = found[0] if found else step.shape
            host = self._hosts.take(_host_numbers(shape))
            used = step.write(shape, host.array)
            if found:
                self._graphs.buffer[:used].copy_(host.tensor[:used], non_blocking=True)
                found[1].replay()
                picked = found[1].picked
            else:
                buffer = host.tensor[:used].to(self._device, non_blocking=True)
                picked = self._compute(StepBuffer(buffer, shape, self._tiling))
            return LaunchedStep(self._model, self._late, rows, picked, step, self._hosts, host)

    def copy_page(self, source: int, target: int) -> None:
        with torch.inference_mode():
            copy_keys_and_values(self._caches, source, target)
            self._history.copy(source, target)

    def _compute(self, step: StepBuffer) -> Picked:
        """Everything that the device does in any step. Nothing is read back, so that it can be captured."""
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
            pick(self._model.logits(hidden[part]), step.pick(part, found), picks[0, part], picks[1, part])
        if len(hidden):
            accept_launch(
                self._ends, picks[0], found.tokens, found.positions, step.outputs,
                step.first_outputs, step.last_outputs, self._numbers,
            ).run()  # fmt: skip
        return Picked(found, step.outputs, residual, picks)


def _host_numbers(shape: StepShape) -> int:
    """int32s of a step's host buffer: its inputs, then its picks."""
    return numbers_of(shape) + 2 * shape.outputs


class LaunchedStep:
    """A step that the device is computing: the `PendingForward` of a `DeviceRunner`."""

    def __init__(
        self,
        model: Model,
        late: LatePicks,
        rows: Sequence[ForwardRow],
        picked: Picked,
        step: HostStep,
        hosts: HostBuffers,
        host: HostBuffer,
    ) -> None:
        """`host`, of `hosts`, ends with room for the picks."""
        self._late, self._rows, self._picked, self._step = late, rows, picked, step
        self._hosts, self._host = hosts, host
        self._device = picked.picks.device
        self._done: torch.cuda.Event | None = None
        self._masks: Mapping[int, Masks | None] = {}  # that came later
        others = others_of(rows)
        self._answers: list[LateAnswers | PromptVectors | None] = []
        now: list[int] = []
        if others:
            first = len(rows) - len(others)
            now += [index for index, row in enumerate(others, start=first) if not row.masked_later]
            self._answers.append(late.enqueue(rows, now, picked, step, prompts=True))
            if wants_vectors(others):
                self._answers.append(PromptVectors(model, rows, picked.residual))
        if len(now) == len(others):
            self._read_back()

    def constrain(self, masks: Mapping[int, Masks | None]) -> None:
        rows = [replace(row, masks=masks[i]) if i in masks else row for i, row in enumerate(self._rows)]
        self._masks = masks
        self._answers.append(self._late.enqueue(rows, list(masks), self._picked, self._step, prompts=False))
        self._read_back()

    def _read_back(self) -> None:
        """Enqueue the copy of the picks to the host, [2, outputs]: tokens, and 1 where logits are finite."""
        picks = self._picked.picks
        self._picks = self._host.picks(picks.shape[1])
        self._picks.copy_(picks, non_blocking=True)
        # blocking: wait() sleeps instead of polling, and leaves the core to the thread that launches steps
        self._done = torch.cuda.Event(blocking=True) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._done is not None:
            self._done.record()

    def wait(self) -> None:
        if self._done is not None:
            with torch.cuda.device(self._device):  # each thread has a current device of its own
                self._done.synchronize()

    def outputs(self) -> Sequence[RowOutput]:
        self.wait()
        tokens, finite = self._picks.numpy().copy()
        self._hosts.give_back(self._host)
        others = others_of(self._rows)
        end = decodes = len(self._rows) - len(others)
        outputs = ForwardOutputs(tokens[:decodes], finite[:decodes] != 0, [])
        for index, row in enumerate(others, start=decodes):
            begin, end = end, end + row.outputs
            masks = self._masks.get(index)
            verified = begin + (row.outputs if masks is None else len(masks))
            if not finite[begin:verified].all():
                outputs.others.append(RowOutput(finite=False))
            elif row.outputs and row.output is OutputMode.SAMPLE:
                outputs.others.append(RowOutput(tokens=tokens[begin:verified]))
            else:
                outputs.others.append(RowOutput())
        for answers in self._answers:
            if answers is not None:
                answers.read(outputs)
        return outputs
