"""How attention's programs are compiled for a device, and how many of them a multiprocessor runs at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from executor_service.backends.torch_backend.cuda.launch.launch import Launch

MIN_SIDE = 16
"""Lines, columns, and keys of a tile, that a matrix instruction has at least."""
_MAX_TILE = 64  # keys
_FEW_COLUMNS = 128
_INTERPRETED = 3  # programs at once, where nothing is compiled
_RESERVED_BYTES = 1024  # of shared memory, the system's share of each program
_REGISTERS = 65_536  # of every multiprocessor from compute capability 5.0 on
_WARP, _REGISTER_STEP = 32, 8  # threads; registers of a thread come in such steps


@dataclass(frozen=True, slots=True)
class TilePipeline:
    """How the items of one class of rows are computed.

    `stages` are Triton's. K and V can only be loaded when the lookup of their pages is done, which takes some
    of the stages: 9 leave four buffers of K and V, 7 three, 5 two, and 3 only one, so that nothing is loaded
    ahead. `ahead_stages` and `ahead_bytes` are those where a tile's pages are looked up while the one before
    it is computed: 4 are three buffers, 3 are two. That takes fewer registers, but for windows, pages of 8
    bits and other heads, where it takes more. Tests compile the kernels and count the buffers.
    """

    tile_bytes: int  # of K, and as much of V, in q's dtype
    warps: int
    stages: int
    merge_stages: int = 1
    merge_columns: int = 32  # of a head, merged at once
    registers: int = 0  # see `Launch`; for q and pages of 16 bits, heads that are not wide, no `ahead`
    ahead_stages: int = 0  # 0: pages are never looked up ahead
    ahead_bytes: int = 8192  # as tile_bytes
    ahead: bool = False

    def of_heads(self, columns: int, number_bytes: int, *, plain: bool, converted: bool) -> TilePipeline:
        """For heads of this width, whose q has numbers of this size: with tiles of at least MIN_SIDE keys.

        What is larger takes more registers and shared memory: it has fewer buffers, and more warps. `plain`:
        without a window, over pages in q's dtype; `converted`: over pages of 8 bits.
        """
        if plain and columns == _FEW_COLUMNS and number_bytes == 2 and self.ahead_stages:
            return replace(
                self, tile_bytes=self.ahead_bytes, stages=self.ahead_stages, ahead=True, registers=0
            )
        bounded = number_bytes == 2 and columns <= _FEW_COLUMNS and not converted
        how = self if bounded else replace(self, registers=0)
        if columns > _FEW_COLUMNS:
            how = replace(how, merge_stages=1)
        if self.tile_bytes < MIN_SIDE * columns * number_bytes:
            how = replace(how, tile_bytes=MIN_SIDE * columns * number_bytes, warps=8, stages=how.stages - 2)
        return how

    def tile(self, columns: int, number_bytes: int) -> int:
        """Keys of a tile."""
        return min(_MAX_TILE, self.tile_bytes // (columns * number_bytes))


@dataclass(frozen=True, slots=True)
class Pipelines:
    """The pipelines of short and of long rows."""

    short: TilePipeline
    long: TilePipeline

    @classmethod
    def of(cls, shared_bytes: int) -> Pipelines:
        """For devices whose multiprocessors have so much shared memory."""
        return next(pipelines for least, pipelines in _PIPELINES if shared_bytes >= least << 10)


_PIPELINES = (  # by KiB of shared memory
    # Compute capability 9.0 and 10.0. Of 61 pipelines measured on an H200, the one ahead is the fastest.
    # Without a bound the others spill two registers, for a fourth program that shared memory has no room for.
    (
        228,
        Pipelines(
            TilePipeline(
                8192,
                4,
                9,
                merge_stages=4,
                merge_columns=128,
                registers=168,
                ahead_stages=3,
                ahead_bytes=16384,
            ),
            TilePipeline(16384, 8, 7),
        ),
    ),
    # 8.0
    (
        164,
        Pipelines(
            TilePipeline(8192, 4, 9, merge_stages=4, merge_columns=128, ahead_stages=4),
            TilePipeline(8192, 8, 7),
        ),
    ),
    # 8.6, 8.9 and 12.0. Without a bound the compiler spills registers, to run more programs than there is
    # shared memory for.
    (
        0,
        Pipelines(
            TilePipeline(8192, 4, 5, merge_stages=4, merge_columns=128, registers=168),
            TilePipeline(8192, 8, 7, registers=168),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What bounds how many programs of a kernel a multiprocessor runs at once."""

    shared_bytes: int
    threads: int

    @classmethod
    def of(cls, device: torch.device) -> Multiprocessor:
        """Those of a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.shared_memory_per_multiprocessor, properties.max_threads_per_multi_processor)

    def programs(self, registers: int, shared_bytes: int, warps: int) -> int:
        """Programs at once on a multiprocessor, of a kernel with `registers` a thread; 0: none fits."""
        threads = _WARP * warps
        of_registers = -(-registers // _REGISTER_STEP) * _REGISTER_STEP * threads
        of_shared = shared_bytes + _RESERVED_BYTES
        return min(_REGISTERS // of_registers, self.shared_bytes // of_shared, self.threads // threads)

    def programs_of(self, launch: Launch) -> int:
        """Of the launch's kernel, as it is compiled here; at least 1. Compiles it, if that was not done."""
        made = launch.compiled()
        return max(self.programs(made.n_regs, made.metadata.shared, launch.warps), 1)


@dataclass(frozen=True, slots=True)
class AttentionDevice:
    """What attention has to know of a device."""

    pipelines: Pipelines
    resident: Callable[[Launch], int]
    """How many programs of a launch a multiprocessor runs at once."""


@cache
def attention_device(device: torch.device) -> AttentionDevice:
    """Of a device; without CUDA, where kernels are interpreted, as of a large one."""
    if device.type != "cuda":
        return AttentionDevice(Pipelines.of(1 << 20), lambda _: _INTERPRETED)
    processor = Multiprocessor.of(device)
    return AttentionDevice(Pipelines.of(processor.shared_bytes), processor.programs_of)
