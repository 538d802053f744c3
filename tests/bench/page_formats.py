"""Decoding steps over pages of 8 bits, as ratios to steps over the pages that the dtype has without them.

usage: python -m tests.bench.page_formats MODEL [--dtypes int8] [--rows 32] [--context 1024]
       [--rounds 60] [--threads 0] [--cpu-time]
In each round both compute one step, in an order that turns; the median and the quartiles of the ratios of
time are printed: below 1, pages of 8 bits are faster. Then the same for prompts of `--context` tokens, and
how many pages fit into the memory of one without 8 bits.
With `--cpu-time` one thread's time on a core is measured, for machines that do other work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from executor_service.backends.base import ForwardRow
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.contract.plan import Sampling
from tests.bench.step_time import PAGE, rows_of

_PROMPT_ROUNDS = 5


def loaded(args: argparse.Namespace, dtype: str, kv_dtype: str) -> TorchBackend:
    """A backend whose rows have `--context` cached tokens each, all the same ones."""
    threads = 1 if args.cpu_time else args.threads
    backend = TorchBackend(TorchConfig(args.model, dtype=dtype, kv_dtype=kv_dtype, threads=threads))
    backend.load(lambda what, done: None)
    pages = -(-(args.context + 1) // PAGE)
    backend.allocate(1 + args.rows * pages, PAGE)
    backend.forward(prompt_of(backend, args.context))
    for row in range(1, args.rows):
        for page in range(1, 1 + pages):
            backend.copy_page(page, row * pages + page)
    return backend


def prompt_of(backend: TorchBackend, context: int) -> list[ForwardRow]:
    """One prompt, in the first row's pages."""
    return rows_of(1, context, 0, Sampling(), backend.info.vocab_size)


def ratios(calls: Sequence[Callable[[], object]], rounds: int, clock: Callable[[], float]) -> list[float]:
    """Of the second call's time to the first one's, in rounds in which each comes first in turn."""
    found = []
    for turn in range(rounds + 1):
        times = [0.0, 0.0]
        for i in (turn % 2, 1 - turn % 2):
            begin = clock()
            calls[i]()
            times[i] = clock() - begin
        found.append(times[1] / times[0])
    return found[1:]


def measure(args: argparse.Namespace, dtype: str) -> dict[str, object]:
    """The figures of one dtype."""
    clock = time.thread_time if args.cpu_time else time.perf_counter
    backends = [loaded(args, dtype, kv_dtype) for kv_dtype in ("auto", "int8")]
    steps = [rows_of(args.rows, 1, args.context, Sampling(), one.info.vocab_size) for one in backends]
    prompts = [prompt_of(one, args.context) for one in backends]
    wide, narrow = backends
    figures: dict[str, object] = {
        "dtype": dtype,
        "pages": str(wide.model.kernels.cache_dtype),
        "rows": args.rows,
        "context": args.context,
    }
    for name, rows, rounds in (("decode", steps, args.rounds), ("prompt", prompts, _PROMPT_ROUNDS)):
        calls = [lambda i=i, rows=rows: backends[i].forward(rows[i]) for i in range(2)]
        quartiles = statistics.quantiles(ratios(calls, rounds, clock), n=4)
        figures[name] = [round(ratio, 3) for ratio in quartiles]
    figures["pages_in_the_same_memory"] = round(wide.page_bytes(PAGE) / narrow.page_bytes(PAGE), 3)
    for backend in backends:
        backend.close()
    return figures


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtypes", default="int8")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    for dtype in args.dtypes.split(","):
        print(json.dumps(measure(args, dtype)), flush=True)


if __name__ == "__main__":
    main()
