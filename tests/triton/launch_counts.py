"""Counts what is launched on the fake CUDA device of `dry.fake_device`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from tests.triton.dry.fake_device import DEVICE, fake_device


class Launches(TorchDispatchMode):
    """Counts what is launched. AssertionError for an operation on tensors of the host as well."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = _tensors((args, kwargs))
        result = func(*args, **(kwargs or {}))
        outputs = _tensors(result)
        assert {x.device for x in inputs + outputs if x.dim()} <= {DEVICE}, f"{func} crosses to the host"
        if "empty" not in func.name() and (
            func._schema.is_mutable or not _places(outputs) <= _places(inputs)
        ):
            self.counts[func.name()] += 1  # neither a view nor memory alone
        return result

    @property
    def total(self) -> int:
        """All launches."""
        return self.counts.total()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _places(tensors: list[torch.Tensor]) -> set[int]:
    return {x.untyped_storage()._cdata for x in tensors}


@contextmanager
def counted_launches() -> Iterator[Launches]:
    """Inside, tensors have no contents, and kernels are counted instead of launched."""

    def run(launch: Launch) -> None:
        tensors = [x for x in launch.arguments.values() if isinstance(x, torch.Tensor)]
        assert {x.device for x in tensors} == {DEVICE}
        launches.counts[launch.kernel.fn.__name__] += 1

    launches = Launches()
    with fake_device(), mock.patch.object(Launch, "run", run):
        yield launches
