"""E3: whole steps of the backend on random weights, by shape and rows, against their floor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import ForwardRows
from executor_service.contract.plan import Sampling
from tests.bench.step_time import rows_of
from tests.gpu.bench import PAGE, Bench, Case
from tests.gpu.floors import decode_floor_s, prefill_floor_s
from tests.gpu.random_weights import RandomBackend
from tests.gpu.timing import kernels_of, repeated_ms, wall_ms

Rows = list[ForwardRow]
MOST_AHEAD = 128
"""Steps that may follow those of `decodes`: their pages are there."""
_REPLAYS = 50
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
    is always launched before it is waited for. `graph_ms` is the device's own time of the captured step, by
    events around replays without a host between them; `kernel_ms` the sum of its kernels' times, so that
    graph_ms - kernel_ms is spent between kernels, and 1 - kernel_ms / ahead_ms is the idle share. `as_eager`
    is the share of the tokens of two captured steps, the second launched ahead, that are those of steps
    launched kernel by kernel, one by one. There are as many pages as a service would have, and a row's are
    scattered among them.
    """
    context, prompt = bench.pick(1024, 32), bench.pick(2048, 48)
    repeats = bench.pick(20, 2)
    needed = max(max(counts) * pages_of_decode(context), -(-prompt // PAGE))
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
            case |= _graph(bench, backend, rows, floor_ms)
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
    sequences = backend.max_pending_forwards > 1
    following = [later(rows, step) if sequences else rows for step in range(1, steps + 1)]

    def run() -> None:
        flight = backend.launch(ForwardRows(rows))
        for step in following:
            launched = backend.launch(ForwardRows(step))
            flight.outputs()
            flight = launched
        flight.outputs()

    return wall_ms(run, bench.device, 3) / (steps + 1)


def _graph(bench: Bench, backend: RandomBackend, rows: Rows, floor_ms: float) -> Case:
    """The captured step's own time, if the step is captured: replays of it as its buffer has it."""
    if bench.device.type != "cuda":
        return {}
    from executor_service.backends.torch_backend.cuda.layout.host_step import HostStep  # needs Triton
    from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner

    runner = backend._runner
    assert isinstance(runner, DeviceRunner)
    backend.forward(rows)
    found = runner._graphs.find(HostStep(ForwardRows(rows), PAGE, runner._tiling).shape)
    if found is None:
        return {}
    graph_ms = repeated_ms(found[1].replay, _REPLAYS)
    return {"graph_ms": graph_ms, "graph_fraction": floor_ms / graph_ms, "graph_tokens": found[0].tokens}


def _two_steps(backend: RandomBackend, count: int, context: int, *, ahead: bool) -> np.ndarray:
    """Tokens [2 ways of sampling, 2 steps, rows]; the second step feeds what the first one samples."""
    tokens = []
    for sampling in (_GREEDY, _SAMPLED):
        rows = decodes(backend, count, context, sampling)
        if ahead:
            first = backend.launch(ForwardRows(rows))
            outputs = [first, backend.launch(ForwardRows(later(rows, 1)))]
            tokens.append([[out.tokens for out in step.outputs()] for step in outputs])
            continue
        one = backend.forward(rows)
        fed = [np.asarray(out.tokens, np.int32) for out in one]
        going_on = [
            replace(row, start=row.start + 1, tokens=t, history=np.append(row.history, t))
            for row, t in zip(rows, fed, strict=True)
        ]
        tokens.append([[out.tokens for out in step] for step in (one, backend.forward(going_on))])
    return np.array(tokens)[..., 0]


def decodes(backend: RandomBackend, count: int, context: int, sampling: Sampling = _GREEDY) -> Rows:
    """So many decodes after `context` cached tokens, with pages for MOST_AHEAD steps more."""
    rows = _scattered(backend, rows_of(count, 1 + MOST_AHEAD, context, sampling, backend.info.vocab_size))
    return [replace(row, tokens=row.tokens[:1], history=row.history[: context + 1]) for row in rows]


def pages_of_decode(context: int) -> int:
    """Of each of `decodes`."""
    return -(-(context + 1 + MOST_AHEAD) // PAGE)


def later(rows: Rows, steps: int) -> Rows:
    """The decodes of so many steps later, each of which follows that of the step before; at most MOST_AHEAD.

    The tokens are those that the steps before sample: what is here is not read.
    """
    assert steps <= MOST_AHEAD, "there are no pages for so many steps"
    return [
        replace(row, start=row.start + steps, history=np.pad(row.history, (0, steps)), follows=index)
        for index, row in enumerate(rows)
    ]


def _scattered(backend: RandomBackend, rows: Rows) -> Rows:
    """The rows on other pages, in no order, from all that there are but page 0."""
    order = 1 + np.random.default_rng(1).permutation(len(backend._caches[0].k) - 1).astype(np.int32)
    return [replace(row, block_table=order[row.block_table - 1]) for row in rows]


def _timed(bench: Bench, backend: RandomBackend, rows: Rows, floor_ms: float, repeats: int) -> Case:
    step_ms = _step_ms(bench, backend, rows, repeats)
    case: Case = {"step_ms": step_ms, "floor_ms": floor_ms, "fraction": floor_ms / step_ms}
    return case | kernels_of(lambda: backend.forward(rows), bench.device)
