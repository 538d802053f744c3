"""This processor's vector registers, from which the size of tiles follows, and its conversions."""

from __future__ import annotations

from platform import machine

from numba import config, njit
from numba.core.codegen import get_host_cpu_features

_GIVEN: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
_ALL: str = get_host_cpu_features() if _GIVEN is None else _GIVEN  # type: ignore[no-untyped-call]
FEATURES = frozenset(_ALL.split(","))
"""What numba compiles for ("+avx2"): NUMBA_CPU_FEATURES, none if NUMBA_CPU_NAME is set, else all features."""

_WIDE = {"+avx512f", "+avx512bw", "+avx512vl"} <= FEATURES
CONVERTS_FP16 = "+f16c" in FEATURES or machine() in ("aarch64", "arm64")

LANES = 16  # columns of a panel
VECTOR = 16 if _WIDE else 8  # numbers of 32 bits in a vector
_SUMS = 24 if _WIDE else 12  # vector registers for sums, of 32 or 16; the others hold operands

MAX_ROWS = _SUMS // 2  # of a tile
ROWS_BY_FOUR, ROWS_BY_TWO = (_SUMS * VECTOR // (panels * LANES) for panels in (4, 2))
"""Up to how many rows a tile takes four panels at once, and two."""


@njit(nogil=True)
def tile_rows(left: int) -> int:
    """Rows of the next tile when `left` are left: as few tiles as possible, of equal size."""
    tiles = (left + MAX_ROWS - 1) // MAX_ROWS
    return (left + tiles - 1) // tiles


@njit(nogil=True)
def tile_panels(rows: int) -> int:
    """Panels of a tile of this number of rows: with few rows, more sums are needed to hide latency."""
    if rows <= ROWS_BY_FOUR:
        return 4
    return 2 if min(rows, MAX_ROWS) <= ROWS_BY_TWO else 1
