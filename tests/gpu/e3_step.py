"""E3: whole steps of the backend on random weights, by shape and rows, against their floor."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import torch

from executor_service.backends.base import ForwardRow
from executor_service.backends.torch_backend.batch import lay_out
from executor_service.plan import Sampling
from tests.bench.step_time import rows_of
from tests.gpu.bench import PAGE, Bench, Case
from tests.gpu.floors import decode_floor_s, prefill_floor_s
from tests.gpu.random_weights import RandomBackend
from tests.gpu.timing import device_ms, kernels_of, wall_ms

Rows = list[ForwardRow]
_SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=1)


def run(bench: Bench) -> Iterator[Case]:
    """Cases of decode and, of each shape, one prompt."""
    for name in ("Qwen3-8B", "Qwen3-4B", "Qwen3-0.6B"):
        yield from steps_of(bench, name, bench.pick((1, 32, 128), (1, 4)))


def steps_of(bench: Bench, name: str, counts: tuple[int, ...]) -> Iterator[Case]:
    """Decode steps of so many rows, then a prompt alone.

    `step_ms` is what `forward` takes with all the host does; `kernel_ms` what the device computes in it, so
    that 1 - kernel_ms / step_ms is its idle share; `replay_ms` the same kernels, from embedding to argmax,
    replayed from a CUDA graph made here (the executor makes none): what is left without the host.
    """
    context, prompt = bench.pick(1024, 32), bench.pick(2048, 48)
    repeats = bench.pick(20, 2)
    room = max(max(counts) * -(-(context + 1) // PAGE) * PAGE, prompt)
    backend = bench.backend(name, tokens=room)
    try:
        spec = backend.model.spec
        for count in counts:
            rows, drawn = (rows_of(count, 1, context, s, spec.vocab_size) for s in (Sampling(), _SAMPLED))
            floor_ms = 1e3 * decode_floor_s(spec, count, context, bench.machine)
            case = _timed(bench, backend, rows, floor_ms, repeats)
            case["sampled_ms"] = _step_ms(bench, backend, drawn, repeats)
            yield {"shape": name, "kind": "decode", "rows": count, "context": context, **case}
        rows = rows_of(1, prompt, 0, Sampling(), spec.vocab_size)
        floor_ms = 1e3 * prefill_floor_s(spec, prompt, bench.machine)
        case = _timed(bench, backend, rows, floor_ms, repeats)
        yield {"shape": name, "kind": "prefill", "rows": 1, "tokens": prompt, **case}
    finally:
        backend.close()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _step_ms(bench: Bench, backend: RandomBackend, rows: Rows, repeats: int) -> float:
    return wall_ms(lambda: backend.forward(rows), bench.device, repeats)


def _timed(bench: Bench, backend: RandomBackend, rows: Rows, floor_ms: float, repeats: int) -> Case:
    step_ms = _step_ms(bench, backend, rows, repeats)
    case: Case = {"step_ms": step_ms, "floor_ms": floor_ms, "fraction": floor_ms / step_ms}
    case |= kernels_of(lambda: backend.forward(rows), bench.device)
    return case | _replayed(bench, backend, rows, floor_ms)


def _replayed(bench: Bench, backend: RandomBackend, rows: Rows, floor_ms: float) -> Case:
    model, kernels = backend.model, backend.model.kernels
    with torch.inference_mode(), kernels.step():
        batch = lay_out(rows, PAGE, bench.device)
        prepared = kernels.prepare(batch, model.spec.heads // model.spec.kv_heads)

        def step() -> torch.Tensor:
            return kernels.argmax(model.logits(model.hidden(batch, backend._caches)))

        # It copies from the host, which a capture refuses.
        with mock.patch.object(kernels, "prepare", return_value=prepared):
            try:
                replay_ms = device_ms([step], bench.device)
            except Exception as error:
                return {"replay_failed": f"{type(error).__name__}: {error}"[:1000]}
    return {"replay_ms": replay_ms, "replay_fraction": floor_ms / replay_ms}
