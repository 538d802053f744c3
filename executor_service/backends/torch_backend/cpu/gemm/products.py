"""Matrix products on CPU, over weights packed once into panels, with the micro-kernel of `tile.py`.

In fp32 on 2 Zen 3 cores, with the default model's shapes, they are faster from 1 to 256 rows than torch's
ways (F.linear, transposed weights, oneDNN prepacked), and the only ones whose rows are bitwise the same for
every number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.gemm import (
    tile_bf16,
    tile_fp16,
    tile_fp32,
    tile_int8,
    tile_scaled,
)
from executor_service.backends.torch_backend.cpu.gemm.low_rank import (
    Expand,
    ExpandPairs,
    Groups,
    LowRank,
    expand_fp16,
    expand_fp32,
    expand_pairs_fp16,
    expand_pairs_fp32,
)
from executor_service.backends.torch_backend.cpu.gemm.tile import RESULT_BYTES, Product
from executor_service.backends.torch_backend.cpu.primitives.kernel import Kernel
from executor_service.backends.torch_backend.cpu.primitives.memory import matrix
from executor_service.backends.torch_backend.cpu.primitives.records import Address, reader
from executor_service.backends.torch_backend.cpu.primitives.registers import (
    LANES,
    MAX_ROWS,
    tile_panels,
    tile_rows,
)
from executor_service.backends.torch_backend.cpu.primitives.vector_math import (
    FLAGS,
    clamped32,
    gelu32,
    silu32,
)
from executor_service.backends.torch_backend.files.architecture.activation import Activation

Array = NDArray[np.float32]
ComputeChunk = Callable[[int, int], None]

_GELU, _CLAMPED = int(Activation.GELU), int(Activation.CLAMPED)
_PAIRS = 2  # maximum of pairs of panels per tile
_BLOCK_ROWS = 96  # rows of X that fit into the second-level cache beside a chunk of W


class Multiply(NamedTuple):
    """out = X W^T, or out += X W^T with `add`; plus what the rows' adapters change."""

    rows: int
    x: Address  # X, in the layout of the arithmetic's tiles
    x_stride: int  # bytes from row to row
    w: Address  # W [n, k], packed into panels
    w_stride: int  # bytes from panel to panel
    steps: int  # along K, as the arithmetic's tiles count them
    out: Address  # fp32 [rows, n]
    n: int
    panels_per_chunk: int
    add: bool
    groups: Groups
    low_rank: LowRank


class MultiplyFp32(Multiply):
    """In fp32, adapters too."""


class MultiplyBf16(Multiply):
    """In fp32, adapters too, over weights in bf16."""


class MultiplyFp16(Multiply):
    """In fp32, adapters too, over weights in fp16."""


class MultiplyScaledInt8(Multiply):
    """In fp32, adapters too, over weights in int8 with scales."""


class MultiplyScaledFp8(Multiply):
    """In fp32, adapters too, over weights in fp8 (e4m3) with scales."""


class MultiplyInt8(Multiply):
    """Of rows that `QuantizeRows` wrote and weights in int8; adapters are in fp16."""


class MultiplyGated(NamedTuple):
    """out = activation(X G^T) * (X U^T); adapters change what activation and product get."""

    rows: int
    x: Address  # this and the other fields as in `Multiply`
    x_stride: int
    w: Address  # the panels of G [n, k] and U [n, k], alternating
    w_stride: int
    steps: int
    out: Address
    n: int
    pairs_per_chunk: int  # of panels
    activation: int  # an `Activation`
    groups: Groups
    low_rank: LowRank


class MultiplyGatedFp32(MultiplyGated):
    """In fp32, adapters too."""


class MultiplyGatedBf16(MultiplyGated):
    """In fp32, adapters too, over weights in bf16."""


class MultiplyGatedFp16(MultiplyGated):
    """In fp32, adapters too, over weights in fp16."""


class MultiplyGatedScaledInt8(MultiplyGated):
    """In fp32, adapters too, over weights in int8 with scales."""


class MultiplyGatedScaledFp8(MultiplyGated):
    """In fp32, adapters too, over weights in fp8 (e4m3) with scales."""


class MultiplyGatedInt8(MultiplyGated):
    """Of rows that `QuantizeRows` wrote and weights in int8; adapters are in fp16."""


_read_multiply, _read_gated = reader(Multiply), reader(MultiplyGated)


@njit(nogil=True)
def _count_chunks_of_panels(n: int, panels_per_chunk: int) -> int:
    panels = (n + LANES - 1) // LANES
    return (panels + panels_per_chunk - 1) // panels_per_chunk


@njit(nogil=True)
def _count_multiply_chunks(record: int) -> int:
    call = _read_multiply(record)
    return _count_chunks_of_panels(call.n, call.panels_per_chunk)


@njit(nogil=True)
def _count_gated_chunks(record: int) -> int:
    call = _read_gated(record)
    return _count_chunks_of_panels(call.n, call.pairs_per_chunk)


def _make_multiply(put_tile: Product, add_tile: Product, expand: Expand) -> ComputeChunk:
    """The kernel of a chunk of a `Multiply`."""

    @njit(nogil=True)
    def panels_of(
        x: int,
        x_stride: int,
        rows: int,
        w: int,
        w_stride: int,
        panels: int,
        k: int,
        out: int,
        n: int,
        add: bool,
    ) -> None:
        """Multiply with whole panels, one block of rows after the other."""
        for block in range(0, rows, _BLOCK_ROWS):
            last = min(block + _BLOCK_ROWS, rows)
            together = tile_panels(last - block)
            for p in range(0, panels, together):
                count, from_w, r = min(together, panels - p), w + p * w_stride, block
                while r < last:
                    take = tile_rows(last - r)
                    from_x, to = x + r * x_stride, out + 4 * r * n + p * RESULT_BYTES
                    if add:
                        add_tile(from_x, x_stride, from_w, w_stride, count, k, to, 4 * n, take)
                    else:
                        put_tile(from_x, x_stride, from_w, w_stride, count, k, to, 4 * n, take)
                    r += take

    @njit(nogil=True)
    def ragged(
        x: int, x_stride: int, rows: int, panel: int, k: int, out: Array, first: int, add: bool
    ) -> None:
        """Multiply with the last panel, of which n needs only some columns, through a buffer."""
        buffer = np.empty((rows, LANES), np.float32)
        r = 0
        while r < rows:
            take = tile_rows(rows - r)
            to = buffer.ctypes.data + r * RESULT_BYTES
            put_tile(x + r * x_stride, x_stride, panel, 0, 1, k, to, RESULT_BYTES, take)
            r += take
        for r in range(rows):
            for j in range(out.shape[1] - first):
                out[r, first + j] = (out[r, first + j] if add else np.float32(0.0)) + buffer[r, j]

    @njit(nogil=True)
    def multiply_chunk(record: int, chunk: int) -> None:
        call = _read_multiply(record)
        rows, x, x_stride, k = call.rows, call.x, call.x_stride, call.steps
        w, w_stride = call.w, call.w_stride
        n, panels, low = call.n, call.n // LANES, chunk * call.panels_per_chunk
        count = min(call.panels_per_chunk, panels - low)
        if count > 0:
            to = call.out + low * RESULT_BYTES
            panels_of(x, x_stride, rows, w + low * w_stride, w_stride, count, k, to, n, call.add)
        if n % LANES and low + call.panels_per_chunk >= panels + 1:  # the last chunk has the last panel
            out, last = matrix(call.out, rows, n), w + panels * w_stride
            ragged(x, x_stride, rows, last, k, out, panels * LANES, call.add)
        if call.groups.size:
            high = min(low + call.panels_per_chunk, (n + LANES - 1) // LANES)
            expand(call.groups, call.low_rank, call.out, n, low, high)

    return cast(ComputeChunk, multiply_chunk)


def _make_gated(put_tile: Product, expand_pairs: ExpandPairs) -> ComputeChunk:
    """The kernel of a chunk of a `MultiplyGated`."""

    @njit(nogil=True, fastmath=FLAGS)
    def gated_chunk(record: int, chunk: int) -> None:
        call = _read_gated(record)
        rows, x, x_stride, k = call.rows, call.x, call.x_stride, call.steps
        w, w_stride = call.w, call.w_stride
        n, size, out = call.n, call.pairs_per_chunk, matrix(call.out, rows, call.n)
        buffer = np.empty((MAX_ROWS, _PAIRS * 2 * LANES), np.float32)
        low, high = chunk * size, min((chunk + 1) * size, (n + LANES - 1) // LANES)
        for block in range(0, rows, _BLOCK_ROWS):
            last = min(block + _BLOCK_ROWS, rows)
            p = low
            while p < high:
                pairs = min(max(tile_panels(last - block) // 2, 1), high - p)
                r = block
                while r < last:
                    take = tile_rows(last - r)
                    from_x, from_w, to = x + r * x_stride, w + 2 * p * w_stride, buffer.ctypes.data
                    put_tile(from_x, x_stride, from_w, w_stride, 2 * pairs, k, to, 4 * buffer.shape[1], take)
                    if call.groups.size:
                        to_stride = 4 * buffer.shape[1]
                        expand_pairs(call.groups, call.low_rank, r, take, p, pairs, to, to_stride)
                    _put_gated(buffer, take, pairs, out, r, p * LANES, call.activation)
                    r += take
                p += pairs

    return cast(ComputeChunk, gated_chunk)


@njit(nogil=True, fastmath=FLAGS)
def _put_gated(
    buffer: Array, rows: int, pairs: int, out: Array, first: int, column: int, activation: int
) -> None:
    """out[first:, column:] = activation(gate) * up; in the buffer, 16 gates alternate with 16 ups."""
    for i in range(rows):
        for g in range(pairs):
            # As slices, since an index that might be negative keeps a loop from being vectorized.
            result = out[first + i, column + g * LANES : column + (g + 1) * LANES]
            gates = buffer[i, 2 * g * LANES : (2 * g + 1) * LANES]
            ups = buffer[i, (2 * g + 1) * LANES : (2 * g + 2) * LANES]
            if activation == _GELU:
                for j in range(len(result)):
                    result[j] = gelu32(gates[j]) * ups[j]
            elif activation == _CLAMPED:
                for j in range(len(result)):
                    result[j] = clamped32(gates[j], ups[j])
            else:
                for j in range(len(result)):
                    result[j] = silu32(gates[j]) * ups[j]


def multiply_kernel(kind: type[Multiply], tiles: Any, expand: Expand) -> Kernel:
    """The kernel of a `Multiply` with these tiles, which have `put_tile` and `add_tile`."""
    compute = _make_multiply(tiles.put_tile, tiles.add_tile, expand)
    return Kernel(kind, _count_multiply_chunks, compute)


def gated_kernel(kind: type[MultiplyGated], tiles: Any, expand_pairs: ExpandPairs) -> Kernel:
    """The kernel of a `MultiplyGated`, as `multiply_kernel`."""
    return Kernel(kind, _count_gated_chunks, _make_gated(tiles.put_tile, expand_pairs))


PRODUCTS = (
    multiply_kernel(MultiplyFp32, tile_fp32, expand_fp32),
    multiply_kernel(MultiplyBf16, tile_bf16, expand_fp32),
    multiply_kernel(MultiplyFp16, tile_fp16, expand_fp32),
    multiply_kernel(MultiplyScaledInt8, tile_scaled.INT8, expand_fp32),
    multiply_kernel(MultiplyScaledFp8, tile_scaled.FP8, expand_fp32),
    multiply_kernel(MultiplyInt8, tile_int8, expand_fp16),
    gated_kernel(MultiplyGatedFp32, tile_fp32, expand_pairs_fp32),
    gated_kernel(MultiplyGatedBf16, tile_bf16, expand_pairs_fp32),
    gated_kernel(MultiplyGatedFp16, tile_fp16, expand_pairs_fp32),
    gated_kernel(MultiplyGatedScaledInt8, tile_scaled.INT8, expand_pairs_fp32),
    gated_kernel(MultiplyGatedScaledFp8, tile_scaled.FP8, expand_pairs_fp32),
    gated_kernel(MultiplyGatedInt8, tile_int8, expand_pairs_fp16),
)
