"""Linear layers in fp32 on CPU: weights packed once into panels, walked by `tile`'s micro-kernel.

Measured on 2 Zen 3 cores with the default model's shapes against what torch offers (F.linear, transposed
weights, oneDNN prepacked): ahead of all of them from 1 to 256 rows, and the only one whose rows are bitwise
the same for every number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray

from executor_service.backends.torch_backend.tile import (
    LANES,
    PANEL_ROW_BYTES,
    add_few,
    add_tile,
    put_few,
    put_tile,
    tile_rows,
)
from executor_service.backends.torch_backend.vector_math import FLAGS, silu32
from executor_service.backends.torch_backend.workshare import chunk_of, claim

Array = NDArray[np.float32]

_BLOCK_ROWS = 96  # of X, that stay in the second-level cache while a chunk of W passes by


@njit(nogil=True, parallel=True, cache=True)
def _multiply(x: Array, w: Array, out: Array, add: bool, threads: int) -> None:
    """out (+)= X W^T; x [rows, k], w packed [panels, k, 16], out [rows, n]; all contiguous."""
    rows, k, n = x.shape[0], x.shape[1], out.shape[1]
    x_at, w_at, out_at = x.ctypes.data, w.ctypes.data, out.ctypes.data
    x_stride, out_stride, panel_bytes = 4 * k, 4 * n, k * PANEL_ROW_BYTES
    panels = n // LANES
    chunk = chunk_of(panels, threads, 4)
    counter = np.zeros(1, np.int64)
    for _ in prange(threads):
        low = claim(counter.ctypes.data) * chunk
        while low < panels:
            count = min(chunk, panels - low)
            at, to = w_at + low * panel_bytes, out_at + low * PANEL_ROW_BYTES
            if rows <= 3 and add:
                add_few(x_at, x_stride, at, count, k, to, out_stride, rows)
            elif rows <= 3:
                put_few(x_at, x_stride, at, count, k, to, out_stride, rows)
            else:
                _multiply_chunk(x_at, rows, at, count, k, to, out_stride, add)
            low = claim(counter.ctypes.data) * chunk
    if n % LANES:
        _multiply_ragged(x, w, out, add)


@njit(nogil=True, cache=True)
def _multiply_chunk(
    x: int, rows: int, w: int, panels: int, k: int, out: int, out_stride: int, add: bool
) -> None:
    """out (+)= X W for many rows and some panels, a block of rows after the other."""
    x_stride, panel_bytes = 4 * k, k * PANEL_ROW_BYTES
    for block in range(0, rows, _BLOCK_ROWS):
        last = min(block + _BLOCK_ROWS, rows)
        for p in range(panels):
            r = block
            while r < last:
                take = tile_rows(last - r)
                from_x, to = x + r * x_stride, out + r * out_stride + p * PANEL_ROW_BYTES
                if add:
                    add_tile(from_x, x_stride, w + p * panel_bytes, k, to, out_stride, take)
                else:
                    put_tile(from_x, x_stride, w + p * panel_bytes, k, to, out_stride, take)
                r += take


@njit(nogil=True, cache=True)
def _multiply_ragged(x: Array, w: Array, out: Array, add: bool) -> None:
    """The last panel, of which only some columns are real, through a buffer."""
    rows, k, n = x.shape[0], x.shape[1], out.shape[1]
    buffer = np.empty((rows, LANES), np.float32)
    first = n - n % LANES
    r = 0
    while r < rows:
        take = tile_rows(rows - r)
        x_at, to = x.ctypes.data + 4 * r * k, buffer.ctypes.data + r * PANEL_ROW_BYTES
        put_tile(x_at, 4 * k, w.ctypes.data + n // LANES * k * PANEL_ROW_BYTES, k, to, PANEL_ROW_BYTES, take)
        r += take
    for r in range(rows):
        for j in range(n - first):
            out[r, first + j] = (out[r, first + j] if add else np.float32(0.0)) + buffer[r, j]


@njit(nogil=True, parallel=True, cache=True, fastmath=FLAGS)
def _multiply_gated(x: Array, w: Array, out: Array, threads: int) -> None:
    """out = silu(X G^T) * (X U^T); w packed with the panels of G and U taking turns."""
    rows, k, n = x.shape[0], x.shape[1], out.shape[1]
    x_at, w_at, x_stride, panel_bytes = x.ctypes.data, w.ctypes.data, 4 * k, k * PANEL_ROW_BYTES
    pairs = (n + LANES - 1) // LANES
    chunk = chunk_of(pairs, threads, 2)
    counter = np.zeros(1, np.int64)
    for _ in prange(threads):
        buffer = np.empty((6, 4 * LANES), np.float32)
        low = claim(counter.ctypes.data) * chunk
        while low < pairs:
            high = min(low + chunk, pairs)
            for block in range(0, rows, _BLOCK_ROWS):
                last = min(block + _BLOCK_ROWS, rows)
                p = low
                while p < high:
                    group = 2 if rows <= 3 and p + 2 <= high else 1  # pairs at once
                    r = block
                    while r < last:
                        take = tile_rows(last - r)
                        from_w = w_at + 2 * p * panel_bytes
                        _gated_tile(x_at + r * x_stride, from_w, k, take, group, buffer, out, r, p * LANES)
                        r += take
                    p += group
            low = claim(counter.ctypes.data) * chunk


@njit(nogil=True, cache=True, fastmath=FLAGS)
def _gated_tile(
    x: int, w: int, k: int, rows: int, group: int, buffer: Array, out: Array, first: int, column: int
) -> None:
    """1 to 6 rows by one or two pairs of panels, through a buffer of [6, 4 * 16], to out[first:, column:]."""
    to, to_stride, panel_bytes = buffer.ctypes.data, 4 * buffer.shape[1], k * PANEL_ROW_BYTES
    if rows <= 3:
        put_few(x, 4 * k, w, 2 * group, k, to, to_stride, rows)
    else:
        put_tile(x, 4 * k, w, k, to, to_stride, rows)
        put_tile(x, 4 * k, w + panel_bytes, k, to + PANEL_ROW_BYTES, to_stride, rows)
    for i in range(rows):
        for g in range(group):
            start = column + g * LANES
            for j in range(min(LANES, out.shape[1] - start)):
                gate, up = buffer[i, 2 * g * LANES + j], buffer[i, (2 * g + 1) * LANES + j]
                out[first + i, start + j] = silu32(gate) * up


class PackedLinear:
    """x W^T + b, with W [n, k] given as parts that follow each other in n."""

    def __init__(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None, threads: int) -> None:
        weight = torch.cat([part.float() for part in parts])
        self.features, self._threads = weight.shape[0], threads
        self._panels = _pack(weight)
        self._panels_np: Array = self._panels.numpy()
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, k] to [rows, n]; with `add_to` [rows, n] the result is added to it, in place."""
        if self._bias is not None:
            if add_to is None:
                add_to = self._bias.repeat(x.shape[0], 1)
            else:
                add_to += self._bias
        out = torch.empty(x.shape[0], self.features) if add_to is None else add_to
        _multiply(x.numpy(), self._panels_np, out.numpy(), add_to is not None, self._threads)
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W, [ids, k]: an embedding that shares the output layer's weights."""
        return self._panels[ids // LANES, :, ids % LANES]

    def bytes(self) -> int:
        """Memory of the weights."""
        return self._panels.nbytes


class PackedGated:
    """silu(x G^T) * (x U^T): the first half of a SwiGLU MLP (Shazeer 2020)."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, threads: int) -> None:
        self._features, self._threads = gate.shape[0], threads
        self._panels = torch.stack([_pack(gate.float()), _pack(up.float())], 1).flatten(0, 1)
        self._panels_np: Array = self._panels.numpy()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, k] to [rows, n]."""
        out = torch.empty(x.shape[0], self._features)
        _multiply_gated(x.numpy(), self._panels_np, out.numpy(), self._threads)
        return out

    def bytes(self) -> int:
        """Memory of the weights."""
        return self._panels.nbytes


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] to panels [ceil(n / 16), k, 16], filled up with zeros."""
    n, k = weight.shape
    padded: Any = torch.nn.functional.pad(weight, (0, 0, 0, -n % LANES))
    packed: torch.Tensor = padded.reshape(-1, LANES, k).transpose(1, 2).contiguous()
    return packed
