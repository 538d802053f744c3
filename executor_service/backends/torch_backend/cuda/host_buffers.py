"""`HostBuffers`: page-locked host memory for the copies to and from the device."""

from __future__ import annotations

import torch

from executor_service.backends.torch_backend.cuda.launch import power_of_two


class HostBuffers:
    """int32 buffers that are used again: allocating page-locked memory can take longer than a step.

    A step has a buffer of its own from its launch until its outputs are read, when both copies are done. The
    buffer of a step that nobody reads is freed. All calls from one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._free: list[torch.Tensor] = []

    def reserve(self, count: int, numbers: int) -> None:
        """Allocate `count` buffers of at least so many int32s, in place of those that are free."""
        self._free = [self._new(numbers) for _ in range(count)]

    def take(self, numbers: int) -> torch.Tensor:
        """A buffer of at least so many int32s, which may hold anything."""
        while self._free:
            buffer = self._free.pop()
            if len(buffer) >= numbers:
                return buffer  # a smaller one is dropped: steps of this size come again
        return self._new(numbers)

    def give_back(self, buffer: torch.Tensor) -> None:
        """What `take` returned, when no copy from or to it is pending."""
        self._free.append(buffer)

    def _new(self, numbers: int) -> torch.Tensor:
        with torch.inference_mode(mode=False):  # in which the buffer may be written outside of it too
            return torch.empty(power_of_two(max(numbers, 1)), dtype=torch.int32, pin_memory=self._pinned)
