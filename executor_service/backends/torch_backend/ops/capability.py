"""What a CUDA device is able to do, by its compute capability."""

from __future__ import annotations

import torch

from executor_service.backends.base import ModelError


def check_capability(what: str, device: torch.device, needed: tuple[int, int]) -> None:
    """Raises ModelError, which names `what`, for a CUDA device of a lower compute capability."""
    if (found := torch.cuda.get_device_capability(device)) < needed:
        have, need = (f"{major}.{minor}" for major, minor in (found, needed))
        raise ModelError(f"{what} needs compute capability {need}; {str(device)!r} has {have}")
