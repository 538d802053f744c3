"""E9: decode steps with programmatic dependent launch and without it, in turns: times and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import numpy as np
import torch

from executor_service.backends.forward_rows import ForwardRows
from executor_service.contract.plan import Sampling
from tests.gpu.bench import PAGE, Bench, Case
from tests.gpu.check_tokens import DEPENDENT, ways
from tests.gpu.e3_step import ahead_ms, decodes, later, pages_of_decode
from tests.gpu.random_weights import RandomBackend

_SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=1)
_SHAPES = (
    ("Qwen3-0.6B", 0, (1, 8, 32, 128)),
    ("Qwen3-8B", 0, (1, 8, 32, 128)),
    ("Qwen3-30B-A3B", 12, (1, 4, 32)),
    ("Qwen3-4B", 0, (1, 8)),
)
"""Name, layers (0: all; two of a large model would not fit) and rows."""


def run(bench: Bench) -> Iterator[Case]:
    """Cases of captured steps that are launched ahead, by shape and rows; `ratio`: of on to off.

    The kernels are the same, and so must be all tokens: the steps of one round feed what the steps before
    them sampled. A dry run has it off both times.
    """
    if not bench.dry and DEPENDENT not in ways(bench.device):
        yield {"skipped": "the device has no dependent launches"}
        return
    for name, layers, counts in _SHAPES:
        yield from _cases(bench, name, layers, bench.pick(counts, counts[:2]), bench.pick(1024, 32))


def _cases(bench: Bench, name: str, layers: int, counts: tuple[int, ...], context: int) -> Iterator[Case]:
    tokens = max(counts) * PAGE * pages_of_decode(context)
    both: dict[str, RandomBackend] = {}
    try:
        for way, dependent in (("off", False), ("on", not bench.dry)):
            torch.manual_seed(1)  # of keys and values
            both[way] = bench.backend(name, tokens, dependent=dependent, layers=bench.pick(layers, 0))
            both[way].capture(max(counts), 2 * max(counts), lambda what, done: None)
        for count in counts:
            times: dict[str, list[float]] = {way: [] for way in both}
            found = {
                way: _tokens(backend, count, context, bench.pick(60, 2)) for way, backend in both.items()
            }
            for _ in range(bench.pick(4, 2)):
                for way, backend in both.items():
                    times[way].append(ahead_ms(bench, backend, decodes(backend, count, context), 20))
            on, off = median(times["on"]), median(times["off"])
            equal = bool(np.array_equal(found["on"], found["off"]))
            yield {
                "shape": name, "rows": count, "context": context, "on_ms": on, "off_ms": off,
                "ratio": on / off, "tokens_equal": equal, **{f"{way}_rounds_ms": times[way] for way in times},
            }  # fmt: skip
            if not equal:
                raise AssertionError(f"{name}, {count} rows: dependent launches change tokens")
    finally:
        for backend in both.values():
            backend.close()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _tokens(backend: RandomBackend, count: int, context: int, steps: int) -> np.ndarray:
    """[steps, rows]; where the device runs ahead, each step is launched before the one before it is read."""
    rows, tokens = decodes(backend, count, context, _SAMPLED), []
    sequences = backend.max_pending_forwards > 1
    flight = backend.launch(ForwardRows(rows))
    for step in range(1, steps + 1):
        following = backend.launch(ForwardRows(later(rows, step) if sequences else rows))
        tokens.append([out.tokens for out in flight.outputs()])
        flight = following
    flight.outputs()
    return np.array(tokens)[..., 0]
