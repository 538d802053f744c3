"""`DeviceRunner`: steps on a device that computes by itself while the host goes on.

    launch     rows ─► HostStep ─► one copy ─► look up tokens, layers, logits, pick ─► one copy back
    constrain  masks of rows that follow others ─► one copy ─► their logits, pick again ─► one copy back
    outputs    wait for the copy back

The host reads nothing back between the two copies, so it can launch the next step before this one is
computed. The tokens that the next step continues from are then looked up on the device, in `_sampled`.

The tokens of masked rows are picked once more, from the step's hidden states, behind everything else of the
step. So a mask may come while the step is computed, and rows without one take no longer.

Rows that need more of their logits than a drawn token (penalties, biases, logprobs, the logits themselves)
are an exception: `sampler` picks their tokens, and the launch (or the call that brings their masks) waits for
it. A launch also waits where rows ask for scores or vectors of their prompts, and uses no CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from executor_service.backends.base import ForwardRow, ModelError, PendingForward, Progress, RowOutput
from executor_service.backends.torch_backend.batch import LOGITS_ROWS
from executor_service.backends.torch_backend.cuda.exclude import exclude_launch
from executor_service.backends.torch_backend.cuda.graphs import Graphs, Picked, shapes_of
from executor_service.backends.torch_backend.cuda.host_buffers import HostBuffers
from executor_service.backends.torch_backend.cuda.late_picks import LatePicks
from executor_service.backends.torch_backend.cuda.pick import pick
from executor_service.backends.torch_backend.cuda.rows import MAX_CONTEXT, Tiling
from executor_service.backends.torch_backend.cuda.step_buffer import (
    HostStep,
    StepBuffer,
    StepShape,
    numbers_of,
)
from executor_service.backends.torch_backend.kernels import LayerCache, copy_keys_and_values
from executor_service.backends.torch_backend.model import Model
from executor_service.backends.torch_backend.prompt_outputs import joined, output_states, prompt_outputs
from executor_service.backends.torch_backend.shard import Whole
from executor_service.contract.masks import Masks

_MAX_ROWS = 1 << 16  # of a step


class DeviceRunner:
    """Launches the steps of one model over its caches; all calls from one thread."""

    max_pending_forwards = 2

    def __init__(self, model: Model, caches: Sequence[LayerCache], page_size: int) -> None:
        """Raises ModelError for a model whose context is above MAX_CONTEXT."""
        if model.spec.context_length > MAX_CONTEXT:
            raise ModelError(
                f"context_length {model.spec.context_length} is above {MAX_CONTEXT}: not on CUDA"
            )
        self._model, self._caches, self._page_size = model, caches, page_size
        self._device = model.kernels.device
        self._tiling = Tiling.of(model.spec.heads // model.spec.kv_heads, model.kernels.dtype)
        self._graphs = Graphs(self._device, self._tiling)
        # The token that each row of the last step sampled last, by the row's index in that step.
        self._sampled = torch.zeros(_MAX_ROWS, dtype=torch.int32, device=self._device)
        self._late = LatePicks(model, self._sampled)
        self._hosts = HostBuffers(self._device)

    def capture(self, rows: int, tokens: int, progress: Progress) -> None:
        if not self._model.capturable:
            return
        spec = self._model.spec
        shapes = shapes_of(rows, tokens, self._page_size, spec.context_length, self._tiling)
        with torch.inference_mode():
            logits = torch.zeros(1, spec.vocab_size, device=self._device)
            words = torch.zeros(1, -(-spec.vocab_size // 32), dtype=torch.int32, device=self._device)
            exclude_launch(logits, words).run()  # compiled here, and not in the first step with a mask
            self._graphs.capture(self._compute, shapes, progress)
        self._hosts.reserve(self.max_pending_forwards + 1, max(map(_host_numbers, shapes)))

    def launch(self, rows: Sequence[ForwardRow]) -> PendingForward:
        prompts: dict[int, RowOutput] = {}
        with torch.inference_mode():
            step = HostStep(rows, self._page_size, self._tiling)
            places = output_states(rows)
            found = self._graphs.find(step.shape) if places is None else None
            shape = found[0] if found else step.shape
            host = self._hosts.take(_host_numbers(shape))
            used = step.write(shape, host.numpy())
            if found:
                self._graphs.buffer[:used].copy_(host[:used], non_blocking=True)
                found[1].replay()
                buffer, picked = self._graphs.buffer, found[1].picked
            else:
                buffer = host[:used].to(self._device, non_blocking=True)
                on_device = StepBuffer(buffer, shape, self._tiling)
                if places is None:
                    picked = self._compute(on_device)
                else:
                    states = self._hidden(on_device, torch.from_numpy(step.states).to(self._device))
                    picked = self._pick(on_device, states[torch.from_numpy(places).to(self._device)])
                    prompts = prompt_outputs(self._model, Whole(), rows, states)
            on_device_later = partial(StepBuffer, buffer, shape, self._tiling)
            return LaunchedStep(self._late, rows, picked, on_device_later, prompts, self._hosts, host)

    def copy_page(self, source: int, target: int) -> None:
        with torch.inference_mode():
            copy_keys_and_values(self._caches, source, target)

    def _compute(self, step: StepBuffer) -> Picked:
        """Everything that the device does in a step. Nothing is read back, so that it can be captured."""
        return self._pick(step, self._hidden(step, step.outputs))

    def _hidden(self, step: StepBuffer, states: torch.Tensor) -> torch.Tensor:
        """The hidden states [states, hidden] of the tokens that `states` names."""
        tokens = torch.where(step.tokens < 0, self._sampled[(-1 - step.tokens).clamp(min=0)], step.tokens)
        return self._model.hidden(tokens, states, step.attention, self._caches)

    def _pick(self, step: StepBuffer, hidden: torch.Tensor) -> Picked:
        """Pick a token for each output, whose hidden states [outputs, hidden] are given."""
        picks = torch.empty(2, len(hidden), dtype=torch.int32, device=self._device)
        for first in range(0, len(hidden), LOGITS_ROWS):
            part = slice(first, first + LOGITS_ROWS)
            pick(self._model.logits(hidden[part]), step.pick(part), picks[0, part], picks[1, part])
        if len(hidden):
            self._sampled[: len(step.last_outputs)] = picks[0][step.last_outputs]
        return Picked(hidden, picks)


def _host_numbers(shape: StepShape) -> int:
    """int32s of a step's host buffer: its inputs, then its picks."""
    return numbers_of(shape) + 2 * shape.outputs


class LaunchedStep:
    """A step that the device is computing: the `PendingForward` of a `DeviceRunner`."""

    def __init__(
        self,
        late: LatePicks,
        rows: Sequence[ForwardRow],
        picked: Picked,
        step: Callable[[], StepBuffer],
        prompts: Mapping[int, RowOutput],
        hosts: HostBuffers,
        host: torch.Tensor,
    ) -> None:
        """`prompts`: what the rows' `prompt`s ask for. `host`, of `hosts`, ends with room for the picks."""
        self._late, self._rows, self._picked, self._step = late, rows, picked, step
        self._prompts, self._hosts, self._host = prompts, hosts, host
        self._device = picked.picks.device
        self._done: torch.cuda.Event | None = None
        now = [index for index, row in enumerate(rows) if not row.masked_later]
        self._answered = late.pick(rows, now, picked, step)
        if len(now) == len(rows):
            self._read_back()

    def constrain(self, masks: Mapping[int, Masks | None]) -> None:
        rows = [replace(row, masks=masks.get(i, row.masks)) for i, row in enumerate(self._rows)]
        self._answered |= self._late.pick(rows, list(masks), self._picked, self._step)
        self._read_back()

    def _read_back(self) -> None:
        """Enqueue the copy of the picks to the host, [2, outputs]: tokens, and 1 where logits are finite."""
        picks = self._picked.picks
        self._picks = self._host[-picks.numel() or len(self._host) :].view(picks.shape)
        self._picks.copy_(picks, non_blocking=True)
        # blocking: wait() sleeps instead of polling, and leaves the core to the thread that launches steps
        self._done = torch.cuda.Event(blocking=True) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._done is not None:
            self._done.record()

    def wait(self) -> None:
        if self._done is not None:
            with torch.cuda.device(self._device):  # each thread has a current device of its own
                self._done.synchronize()

    def outputs(self) -> list[RowOutput]:
        self.wait()
        tokens, finite = self._picks.numpy().copy()
        self._hosts.give_back(self._host)
        results = []
        end = 0
        for index, row in enumerate(self._rows):
            begin, end = end, end + row.outputs
            if index in self._answered:
                results.append(self._answered[index])
            elif not finite[begin:end].all():
                results.append(RowOutput(finite=False))
            else:
                results.append(RowOutput(tokens=tokens[begin:end]) if row.outputs else RowOutput())
        for index, found in self._prompts.items():
            results[index] = joined(results[index], found)
        return results
