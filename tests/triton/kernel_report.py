"""Compiles the CUDA kernels for several architectures without a GPU and says what came out of it.

`python -m tests.triton.kernel_report [--all]` prints a line for each kernel, and fails where one spills
registers or does not fit its multiprocessor, where attention, adapters and products of few rows lack matrix
instructions, where attention loads too few tiles of keys ahead, and products of few rows too few weights, and
where adapters read their factors in small parts. The kernels are those of the launches that the worker makes.
For 9.0 each is also compiled for dependent launches, and must wait for the kernel before it; before that it
may ask for weights, which products of few rows must, and for nothing else.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import torch

from executor_service.backends.torch_backend.cuda.attention.pipelines import (
    Multiprocessor,
)
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from tests.triton.ahead_of_time import (
    ATTENTION_SHAPES,
    DEPENDENT,
    DEPENDENT_SHAPES,
    MIXTURES,
    MORE_MIXTURES,
    MORE_PAGE_SHAPES,
    MORE_SHAPES,
    PAGE_SHAPES,
    SHAPES,
    SHARED_BYTES,
    Shape,
    compiled_launches,
)
from tests.triton.compiled import TYPES, Compiled, compiled, specialized

BUFFERS = {80: (4, 3), 86: (2, 3), 89: (2, 3), 90: (4, 4)}
"""Tiles of K that attention has room for, at least, in short and in long rows."""
_FEW_BYTES = 24 << 10  # of tiles, enough in short rows where pages are looked up ahead: programs are smaller
_CONVERTED_BUFFERS = 3  # the same of 8 bits, where to convert a tile takes one of them
_FP32_SPILLED = 128  # bytes of a thread
_SHORT_PROGRAMS = 2  # of attention's short rows, that a multiprocessor runs at once, at least
_MORE_REGISTERS = 4  # of a thread, in dependent launches, at most
PROCESSORS = {80: 108, 86: 82, 89: 128, 90: 132}
MEMORY_BYTES_PER_S = {80: 2.04e12, 86: 0.94e12, 89: 1.01e12, 90: 3.35e12}
"""Of an A100, an RTX 3090, an RTX 4090 and an H100."""
LATENCY_S = 1e-6
"""From a load to its bytes while memory is busy, not less. Memory stays busy while at least this time's bytes
are on their way (Little's law)."""


def _jobs(shapes: list[Shape]) -> Iterator[tuple[Shape, int, set[str]]]:
    """Shapes, architectures, and the names of the kernels that no shape before has in the same way."""
    for architecture in SHARED_BYTES:
        seen = set()
        for shape in shapes:
            names = set()
            made = compiled_launches(shape, architecture) if architecture in shape.architectures else ()
            for name, launch in made:
                key = str((launch.kernel.fn, *specialized(launch), launch.warps, launch.stages))
                if key not in seen:
                    names.add(name)
                    seen.add(key)
            if names:
                yield shape, architecture, names


def lines(shape: Shape, architecture: int, names: set[str]) -> list[str]:
    """The lines of a shape in the table; those of kernels that are not as they should be begin with BAD."""
    found = []
    dependent: set[object] = set()  # kernels that were compiled for dependent launches
    for name, launch in compiled_launches(shape, architecture):
        if name not in names:
            continue
        made = compiled(launch, architecture)
        fault = _fault(name, shape, architecture, launch, made)
        found.append(f"{_mark(fault)} {_line(name, shape, architecture, launch, made)} {fault}")
        if architecture == DEPENDENT and shape in DEPENDENT_SHAPES and launch.kernel not in dependent:
            dependent.add(launch.kernel)
            made, plain = compiled(launch, architecture, dependent=True), made
            fault = _fault(name, shape, architecture, launch, made)
            if not fault and "asked" in launch.constants and not made.asked:
                fault = "it does not ask for weights before it waits"
            if not fault and made.registers > plain.registers + _MORE_REGISTERS:
                fault = f"it takes {plain.registers} registers where it is launched plainly"
            line = _line(f"{name}, dependent", shape, architecture, launch, made)
            found.append(f"{_mark(fault)} {line} {fault}")
    return found


def _mark(fault: str) -> str:
    return "BAD" if fault else "   "


def _line(name: str, shape: Shape, architecture: int, launch: Launch, made: Compiled) -> str:
    """What is printed of a kernel."""
    line = (
        f"{architecture}  {TYPES[shape.dtype]:5}  {TYPES[shape.pages or shape.dtype]:7}"
        f"  {shape.heads:2}/{shape.kv_heads:<2}  {shape.head_dim:8}  {shape.window:6}  {name:27}"
        f"  {made.registers:9}  {made.spilled_bytes:7}  {made.shared_bytes:8}"
        f"  {made.matrix_instructions:13}  {_programs(architecture, launch, made):8}"
    )
    if made.buffers:
        line += f"  {made.buffers:7}  {made.ahead:5}"
    if name.startswith("few rows"):
        line += f"  {_bytes_ahead(architecture, launch, made) >> 10:8}"
    return line


def main(shapes: list[Shape]) -> int:
    """Print the table; the number of kernels that are not as they should be. Two processes compile."""
    print(
        "    sm  dtype  pages    heads  head_dim  window  kernel                       registers  spilled"
        "  shared B  matrix instr.  programs  buffers  ahead  KB ahead"
    )
    bad = 0
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        for found in processes.map(lines, *zip(*_jobs(shapes), strict=True)):
            print("\n".join(found), flush=True)
            bad += sum(line.startswith("BAD") for line in found)
    return bad


def _programs(architecture: int, launch: Launch, made: Compiled) -> int:
    """How many programs of this kernel a multiprocessor runs at once."""
    threads = 1536 if architecture in (86, 89) else 2048
    processor = Multiprocessor(SHARED_BYTES[architecture] + 1024, threads)
    return processor.programs(made.registers, made.shared_bytes, launch.warps)


def _blocks(launch: Launch) -> int:
    """How many programs it has in all."""
    return math.prod(launch.grid)


def _bytes_ahead(architecture: int, launch: Launch, made: Compiled) -> int:
    """Of weights: how many a multiprocessor may have on their way in a product of few rows.

    `ahead` counts tiles of weights and of rows; of 4 bits also those of scales and minima, apart for each
    span. There are no more programs than outputs ask for.
    """
    weight, constants = launch.arguments["weight"], launch.constants
    assert isinstance(weight, torch.Tensor)
    tile, ahead = constants["outputs"] * constants["inputs"] * weight.element_size(), made.ahead // 2
    if "span" in constants:
        tile, ahead = tile // 2, made.buffers - 1 if made.ahead else 0
    programs = min(_programs(architecture, launch, made), -(-_blocks(launch) // PROCESSORS[architecture]))
    return programs * ahead * tile


def _fault(name: str, shape: Shape, architecture: int, launch: Launch, made: Compiled) -> str:
    """What is wrong with a kernel; "" if nothing is."""
    # fp32 is there for comparisons: prompts of wide heads may keep a little in memory.
    if made.spilled_bytes > (_FP32_SPILLED if shape.dtype == torch.float32 and name.endswith("long") else 0):
        return "it spills registers"
    if made.disorder:
        return made.disorder
    if made.shared_bytes > SHARED_BYTES[architecture]:
        return "it does not fit into shared memory"
    parts = "arrivals" in launch.arguments and launch.constants.get("splits", 1) > 1
    if (name.startswith("attention") or parts) and not made.arrives:
        return "it may merge results that are not stored yet"
    if "rows, 4 bits" in name and not made.matrix_instructions:
        return "it has no matrix instructions"
    if name.startswith("few rows"):
        needed = MEMORY_BYTES_PER_S[architecture] / PROCESSORS[architecture] * LATENCY_S
        few = (
            _bytes_ahead(architecture, launch, made) < needed and _blocks(launch) >= PROCESSORS[architecture]
        )
        return "" if made.matrix_instructions and not few else "it loads too few weights ahead"
    # fp32, for tests, has no matrix instruction of its precision.
    if (
        name not in ("attention, short", "attention, long", "shrink", "expand")
        or shape.dtype == torch.float32
    ):
        return ""
    if not made.matrix_instructions:
        return "it has no matrix instructions"
    if not name.startswith("attention"):
        return "it reads factors two bytes at a time" if made.narrow_loads else ""
    is_long = name == "attention, long"
    buffers = BUFFERS[architecture][is_long]
    if launch.constants["ahead"]:
        tile_bytes = launch.constants["tile"] * launch.constants["columns"] * shape.dtype.itemsize
        buffers = min(buffers, -(-_FEW_BYTES // tile_bytes))
    if shape.pages is not None:
        buffers = min(buffers, _CONVERTED_BUFFERS)
    if made.buffers < buffers or not made.ahead:
        return "it loads too few tiles of keys ahead"
    if _programs(architecture, launch, made) < (1 if is_long else _SHORT_PROGRAMS):
        return "too few programs run at once"
    return ""


if __name__ == "__main__":
    chosen = SHAPES + MIXTURES + ATTENTION_SHAPES + PAGE_SHAPES
    if "--all" in sys.argv[1:]:
        chosen += MORE_SHAPES + MORE_MIXTURES + MORE_PAGE_SHAPES
    sys.exit(main(chosen) > 0)
