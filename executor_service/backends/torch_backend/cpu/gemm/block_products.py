"""Matrix products over weights in blocks: the kernels of each layout, and the kinds of call they compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from executor_service.backends.torch_backend.cpu.gemm.block_layout import Layout
from executor_service.backends.torch_backend.cpu.gemm.low_rank import expand_fp32, expand_pairs_fp32
from executor_service.backends.torch_backend.cpu.gemm.products import (
    Multiply,
    MultiplyGated,
    gated_kernel,
    multiply_kernel,
)
from executor_service.backends.torch_backend.cpu.gemm.tile_blocks import Tiles
from executor_service.backends.torch_backend.cpu.primitives.kernel import Kernel

NIBBLES = Layout(nibbles=True, minima=False, wide=False, group=32)
NIBBLES_MINIMA = Layout(nibbles=True, minima=True, wide=False, group=32)
BYTES = Layout(nibbles=False, minima=False, wide=False, group=32)
BYTES_MINIMA = Layout(nibbles=False, minima=True, wide=False, group=32)
WIDE_NIBBLES_MINIMA = Layout(nibbles=True, minima=True, wide=True, group=32)
WIDE_BYTES_MINIMA = Layout(nibbles=False, minima=True, wide=True, group=32)
WIDE_BYTES_16 = Layout(nibbles=False, minima=False, wide=True, group=16)
ANY = Layout(nibbles=False, minima=True, wide=True, group=16)
"""Whatever all others hold."""

LAYOUTS = (
    NIBBLES, NIBBLES_MINIMA, BYTES, BYTES_MINIMA, WIDE_NIBBLES_MINIMA, WIDE_BYTES_MINIMA, WIDE_BYTES_16, ANY,
)  # fmt: skip


class BlockKinds(NamedTuple):
    """The declarations of one layout's calls: of rows that `QuantizeBlocks` wrote; adapters are in fp32."""

    multiply: type[Multiply]
    gated: type[MultiplyGated]


def _kinds(layout: Layout) -> BlockKinds:
    name = "".join(part.capitalize() for part in layout.name.split("_"))
    return BlockKinds(
        type(f"Multiply{name}", (Multiply,), {}), type(f"MultiplyGated{name}", (MultiplyGated,), {})
    )


KINDS: Mapping[Layout, BlockKinds] = {layout: _kinds(layout) for layout in LAYOUTS}


def _kernels(layout: Layout, kinds: BlockKinds) -> tuple[Kernel, Kernel]:
    tiles = Tiles(layout)
    return (
        multiply_kernel(kinds.multiply, tiles, expand_fp32),
        gated_kernel(kinds.gated, tiles, expand_pairs_fp32),
    )


BLOCK_PRODUCTS = tuple(kernel for layout, kinds in KINDS.items() for kernel in _kernels(layout, kinds))
