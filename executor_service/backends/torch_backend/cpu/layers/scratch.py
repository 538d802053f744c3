"""`Scratch`: memory that one call leaves to the next."""

from __future__ import annotations

import numpy as np

from executor_service.backends.torch_backend.cpu.primitives.records import Address, address_of


class Scratch:
    """Memory that all products of one thread use, one after the other."""

    def __init__(self) -> None:
        self._buffers = [np.empty(0, np.uint8)]

    def address(self, size: int) -> Address:
        """The address of `size` bytes, which are valid until they are asked for again."""
        if size > len(self._buffers[-1]):
            # Smaller buffers stay, because recorded calls hold their addresses. Together they are smaller
            # than the new one.
            self._buffers.append(np.empty(max(size, 2 * len(self._buffers[-1])), np.uint8))
        return address_of(self._buffers[-1])
