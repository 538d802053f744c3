"""`HostBuffers`: page-locked host memory for the copies to and from the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cuda.launch.launch import power_of_two


class HostBuffer:
    """int32s as a tensor, and as an array over the same memory."""

    def __init__(self, numbers: int, *, pinned: bool) -> None:
        with torch.inference_mode(mode=False):  # in which the buffer may be written outside of it too
            self.tensor = torch.empty(numbers, dtype=torch.int32, pin_memory=pinned)
        self.array = self.tensor.numpy()
        self._picks: dict[int, torch.Tensor] = {}  # made once: a view takes as long as a small copy

    def picks(self, outputs: int) -> torch.Tensor:
        """The last int32s as [2, outputs]."""
        if outputs not in self._picks:
            self._picks[outputs] = self.tensor[len(self.array) - 2 * outputs :].view(2, outputs)
        return self._picks[outputs]


class HostBuffers:
    """Buffers that are used again: allocating page-locked memory can take longer than a step.

    A step has a buffer of its own from its launch until its outputs are read, when both copies are done. The
    buffer of a step that nobody reads is freed. All calls from one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._free: list[HostBuffer] = []

    def reserve(self, count: int, numbers: int) -> None:
        """Allocate `count` buffers of at least `numbers` int32s, in place of those that are free."""
        self._free = [self._new(numbers) for _ in range(count)]

    def take(self, numbers: int) -> HostBuffer:
        """A buffer of at least `numbers` int32s, which may hold anything."""
        while self._free:
            buffer = self._free.pop()
            if len(buffer.array) >= numbers:
                return buffer  # a smaller one is dropped: steps of this size come again
        return self._new(numbers)

    def give_back(self, buffer: HostBuffer) -> None:
        """What `take` returned, when no copy from or to it is pending."""
        self._free.append(buffer)

    def _new(self, numbers: int) -> HostBuffer:
        return HostBuffer(power_of_two(max(numbers, 1)), pinned=self._pinned)


_TYPES = (np.dtype(np.int32), np.dtype(np.float32))

Parts = Mapping[str, NDArray[np.generic]]
"""Arrays of int32 or fp32 by name."""


def upload(parts: Parts, device: torch.device) -> dict[str, torch.Tensor]:
    """The arrays on the device, flattened: views of one buffer. Enqueued; the arrays may then be changed.

    The page-locked memory is the allocator's, which does not use it again before it was copied. Raises
    TypeError for an array of another type.
    """
    if wrong := {name: array.dtype for name, array in parts.items() if array.dtype not in _TYPES}:
        raise TypeError(f"neither int32 nor fp32: {wrong}")
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.int32) for array in parts.values()]
    sizes = [len(array) for array in flat]
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate(flat, out=host.numpy())
    found = torch.split(host.to(device, non_blocking=True), sizes)
    return {
        name: tensor.view(torch.float32) if array.dtype == np.float32 else tensor
        for (name, array), tensor in zip(parts.items(), found, strict=True)
    }


def download(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor in host memory, enqueued: valid once the work up to here is done."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)
