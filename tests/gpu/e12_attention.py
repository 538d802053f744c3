"""E12: attention of decodes by how keys are cut and programs compiled, beside the shipped way and SDPA.

All kernels are compiled first, by as many processes as there are cores. What does not compile, or computes
something else, is a case that failed; the others go on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING

import torch

from tests.gpu.bench import Bench, Case
from tests.gpu.e2_attention import ROUNDING, Attend, Rows, measured, missing, paged, sdpa
from tests.gpu.shapes import spec_of
from tests.triton.mended import INTERPRETED, mended_interpreter

if TYPE_CHECKING:
    from executor_service.backends.torch_backend.cuda.attention.pipelines import Pipelines
    from executor_service.backends.torch_backend.cuda.layout.rows import Tiling

_SECONDS = 56.0  # for all: what is not measured by then is skipped
_SIZES = ((1, 1024), (32, 1024), (128, 1024), (1, 8192), (32, 8192))  # rows, keys of each
_POOL_KEYS = 128 << 10  # of all sequences together: more than the L2 cache holds


@dataclass(frozen=True)
class How:
    """Of short rows, whose pages are looked up ahead."""

    tile_bytes: int
    warps: int
    stages: int
    split: int = 256  # keys of a piece
    busy: int = 256  # items of a step and KV heads that keep the device busy

    def change(self, tiling: Tiling, pipelines: Pipelines) -> tuple[Tiling, Pipelines]:
        """The shipped cuts and pipelines with these."""
        busy = max(self.busy // 8, 1)  # KV heads
        short = replace(
            pipelines.short, warps=self.warps, ahead_stages=self.stages, ahead_bytes=self.tile_bytes
        )
        cut = tiling.short._replace(split=self.split, busy=busy)
        return tiling._replace(short=cut), replace(pipelines, short=short)


def ways() -> list[How]:
    """What matters most first."""
    found = [How(*each) for each in product((16384, 8192, 4096), (4, 2, 8), (3, 4, 6))]
    found += [How(16384, 4, 3, split, busy) for split in (128, 256, 512) for busy in (128, 256, 512)]
    found += [How(8192, 4, 4, split, busy) for split in (128, 256, 512) for busy in (128, 256, 512, 1024)]
    return list(dict.fromkeys(found))


def run(bench: Bench) -> Iterator[Case]:
    """A case for each size and way; `error` is the largest difference from SDPA in fp32."""
    with mended_interpreter() if INTERPRETED else nullcontext():
        yield from _cases(bench)


def _cases(bench: Bench) -> Iterator[Case]:
    end = time.monotonic() + _SECONDS
    if reason := missing("triton", bench):
        yield {"way": "triton", "skipped": reason}
        return
    every = ways()
    if bench.device.type == "cuda":
        with ProcessPoolExecutor(min(os.cpu_count() or 1, len(every)), get_context("fork")) as pool:
            list(pool.map(_compile, every))  # this process leaves the device alone until then
    for count, context in bench.pick(_SIZES, ((2, 32),)):
        pool_rows = bench.pick(max(_POOL_KEYS // context, count), 2)
        rows = Rows.random(spec_of("Qwen3-8B", dry=bench.dry), bench.device, pool_rows, count, context, 1)
        exact = sdpa(rows, torch.float32)(0)
        for how in (None, *bench.pick(every, [])):
            case: Case = {"rows": count, "context": context, "way": asdict(how) if how else "shipped"}
            if time.monotonic() > end:
                yield case | {"skipped": "the time is up"}
                return
            yield case | _case(bench, rows, paged(rows, how.change if how else None), exact)
        yield {"rows": count, "context": context, "way": "sdpa"} | _case(bench, rows, sdpa(rows), exact)


def _case(bench: Bench, rows: Rows, attend: Attend, exact: torch.Tensor) -> Case:
    try:
        case = measured(bench, rows, attend, exact)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    if case["error"] > ROUNDING * case["largest"]:
        return case | {"failed": "it computes something else"}
    return case


def _compile(how: How) -> None:
    """What fails does so again, as a case, when it is launched."""
    torch.set_num_threads(1)
    with suppress(Exception):
        rows = Rows.random(spec_of("Qwen3-8B", dry=False), torch.device("cuda:0"), 2, 2, 1024, 1)
        paged(rows, how.change)(0)
