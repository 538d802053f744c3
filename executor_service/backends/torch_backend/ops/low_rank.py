"""Low-rank changes of linear layers (LoRA, arXiv:2106.09685): their places in a model, and in plain torch.

An adapter names seven linear layers of a block; the model has them stacked in four (`STACKS`). The factors of
the parts of a stack are apart: A of each reads the same inputs, and B of each writes outputs of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional

from executor_service.adapters.weights import LinearKey
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.contract.model_error import ModelError

STACKS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gated": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The linear layers of a block, by the field of `LayerChanges`, and the parts that each consists of."""

PART_NAMES = [name for names in STACKS.values() for name in names]
"""The order of a block's parts, in which kernels have an adapter's factors."""


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A part of a stack: W [outputs, inputs], whose outputs begin at `first` of the stack's."""

    layer: int
    name: str
    inputs: int
    outputs: int
    first: int


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What the size of a packed adapter follows from."""

    layers: int  # of the model
    rank: int
    parts: Sequence[LinearPart]  # which it changes


@dataclass(frozen=True, slots=True)
class PartFactors:
    """An adapter's factors of a part, fp32: a [rank, inputs], b [outputs, rank]."""

    part: LinearPart
    a: torch.Tensor
    b: torch.Tensor


def parts_of(spec: ModelSpec) -> dict[LinearKey, LinearPart]:
    """What adapters can change in a model: all linear layers but experts, routers and the output layer."""
    hidden, inner, q = spec.hidden_size, spec.intermediate_size, spec.heads * spec.head_dim
    kv = spec.kv_heads * spec.head_dim
    shapes = {
        "q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden),
        "gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden),
    }  # fmt: skip
    parts: dict[LinearKey, LinearPart] = {}
    for layer in range(spec.layers):
        sparse = spec.moe is not None and layer in spec.moe.sparse_layers
        for stack in ("qkv", "output") if sparse else STACKS:
            first = 0
            for name in STACKS[stack]:
                inputs, outputs = shapes[name]
                parts[layer, name] = LinearPart(layer, name, inputs, outputs, first)
                first += outputs
    return parts


class LayerChanges(NamedTuple):
    """What adapters change in each linear layer of a block, as the kernels take it; None: nothing."""

    qkv: Any = None
    output: Any = None
    gated: Any = None
    down: Any = None


NO_CHANGES = LayerChanges()


class LinearChange(Protocol):
    """What adapters change in one linear layer, for kernels that add it to the layer's results."""

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add it to the layer's results for x [tokens, inputs]: out [tokens, outputs], in place."""


class StepChanges(Protocol):
    """What adapters change in a step."""

    def of_layer(self, layer: int) -> LayerChanges:
        """What they change in one block."""


class AdaptedRows(NamedTuple):
    """Consecutive tokens of a batch that have the same adapter."""

    adapter: Any  # as `LowRankKernels.pack` returned it
    first: int
    tokens: int


class LowRankKernels(Protocol):
    """Adapters for the linear layers of one `Kernels`."""

    def bytes(self, shape: AdapterShape) -> int:
        """Bytes of memory that a packed adapter takes."""

    def pack(self, shape: AdapterShape, scale: float, factors: Iterable[PartFactors]) -> Any:
        """An adapter for `step`, from the factors of its parts. Any thread may call. Raises ModelError."""

    def step(self, rows: Sequence[AdaptedRows], tokens: int) -> StepChanges:
        """What adapters change in a batch of `tokens` tokens; `rows` are in the order of the tokens."""


class PlainLowRank:
    """`LowRankKernels` in plain torch, for any dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def bytes(self, shape: AdapterShape) -> int:
        numbers = sum(part.inputs + part.outputs for part in shape.parts)
        return shape.rank * numbers * self._dtype.itemsize

    def pack(self, shape: AdapterShape, scale: float, factors: Iterable[PartFactors]) -> PlainAdapter:
        """As `LowRankKernels.pack`. Raises ModelError where the dtype is too narrow for a factor."""
        packed = {}
        for one in factors:
            a, b = (factor.to(device=self._device, dtype=self._dtype) for factor in (one.a, one.b))
            if not (a.isfinite().all() and b.isfinite().all()):
                where = f"{one.part.name} in layer {one.part.layer}"
                raise ModelError(f"{where} has values that are too large for {self._dtype}")
            packed[one.part.layer, one.part.name] = PartFactors(one.part, a, b)
        return PlainAdapter(scale, packed)

    def step(self, rows: Sequence[AdaptedRows], tokens: int) -> StepChanges:
        return PlainStepChanges(rows)


@dataclass(frozen=True, slots=True)
class PlainAdapter:
    """A packed adapter of `PlainLowRank`."""

    scale: float
    factors: Mapping[LinearKey, PartFactors]


@dataclass(frozen=True, slots=True)
class PlainStepChanges:
    """`StepChanges` of `PlainLowRank`."""

    rows: Sequence[AdaptedRows]

    def of_layer(self, layer: int) -> LayerChanges:
        return LayerChanges(*(PlainChange(self.rows, layer, names) for names in STACKS.values()))


@dataclass(frozen=True, slots=True)
class PlainChange:
    """What adapters change in one linear layer."""

    rows: Sequence[AdaptedRows]
    layer: int
    names: tuple[str, ...]

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add it to the layer's results for x [tokens, inputs]: out [tokens, outputs]."""
        for adapter, first, tokens in self.rows:
            mine = slice(first, first + tokens)
            for name in self.names:
                factors = adapter.factors.get((self.layer, name))
                if factors is not None:
                    part = factors.part
                    shrunk = functional.linear(x[mine], factors.a) * adapter.scale
                    out[mine, part.first : part.first + part.outputs] += functional.linear(shrunk, factors.b)
