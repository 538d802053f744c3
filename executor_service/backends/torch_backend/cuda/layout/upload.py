"""`upload`: several small arrays to the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

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
