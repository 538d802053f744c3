"""What E11 times: products of a layer with a `Tuning`, and all products of a layer in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from executor_service.backends.torch_backend.cuda.linear.tuning import Tuning
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from tests.gpu.shapes import linears, spec_of

Call = Callable[[], torch.Tensor]
BASE = Tuning()
PLAIN = replace(BASE, asked_bytes=0)
"""Without dependent launches nothing is asked for: fewer kernels are compiled."""
_ONE_ROW = [
    PLAIN,
    *(replace(PLAIN, stages=stages) for stages in (11, 15, 5)),
    replace(PLAIN, tile_bytes=512, warps=4, stages=5),
    replace(PLAIN, outputs=32, warps=4),
    replace(PLAIN, outputs=64, warps=4, tile_bytes=128, stages=8),
    replace(PLAIN, programs=528),
    replace(PLAIN, programs=1056),
    replace(PLAIN, programs=528, stages=11),
    replace(PLAIN, programs=528, tile_bytes=512, warps=4, stages=5),
    replace(PLAIN, programs=528, outputs=32, warps=4),
    replace(PLAIN, programs=528, outputs=64, warps=4, tile_bytes=128, stages=8),
    replace(PLAIN, tile_bytes=512, warps=4, stages=7),
    replace(PLAIN, tile_bytes=1024, warps=4, stages=4),
    replace(PLAIN, tile_bytes=128, stages=13),
    *(replace(PLAIN, warps=warps) for warps in (4, 1)),
    replace(PLAIN, outputs=32, warps=4, stages=5),
    replace(PLAIN, outputs=32, warps=4, tile_bytes=512, stages=5),
    replace(PLAIN, outputs=64, warps=4, stages=5),
    replace(PLAIN, outputs=64, warps=4, tile_bytes=128, stages=12),
    replace(PLAIN, programs=1056, outputs=32, warps=4),
]
_CHAINED = [
    BASE,
    *(replace(BASE, asked_bytes=mb << 20) for mb in (0, 1, 16)),
    replace(BASE, stages=11),
    replace(BASE, outputs=32, warps=4),
    replace(BASE, tile_bytes=512, warps=4, stages=5),
]


def _of_rows(rows: int) -> list[Tuning]:
    """For products of so many rows, which take more instructions."""
    small: list[dict[str, int]] = [{}, {"outputs": 32, "warps": 4, "stages": 6}]
    large: list[dict[str, int]] = [
        {"outputs": 64, "warps": 4, "tile_bytes": 128, "stages": 8},
        {"outputs": 128, "warps": 4, "tile_bytes": 128, "stages": 5},
        {"outputs": 64, "warps": 4, "stages": 5},
        {"outputs": 128, "warps": 8, "tile_bytes": 128, "stages": 7},
    ]
    tilings = [*(small if rows <= 16 else ()), *(large if rows > 8 else large[:1])]
    base = replace(PLAIN, lines=max(rows, 8))
    return [replace(base, programs=programs, **tiling) for programs in (256, 528) for tiling in tilings]


@dataclass(frozen=True)
class Part:
    """One product, of a layer by name."""

    layer: str
    n: int
    k: int

    @property
    def adds(self) -> bool:
        """Whether it adds to the residual."""
        return self.layer in ("output", "down")

    @property
    def outputs(self) -> int:
        """Columns of its result: a gated one has half as many."""
        return self.n // 2 if self.layer == "gate_up" else self.n

    def out(self, rows: int, device: torch.device) -> torch.Tensor:
        """For its result."""
        dtype = torch.float32 if self.layer == "head" else torch.bfloat16
        return torch.zeros(rows, self.outputs, dtype=dtype, device=device)

    def launch(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, how: Tuning) -> Any:
        """Its launch, and where the merge of parts counts."""
        from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import (
            few_rows_launch,
            new_arrivals,
        )

        activation = Activation.SILU if self.layer == "gate_up" else None
        arrivals = new_arrivals(x.device)
        return few_rows_launch(x, weight, None, out, arrivals, add=self.adds, activation=activation, how=how)

    def plain(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Call:
        """As products of more rows are computed: by cuBLAS."""
        if self.adds:
            return lambda: out.addmm_(x, weight.T)
        if self.layer == "gate_up":
            if x.device.type != "cuda":
                return lambda: Activation.SILU.join(functional.linear(x, weight))
            from executor_service.backends.torch_backend.cuda.linear.pointwise import gated

            return lambda: gated(functional.linear(x, weight), Activation.SILU)
        if self.layer == "head" and x.device.type == "cuda":
            return lambda: torch.mm(x, weight.T, out_dtype=torch.float32)
        return lambda: functional.linear(x, weight)


@dataclass(frozen=True)
class Products:
    """Products that are timed together, one after the other."""

    shape: str
    name: str
    rows: int
    parts: tuple[Part, ...]
    how: Tuning | None  # None: cuBLAS
    dependent: bool = False

    @property
    def bytes(self) -> int:
        """Of weights."""
        return sum(2 * part.n * part.k for part in self.parts)

    def plain(self) -> dict[str, Any]:
        """As JSON has it; of a tuning what differs from the shipped one."""
        how = "cuBLAS" if self.how is None else {
            key: value for key, value in asdict(self.how).items() if value != getattr(BASE, key)
        }  # fmt: skip
        return {
            "shape": self.shape, "layer": self.name, "rows": self.rows, "dependent": self.dependent,
            "how": how,
        }  # fmt: skip


def products(*, dry: bool) -> Iterator[Products]:
    """All that are timed, each once, what matters most first."""
    layers = {
        shape: [Part(name, n, k) for name, (n, k) in linears(spec_of(shape, dry=dry)).items()]
        for shape in ("Qwen3-8B", "Qwen3-0.6B", "Qwen3-4B")
    }
    every = [(shape, part) for shape, parts in layers.items() for part in parts]
    if dry:
        every, layers = every[:5], {"Qwen3-8B": layers["Qwen3-8B"]}
    yield from _distinct([(1, shape, part, BASE) for shape, part in every])
    yield from (chain for shape in layers for chain in _chains(shape, layers[shape]))
    wider = [(shape, part) for shape, part in every if shape != "Qwen3-4B"]
    for rows in (8, 32, 64, 16) if not dry else (8,):
        yield from (Products(shape, part.layer, rows, (part,), None) for shape, part in wider)
        yield from _distinct([(rows, shape, part, how) for how in _of_rows(rows) for shape, part in wider])
    tunings = _ONE_ROW[:2] if dry else _ONE_ROW
    yield from _distinct([(1, shape, part, how) for how in tunings for shape, part in every])


def _distinct(wanted: list[tuple[int, str, Part, Tuning]]) -> Iterator[Products]:
    """Without those whose layer is cut as another one's is."""
    seen = set()
    for rows, shape, part, how in wanted:
        width = how.outputs // (part.n // part.outputs)
        cut = how.parts(-(-part.outputs // width), -(-2 * part.k // how.tile_bytes))
        key = (rows, shape, part, replace(how, programs=0), cut)
        if key not in seen:
            seen.add(key)
            yield Products(shape, part.layer, rows, (part,), how)


def _chains(shape: str, parts: list[Part]) -> Iterator[Products]:
    """A layer's products with a small one in place of each other kernel."""
    of = {part.layer: part for part in parts}
    small = Part("small", 16, of["qkv"].k)
    layer = (small, of["qkv"], small, small, of["output"], small, of["gate_up"], of["down"])
    yield Products(shape, "all", 1, layer, BASE)
    for how in _CHAINED:
        yield Products(shape, "all", 1, layer, how, dependent=True)
