"""A rank whose `DeviceRunner` is interpreted on CPU: `python -m tests.triton.interpreted.device_rank MODEL`.

As a program it is a follower, whose rank the environment variables of torchrun say.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.cuda.kernels import CudaKernels
from executor_service.backends.torch_backend.cuda.run import graphs
from executor_service.backends.torch_backend.parallel.follower import follow
from executor_service.backends.torch_backend.parallel.ranks import Rank
from tests.support.untyped import present
from tests.triton.mended import mended_interpreter

TIMEOUT_S = 300.0
_SIZES: dict[str, Any] = {
    "_SHORT_TOKENS": (4, 20), "_LONG_TOKENS": (), "_LONG_OUTPUTS": (),
    "_ADAPTED_SHORT_TOKENS": (8,), "_ADAPTED_LONG_TOKENS": (),
}  # fmt: skip


@contextmanager
def interpreted_device() -> Iterator[None]:
    """Within it backends run on the interpreted device, and capture a few small graphs."""
    kernels = CudaKernels(torch.device("cpu"), torch.float32)
    with (
        mock.patch.object(TorchBackend, "_kernels", return_value=kernels),
        mock.patch.object(TorchBackend, "_runs_ahead", new=True),
        mock.patch.multiple(graphs, **_SIZES),
    ):
        yield


if __name__ == "__main__":
    with mended_interpreter(), interpreted_device():
        follow(TorchConfig(Path(sys.argv[1])), present(Rank.from_environment(os.environ)), TIMEOUT_S)
