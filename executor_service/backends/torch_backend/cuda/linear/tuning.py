"""`Tuning`: how a matrix product of few rows is cut into programs, and how these load their weights."""

from __future__ import annotations

from dataclasses import dataclass

from executor_service.backends.torch_backend.cuda.launch.launch import power_of_two

BLOCKS = 1024
"""Of outputs that have several programs, at most."""
_LINE_BYTES = 128  # of the cache
_LEAST_TILES = 2  # of weights, that a program has
_PROGRAMS = 1024  # that may start before the kernel before ends: more do not fit on a device


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of a product. A result's bits depend on `tile_bytes` and `programs`, and on its layer."""

    outputs: int = 16  # of a program: what a matrix instruction has lines for
    lines: int = 8  # rows, padded: a power of two, at least 8
    tile_bytes: int = 256  # of a weight row, loaded at once: two lines of the cache
    stages: int = 7  # gives six buffers, of which five may be on their way
    warps: int = 2
    programs: int = 256
    """At least, two for each multiprocessor: layers of fewer blocks of outputs have several for each."""
    asked_bytes: int = 1 << 20
    """Of a product's weights, asked for while the kernel before runs. On an H200, 12 MiB take longer."""

    @property
    def options(self) -> dict[str, int]:
        """Those of the compiler."""
        return {"warps": self.warps, "stages": self.stages}

    def parts(self, blocks: int, tiles: int) -> tuple[int, int]:
        """Parts that a product's inputs are cut into, and tiles of each: they depend on the layer alone."""
        wanted = -(-self.programs // blocks) if blocks <= BLOCKS else 1
        part = -(-tiles // max(min(wanted, tiles // _LEAST_TILES), 1))
        return -(-tiles // part), part

    def asked_lines(self, programs: int, row_bytes: int) -> int:
        """Of each of its weight rows, lines of the cache that a program asks for ahead: a power of two."""
        row_bytes = min(row_bytes, self.asked_bytes // (min(programs, _PROGRAMS) * self.outputs))
        return power_of_two(max(row_bytes // _LINE_BYTES, 1) + 1) // 2
