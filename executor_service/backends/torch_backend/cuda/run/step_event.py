"""`DeviceEvent`: waits for what was enqueued on the device, without end or within a deadline.

Where ranks wait for each other inside a CUDA graph, no watchdog of NCCL sees their collectives: one that
stands still would keep the others in `cudaEventSynchronize` for ever (pytorch#102542). So there the event is
asked again and again.
"""

from __future__ import annotations

import time

import torch

_ASK_EVERY_S = 1e-4


class DeviceEvent:
    """A place in the current stream, of whatever the device: without CUDA all before it is done already."""

    def __init__(self, device: torch.device, timeout_s: float | None) -> None:
        """Record the event. `timeout_s`: how long other ranks may keep this one waiting; None: no ranks."""
        self._device, self._timeout_s = device, timeout_s
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            # blocking: to wait is to sleep, not to poll, which leaves the core to the thread that launches
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Return when all is done. Any thread may call this. Raises TimeoutError after `timeout_s`."""
        event, timeout_s = self._event, self._timeout_s
        if event is None:
            return
        with torch.cuda.device(self._device):  # each thread has a current device of its own
            if timeout_s is None:
                event.synchronize()
                return
            deadline = time.monotonic() + timeout_s
            while not event.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a step is not done after {timeout_s:g} s: another rank stands still")
                time.sleep(_ASK_EVERY_S)
