"""`RepeatedSteps`: the steps of a rank above 0, whose outputs nobody reads."""

from __future__ import annotations

from collections import deque

import torch

from executor_service.backends.torch_backend.cuda.layout.host_buffers import HostBuffer, HostBuffers
from executor_service.backends.torch_backend.cuda.layout.step_buffer import Picked

_UNFINISHED = 2  # steps that may be enqueued: the host stays no further ahead than rank 0's


class RepeatedSteps:
    """Gives the steps' host buffers back once the device is done with them."""

    def __init__(self, device: torch.device, hosts: HostBuffers) -> None:
        self._device, self._hosts = device, hosts
        self._steps: deque[tuple[torch.cuda.Event | None, HostBuffer]] = deque()
        self.last: Picked
        """The results of the step that was added last."""

    def add(self, picked: Picked, host: HostBuffer) -> None:
        """A step that was started, and its buffer of `hosts`; waits for an earlier one if there are many."""
        self.last, done = picked, None
        if self._device.type == "cuda":
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record()
        self._steps.append((done, host))
        if len(self._steps) > _UNFINISHED:
            done, host = self._steps.popleft()
            if done is not None:
                done.synchronize()
            self._hosts.give_back(host)
