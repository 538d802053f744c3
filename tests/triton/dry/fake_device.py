"""A CUDA device that computes nothing: tensors have a device, a shape and a size, and no contents.

What the host would have to read from such a device, or to send to it, can't be had: so what runs here can be
captured as a CUDA graph. torch's builds for CPU do not index tensors of another device, hence `Indexing`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor_service.backends.torch_backend.cuda.attention import attention
from executor_service.backends.torch_backend.cuda.attention.pipelines import AttentionDevice, Pipelines
from executor_service.backends.torch_backend.cuda.kernels import CudaKernels
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from executor_service.backends.torch_backend.cuda.linear.device_adapters import DeviceSlots
from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.files.tensor_shapes import Part, expected_shapes
from executor_service.backends.torch_backend.model.model import Model
from executor_service.backends.torch_backend.model.shard import Shard, Whole
from executor_service.backends.torch_backend.ops.quantized import Format
from tests.gpu.shapes import spec_of
from tests.support.untyped import present

DEVICE = torch.device("cuda:0")
PROCESSORS = 132
_LIKE_90 = AttentionDevice(Pipelines.of(228 << 10), lambda _: 3)
_aten = torch.ops.aten


class CrossingError(AssertionError):
    """The host and the device exchange something."""


class Weights:
    """A checkpoint of shapes."""

    name = "fake"
    quantization = None

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self._shapes = spec, dict(expected_shapes(spec))

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        whole = torch.empty(self._shapes[name], dtype=torch.bfloat16)
        return whole if part is None else whole[part]

    def read_weight(self, name: str, part: Part | None = None) -> torch.Tensor:
        return self.read(name, part)

    def files(self) -> list[Path]:
        return []

    def close(self) -> None:
        pass


class Indexing(TorchFunctionMode):
    """Tensors are indexed by ATen's own functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            view, tensors = _indexed(*args)
            return _aten.index.Tensor(view, tensors) if tensors else view
        if func is torch.Tensor.__setitem__:
            view, tensors = _indexed(*args[:2])
            value = args[2]
            if tensors:
                return _aten.index_put_.default(view, tensors, value)
            if isinstance(value, torch.Tensor):
                return _aten.copy_.default(view, value)
            return _aten.fill_.Scalar(view, value)
        if func is torch.Tensor.copy_:
            return _aten.copy_.default(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _indexed(x: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The view that numbers and slices select, and the tensors that index its dimensions, if any do."""
    parts = index if isinstance(index, tuple) else (index,)
    tensors: list[torch.Tensor | None] = []
    for part in parts:
        if isinstance(part, int):
            x = _aten.select.int(x, len(tensors), part)
        elif isinstance(part, slice):
            x = _aten.slice.Tensor(x, len(tensors), part.start, part.stop, part.step or 1)
            tensors.append(None)
        elif part is None:
            x = _aten.unsqueeze.default(x, len(tensors))
            tensors.append(None)
        elif part is Ellipsis:
            behind = sum(other is not None for other in parts[parts.index(Ellipsis) + 1 :])
            tensors += [None] * (x.dim() - len(tensors) - behind)
        elif not isinstance(part, torch.Tensor):
            raise CrossingError(f"an index of type {type(part).__name__} is sent to the device")
        elif part.dtype == torch.bool:
            raise CrossingError("the host waits for how many places a mask has")
        elif part.device != x.device:
            raise CrossingError(f"an index on {part.device} of a tensor on {x.device}")
        else:
            tensors.append(part)
    return x, tensors if any(t is not None for t in tensors) else []


class Watch(TorchDispatchMode):
    """Counts operations and the bytes that are allocated at once; fails where devices meet."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = Counter[str]()
        self.bytes = self.peak_bytes = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.operations[str(func)] += 1
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        results = func(*args, **(kwargs or {}))
        outputs = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
        if any(x.device != DEVICE and x.dim() for x in [*inputs, *outputs]):
            raise CrossingError(f"{func} has a tensor on the host")
        given = {x.untyped_storage()._cdata for x in inputs}
        for x in outputs:
            storage = x.untyped_storage()
            if storage._cdata not in given and storage not in self._known:
                self._known.add(storage)
                self.bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.bytes)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return results

    def _freed(self, count: int) -> None:
        self.bytes -= count


def _check_launch(launch: Launch) -> None:
    devices = {x.device for x in launch.arguments.values() if isinstance(x, torch.Tensor)}
    if devices != {DEVICE}:
        raise CrossingError(f"{launch.kernel} has tensors on {devices}")
    across, down, deep = launch.grid
    assert 0 <= across < 2**31, launch.grid
    assert 0 <= down <= 65_535, launch.grid
    assert 0 <= deep <= 65_535, launch.grid


@contextmanager
def fake_device() -> Iterator[None]:
    """Inside, CUDA tensors are fake ones, and launches are checked instead of made."""
    with (
        mock.patch.object(Launch, "run", _check_launch),
        mock.patch.object(attention, "attention_device", return_value=_LIKE_90),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        FakeTensorMode(allow_non_fake_inputs=False),
        torch.inference_mode(),
        Indexing(),
    ):
        yield


def fake_runner(
    name: str,
    dtype: torch.dtype,
    form: Format | None,
    cache_dtype: torch.dtype | None = None,
    *,
    layers: int,
    pages: int,
    context_length: int = 40_960,
    slots: int = 8,
    shard: Shard | None = None,
) -> tuple[Model, DeviceRunner]:
    """A model of `tests.gpu.shapes` with fewer layers, and its runner, with slots for adapters.

    `shard`: of a rank; None: of a single process.
    """
    spec, shard = replace(spec_of(name), layers=layers, context_length=context_length), shard or Whole()
    kernels = CudaKernels(DEVICE, dtype, form, cache_dtype)
    model = Model(shard.cut(Weights(spec)), kernels, lambda what, done: None, shard)
    adapters = DeviceSlots(model.spec, present(kernels.low_rank), shard, DEVICE)
    adapters.reserve(slots)
    return model, DeviceRunner(model, model.new_caches(pages, 16), 16, adapters, shard)


def watched(call: Callable[[], object]) -> Watch:
    """What happens in a call. Raises what it raises, and CrossingError."""
    with Watch() as watch:
        call()
    return watch
