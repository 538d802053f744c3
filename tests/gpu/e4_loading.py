"""E4: a cold start of the 8B shape: loading, what compiles at the first steps, CUDA graphs, memory.

Measured in a process of its own, whose kernel cache is empty.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from executor_service.contract.limits import Limits
from executor_service.contract.plan import Sampling
from executor_service.runtime.warmup import warm_up
from tests.bench.step_time import rows_of
from tests.gpu.bench import PAGE, Bench, Case
from tests.support import engine_steps

_MARK = "result: "


def run(bench: Bench) -> Iterator[Case]:
    """One case of a cold start, and one with the kernels compiled before."""
    for start in ("cold", "kernels cached"):
        began = time.time()
        arguments = [str(bench.device), str(bench.directory), str(int(bench.dry)), str(began)]
        environment = {**os.environ, "TRITON_CACHE_DIR": str(bench.directory / "triton-cache")}
        done = subprocess.run(
            [sys.executable, "-m", __name__, *arguments], env=environment, capture_output=True, text=True
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
        if done.returncode or not lines:
            raise RuntimeError(f"exit status {done.returncode}:\n{done.stderr[-3000:]}")
        yield {"start": start, "process_s": time.time() - began, **json.loads(lines[-1].removeprefix(_MARK))}


def main() -> None:
    """The process that is started: device, directory, dry, when it was started; prints the case."""
    times = {"import_s": time.time() - float(sys.argv[4])}
    began = time.perf_counter()

    def mark(what: str) -> None:
        nonlocal began
        now = time.perf_counter()
        times[what] = now - began
        began = now

    device, dry = torch.device(sys.argv[1]), sys.argv[3] == "1"
    bench = Bench(device, dry, Path(sys.argv[2]), {})
    backend = bench.backend("Qwen3-8B")
    mark("load_s")
    rows = bench.pick(64, 4)
    pages = rows * bench.pick(66, 4)
    backend.allocate(1 + pages, PAGE)
    mark("allocate_s")
    vocabulary, context = backend.info.vocab_size, bench.pick(1024, 32)
    for name, row in (
        ("first_prefill_s", rows_of(1, context, 0, Sampling(), vocabulary)),
        ("second_prefill_s", rows_of(1, context, 0, Sampling(), vocabulary)),
        ("first_decode_s", rows_of(1, 1, context, Sampling(), vocabulary)),
        ("second_decode_s", rows_of(1, 1, context, Sampling(), vocabulary)),
    ):
        backend.forward(row)
        mark(name)
    before = backend.memory_bytes()
    backend.capture(rows, bench.pick(2048, 64), lambda what, done: None)
    mark("capture_s")
    limits = Limits(vocabulary, backend.info.context_length, PAGE, pages, rows, rows, bench.pick(2048, 64))
    engine_steps.run(warm_up(backend, limits))
    mark("warm_up_s")
    result = times | {"memory_bytes": backend.memory_bytes(), "memory_bytes_without_graphs": before}
    print(_MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
