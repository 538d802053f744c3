"""`LaunchedStep`: a step that the device is computing, until its outputs are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.backends.forward_rows import ForwardOutputs, others_of
from executor_service.backends.torch_backend.cuda.layout.host_buffers import HostBuffer, HostBuffers
from executor_service.backends.torch_backend.cuda.layout.host_step import HostStep
from executor_service.backends.torch_backend.cuda.layout.step_buffer import Picked
from executor_service.backends.torch_backend.cuda.picking.late_answers import LateAnswers
from executor_service.backends.torch_backend.cuda.picking.late_picks import LatePicks
from executor_service.backends.torch_backend.cuda.run.prompt_vectors import PromptVectors, wants_vectors
from executor_service.backends.torch_backend.cuda.run.step_event import StepEvent
from executor_service.backends.torch_backend.model.model import Model
from executor_service.contract.masks import Masks
from executor_service.contract.plan import OutputMode


class LaunchedStep:
    """The `PendingForward` of a `DeviceRunner`."""

    def __init__(
        self,
        model: Model,
        late: LatePicks,
        rows: Sequence[ForwardRow],
        picked: Picked,
        step: HostStep,
        hosts: HostBuffers,
        host: HostBuffer,
        timeout_s: float | None,
    ) -> None:
        """`host`, of `hosts`, ends with room for the picks; `timeout_s`: as in `Shard`."""
        self._late, self._rows, self._picked, self._step = late, rows, picked, step
        self._hosts, self._host = hosts, host
        self._device, self._timeout_s = picked.picks.device, timeout_s
        self._done: StepEvent | None = None
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
        self._done = StepEvent(self._device, self._timeout_s)

    def wait(self) -> None:
        """As `PendingForward.wait`. Raises TimeoutError."""
        if self._done is not None:
            self._done.wait()

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
