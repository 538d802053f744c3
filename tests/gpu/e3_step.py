"""E3: whole steps of the backend on random weights, by shape and rows, against their floor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from executor_service.backends.base import ForwardRow
from executor_service.contract.plan import Sampling
from tests.bench.step_time import rows_of
from tests.gpu.bench import PAGE, Bench, Case
from tests.gpu.floors import decode_floor_s, prefill_floor_s
from tests.gpu.random_weights import RandomBackend
from tests.gpu.timing import kernels_of, wall_ms

Rows = list[ForwardRow]
_LEAST_EQUAL = 0.9  # of tokens; rounding may decide some
_GREEDY = Sampling()
_SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=1)


def run(bench: Bench) -> Iterator[Case]:
    """Cases of decode and, of each shape, one prompt."""
    for name in ("Qwen3-8B", "Qwen3-4B", "Qwen3-0.6B"):
        yield from steps_of(bench, name, bench.pick((1, 32, 128), (1, 4)))


def steps_of(bench: Bench, name: str, counts: tuple[int, ...]) -> Iterator[Case]:
    """Decode steps of so many rows, then a prompt alone.

    `eager_ms` is what `forward` takes with all the host does where each kernel is launched on its own,
    `step_ms` the same where steps are captured and replayed; `ahead_ms` is a step's time where the next one
    is always launched before it is waited for. `as_eager` is the share of the tokens of two captured steps,
    the second launched ahead, that are those of steps launched kernel by kernel, one by one. `kernel_ms` is
    what the device computes in a step: 1 - kernel_ms / ahead_ms is its idle share. There are as many pages as
    a service would have, and a row's are scattered among them.
    """
    context, prompt = bench.pick(1024, 32), bench.pick(2048, 48)
    repeats = bench.pick(20, 2)
    needed = max(max(counts) * -(-(context + 1) // PAGE), -(-prompt // PAGE))
    backend = bench.backend(name)
    try:
        pages = bench.pick(backend.default_pages(PAGE, max(counts), 2 * prompt), needed)
        backend.allocate(1 + max(pages, needed), PAGE)
        backend.fill_caches()
        spec = backend.model.spec
        eager = {
            count: _step_ms(bench, backend, decodes(backend, count, context), repeats) for count in counts
        }
        expected = {count: _two_steps(backend, count, context, ahead=False) for count in counts}
        began = time.perf_counter()
        backend.capture(max(counts), 2 * prompt, lambda what, done: None)
        capture_s = time.perf_counter() - began
        yield {
            "shape": name, "kind": "capture", "capture_s": capture_s, "pages": pages, **backend.memory_bytes()
        }  # fmt: skip
        ahead = backend.max_pending_forwards > 1
        found = {count: _two_steps(backend, count, context, ahead=ahead) for count in counts}
        equal = {count: float(np.mean(found[count] == expected[count])) for count in counts}
        for count in counts:
            rows, drawn = (decodes(backend, count, context, s) for s in (_GREEDY, _SAMPLED))
            floor_ms = 1e3 * decode_floor_s(spec, count, context, bench.machine)
            case = {"eager_ms": eager[count], "as_eager": equal[count]} | _timed(
                bench, backend, rows, floor_ms, repeats
            )
            case["ahead_ms"] = ahead_ms(bench, backend, rows, 2 * repeats)
            case["ahead_fraction"] = floor_ms / case["ahead_ms"]
            case["sampled_ms"] = _step_ms(bench, backend, drawn, repeats)
            yield {"shape": name, "kind": "decode", "rows": count, "context": context, **case}
        rows = _scattered(backend, rows_of(1, prompt, 0, _GREEDY, spec.vocab_size))
        floor_ms = 1e3 * prefill_floor_s(spec, prompt, bench.machine)
        case = _timed(bench, backend, rows, floor_ms, repeats)
        yield {"shape": name, "kind": "prefill", "rows": 1, "tokens": prompt, **case}
        if min(equal.values()) < _LEAST_EQUAL:
            raise AssertionError(f"tokens of captured steps are not those of others: equal {equal}")
    finally:
        backend.close()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _step_ms(bench: Bench, backend: RandomBackend, rows: Rows, repeats: int) -> float:
    return wall_ms(lambda: backend.forward(rows), bench.device, repeats)


def ahead_ms(bench: Bench, backend: RandomBackend, rows: Rows, steps: int) -> float:
    """Each step goes on with the tokens of the one before, which nobody has read yet."""
    going_on = [replace(row, follows=index) for index, row in enumerate(rows)]

    def run() -> None:
        flight = backend.launch(rows)
        for _ in range(steps):
            following = backend.launch(going_on if backend.max_pending_forwards > 1 else rows)
            flight.outputs()
            flight = following
        flight.outputs()

    return wall_ms(run, bench.device, 3) / (steps + 1)


def _two_steps(backend: RandomBackend, count: int, context: int, *, ahead: bool) -> np.ndarray:
    """Tokens [2 ways of sampling, 2 steps, rows]; the second step feeds what the first one samples."""
    tokens = []
    for sampling in (_GREEDY, _SAMPLED):
        rows = decodes(backend, count, context, sampling)
        if ahead:
            first = backend.launch(rows)
            second = backend.launch([replace(row, follows=index) for index, row in enumerate(rows)])
            outputs = [first.outputs(), second.outputs()]
        else:
            one = backend.forward(rows)
            fed = [np.asarray(out.tokens, np.int32) for out in one]
            histories = [np.append(row.history[:-1], t) for row, t in zip(rows, fed, strict=True)]
            going_on = [
                replace(row, tokens=t, history=history)
                for row, t, history in zip(rows, fed, histories, strict=True)
            ]
            outputs = [one, backend.forward(going_on)]
        tokens.append([[out.tokens for out in step] for step in outputs])
    return np.array(tokens)[..., 0]


def decodes(backend: RandomBackend, count: int, context: int, sampling: Sampling = _GREEDY) -> Rows:
    return _scattered(backend, rows_of(count, 1, context, sampling, backend.info.vocab_size))


def _scattered(backend: RandomBackend, rows: Rows) -> Rows:
    """The rows on other pages, in no order, from all that there are but page 0."""
    order = 1 + np.random.default_rng(1).permutation(len(backend._caches[0].k) - 1).astype(np.int32)
    return [replace(row, block_table=order[row.block_table - 1]) for row in rows]


def _timed(bench: Bench, backend: RandomBackend, rows: Rows, floor_ms: float, repeats: int) -> Case:
    step_ms = _step_ms(bench, backend, rows, repeats)
    case: Case = {"step_ms": step_ms, "floor_ms": floor_ms, "fraction": floor_ms / step_ms}
    return case | kernels_of(lambda: backend.forward(rows), bench.device)
