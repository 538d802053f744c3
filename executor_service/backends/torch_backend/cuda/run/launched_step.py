"""`LaunchedStep`: a step that the device is computing, until its outputs are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from executor_service.backends.forward_rows import ForwardOutputs, ForwardRows, RowOutput
from executor_service.backends.torch_backend.cuda.layout.host_buffers import HostBuffer, HostBuffers
from executor_service.backends.torch_backend.cuda.layout.host_step import HostStep
from executor_service.backends.torch_backend.cuda.layout.step_buffer import Picked
from executor_service.backends.torch_backend.cuda.picking.late_answers import LateAnswers
from executor_service.backends.torch_backend.cuda.picking.late_picks import LatePicks
from executor_service.backends.torch_backend.cuda.run.prompt_vectors import PromptVectors, wants_vectors
from executor_service.backends.torch_backend.cuda.run.step_event import DeviceEvent
from executor_service.backends.torch_backend.model.model import Model
from executor_service.contract.masks import Masks
from executor_service.contract.plan import OutputMode


class LaunchedStep:
    """The `PendingForward` of a `DeviceRunner`."""

    def __init__(
        self,
        model: Model,
        late: LatePicks,
        rows: ForwardRows,
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
        self._done: DeviceEvent | None = None
        self._masks: Mapping[int, Masks | None] = {}  # that came later
        others = rows.others
        self._answers: list[LateAnswers | PromptVectors | None] = []
        now: list[int] = []
        if others:
            now += [index for index, row in others.items() if not row.masked_later]
            self._answers.append(late.enqueue(rows, now, picked, step, prompts=True))
            if wants_vectors(others.values()):
                self._answers.append(PromptVectors(model, rows, picked.residual))
        if len(now) == len(others):
            self._read_back()

    def constrain(self, masks: Mapping[int, Masks | None]) -> None:
        self._masks, rows = masks, self._rows
        rows.others |= {i: replace(rows.others[i], masks=mask) for i, mask in masks.items()}
        self._answers.append(self._late.enqueue(rows, list(masks), self._picked, self._step, prompts=False))
        self._read_back()

    def _read_back(self) -> None:
        """Enqueue the copy of the picks to the host, [2, outputs]: tokens, and 1 where logits are finite."""
        picks = self._picked.picks
        self._picks = self._host.picks(picks.shape[1])
        self._picks.copy_(picks, non_blocking=True)
        self._done = DeviceEvent(self._device, self._timeout_s)

    def wait(self) -> None:
        """As `PendingForward.wait`. Raises TimeoutError."""
        if self._done is not None:
            self._done.wait()

    def outputs(self) -> ForwardOutputs:
        self.wait()
        tokens, finite = self._picks.numpy().copy()
        self._hosts.give_back(self._host)
        end = decodes = self._rows.decodes
        bad = [] if finite[:decodes].all() else np.flatnonzero(finite[:decodes] == 0).tolist()
        outputs = ForwardOutputs(tokens[:decodes].tolist(), dict.fromkeys(bad), {})
        for index, row in self._rows.others.items():
            begin, end = end, end + row.outputs
            masks = self._masks.get(index)
            verified = begin + (row.outputs if masks is None else len(masks))
            if not finite[begin:verified].all():
                outputs.others[index] = RowOutput(finite=False)
            elif row.outputs and row.output is OutputMode.SAMPLE:
                outputs.others[index] = RowOutput(tokens=tokens[begin:verified])
            else:
                outputs.others[index] = RowOutput()
        for answers in self._answers:
            if answers is not None:
                answers.read(outputs)
        return outputs
