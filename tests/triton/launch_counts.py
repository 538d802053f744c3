"""Counts what is launched on the fake CUDA device of `dry.fake_device`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor_service.backends.torch_backend.cuda.launch import Launch
from tests.triton.dry.fake_device import DEVICE, Indexing

# They launch nothing: views, and memory.
_FREE = (
    "aten::view", "aten::slice", "aten::select", "aten::split", "aten::detach", "aten::alias", "aten::t",
    "aten::transpose", "aten::_unsafe_view", "aten::empty", "aten::_to_copy_view", "aten::unsqueeze",
)  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts what is launched. AssertionError for an operation on tensors of the host as well."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        assert {x.device for x in tensors if x.dim()} <= {DEVICE}, f"{func} crosses to the host"
        if not func.name().split(".")[0].startswith(_FREE):
            self.counts[func.name()] += 1
        return result

    @property
    def total(self) -> int:
        """All launches."""
        return self.counts.total()


@contextmanager
def counted_launches() -> Iterator[Launches]:
    """Inside, tensors have no contents, and kernels are counted instead of launched."""

    def run(launch: Launch) -> None:
        tensors = [x for x in launch.arguments.values() if isinstance(x, torch.Tensor)]
        assert {x.device for x in tensors} == {DEVICE}
        launches.counts[launch.kernel.fn.__name__] += 1

    launches = Launches()
    with (
        FakeTensorMode(allow_non_fake_inputs=False),
        torch.inference_mode(),
        Indexing(),
        mock.patch.object(Launch, "run", run),
    ):
        yield launches
