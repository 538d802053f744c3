"""A CUDA device that computes nothing: its tensors have no contents, which the host may not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor_service.backends.torch_backend.cuda.launch import Launch

FAKE_CUDA = torch.device("cuda:0")
# They launch nothing: views, and memory.
_FREE = (
    "aten::view", "aten::slice", "aten::select", "aten::split", "aten::detach", "aten::alias", "aten::t",
    "aten::transpose", "aten::_unsafe_view", "aten::empty", "aten::_to_copy_view", "aten::unsqueeze",
)  # fmt: skip

aten = torch.ops.aten


class Indexing(TorchFunctionMode):
    """Python's indexing without its device guard, which builds of torch for CPU lack."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        x, index = args
        dim = 0
        for item in index if isinstance(index, tuple) else (index,):
            if item is None:
                x = x.unsqueeze(dim)
                dim += 1
            elif isinstance(item, slice):
                x = aten.slice.Tensor(x, dim, item.start, item.stop, item.step or 1)
                dim += 1
            elif isinstance(item, int):
                x = aten.select.int(x, dim, item)
            else:
                assert isinstance(item, torch.Tensor), f"an index of the host: {item}"
                assert item.dtype in (torch.int32, torch.int64), f"its size is read back: {item.dtype}"
                assert item.device == x.device, "an index crosses"
                x = aten.index.Tensor(x, [*([None] * dim), item])
                dim += 1
        return x


class Launches(TorchDispatchMode):
    """Counts what is launched. AssertionError for an operation on tensors of the host as well."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        assert {x.device for x in tensors if x.dim()} <= {FAKE_CUDA}, f"{func} crosses to the host"
        if not func.name().split(".")[0].startswith(_FREE):
            self.counts[func.name()] += 1
        return result

    @property
    def total(self) -> int:
        """All launches."""
        return self.counts.total()


@contextmanager
def fake_device() -> Iterator[Launches]:
    """Inside, tensors have no contents, and kernels are counted instead of launched."""

    def run(launch: Launch) -> None:
        tensors = [x for x in launch.arguments.values() if isinstance(x, torch.Tensor)]
        assert {x.device for x in tensors} == {FAKE_CUDA}
        launches.counts[launch.kernel.fn.__name__] += 1

    launches = Launches()
    with (
        FakeTensorMode(allow_non_fake_inputs=False),
        torch.inference_mode(),
        Indexing(),
        mock.patch.object(Launch, "run", run),
    ):
        yield launches
