"""E13: whole decode steps with products in equal waves (`wave_products`), beside the shipped ones.

Each way is captured for steps of a few rows of the same model, and its graph replayed. `error`: of the last
layer's residual, against that of the shipped way; `equal`: tokens that are the same. On CPU all ways are the
plain products.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from tests.gpu.bench import PAGE, Bench, Case
from tests.gpu.e3_step import Rows, decodes, pages_of_decode
from tests.gpu.parallel_compilation import compile_launches
from tests.gpu.random_weights import RandomBackend
from tests.gpu.shapes import linears, spec_of
from tests.gpu.timing import repeated_ms
from tests.gpu.tuned_products import Part

_SHAPES = ("Qwen3-8B", "Qwen3-0.6B")
_SECONDS = 150.0  # for all: what is not measured by then is skipped
_COMPILING_S = 50.0  # of them
_REPLAYS = 30
_MB = 1 << 20
Fields = dict[str, int]
Way = tuple[Fields | None, bool]
"""The fields of its `Waves`, None: the shipped products; and whether with dependent launches."""


def run(bench: Bench) -> Iterator[Case]:
    """A case for each way and number of rows, of the 8B shape and of the small one."""
    began, context = time.monotonic(), bench.pick(1024, 32)
    if bench.device.type == "cuda":
        yield compile_launches(list(_launches()), began + _COMPILING_S)
    for name in _SHAPES:
        counts = bench.pick((1, 8), (1, 2))
        backend = bench.backend(name, max(counts) * pages_of_decode(context) * PAGE)
        try:
            yield from _cases(bench, backend, name, counts, context, began + bench.pick(_SECONDS, 3600.0))
        finally:
            backend.close()
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()


def _launches() -> Iterator[tuple[Any, bool]]:
    """All products of all ways, each kernel once."""
    from tests.gpu.wave_products import Waves, waves_launch  # needs Triton

    meta, seen = torch.device("meta"), set()
    for name in _SHAPES:
        parts = [Part(layer, n, k) for layer, (n, k) in linears(spec_of(name)).items()]
        for (fields, dependent), part in product(ways(), parts):
            if fields is None:
                continue
            x = torch.empty(2, part.k, dtype=torch.bfloat16, device=meta)
            weight, out = torch.empty(part.n, part.k, dtype=torch.bfloat16, device=meta), part.out(2, meta)
            activation = Activation.SILU if part.layer == "gate_up" else None
            arrivals = torch.empty(1, dtype=torch.int32, device=meta)
            launch = waves_launch(
                x, weight, None, out, arrivals, add=part.adds, activation=activation, how=Waves(**fields)
            )
            key = (str(launch.constants), launch.warps, launch.stages, part.layer == "head", dependent)
            if key not in seen:
                seen.add(key)
                yield launch, dependent


def ways() -> Iterator[Way]:
    """The shipped products, geometries without dependent launches, then with them, by when they start."""
    yield None, False
    yield None, True
    geometries: list[Fields] = [
        {},
        {"warps": 2},
        {"tile_bytes": 1024, "stages": 5},
        {"tile_bytes": 256, "warps": 2, "resident": 2},
        {"stages": 5, "warps": 2, "resident": 2},
        {"tile_bytes": 256, "stages": 5, "warps": 2, "resident": 4},
    ]
    for geometry in geometries:
        yield geometry, False
    # Tiles before the end, and MiB asked for
    starts = [(0, 0), (8, 8), (8, 0), (24, 8), (8, 16), (-1, 0), (0, 8)]
    for late, megabytes in starts:
        for geometry in geometries:
            yield {**geometry, "late": late, "asked_bytes": megabytes * _MB}, True


def _cases(
    bench: Bench, backend: RandomBackend, name: str, counts: tuple[int, ...], context: int, end: float
) -> Iterator[Case]:
    expected: dict[int, tuple[list[int], torch.Tensor]] = {}
    every = list(ways())
    for number, (fields, dependent) in enumerate(every if not bench.dry else every[:3]):
        if time.monotonic() > end:
            yield {"skipped": f"{name}: {len(every) - number} ways: the time is up"}
            return
        way = "shipped" if fields is None else "waves"
        case: Case = {"shape": name, "way": way, **(fields or {}), "dependent": dependent}
        try:
            for count in counts:
                rows = decodes(backend, count, context)
                tokens, residual, ms = _measured(bench, backend, rows, fields, dependent=dependent)
                known = expected.setdefault(count, (tokens, residual))
                equal = sum(a == b for a, b in zip(tokens, known[0], strict=True))
                error = float((residual - known[1]).norm() / known[1].norm())
                yield {**case, "rows": count, "graph_ms": ms, "equal": equal, "error": error}
        except Exception as error:  # one that does not compile, or does not fit
            yield {**case, "failed": f"{type(error).__name__}: {error}"[:300]}


def _measured(
    bench: Bench, backend: RandomBackend, rows: Rows, fields: Fields | None, *, dependent: bool
) -> tuple[list[int], torch.Tensor, float]:
    """Tokens, the last layer's residual and a replay's milliseconds; on CPU of a step."""
    if bench.device.type != "cuda":
        tokens = np.array([out.tokens for out in backend.forward(rows)])[:, 0].tolist()
        return tokens, torch.ones(1), 1.0
    from executor_service.backends.torch_backend.cuda.layout.host_step import HostStep  # needs Triton
    from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner, _host_numbers
    from executor_service.backends.torch_backend.cuda.run.graphs import shapes_of

    runner = backend._runner
    assert isinstance(runner, DeviceRunner)
    spec = backend.model.spec
    shapes = shapes_of(len(rows), len(rows), PAGE, spec.context_length, runner._tiling, 0)
    shape = next(one for one in shapes if one.tokens == len(rows) and not one.long_items)
    runner._hosts.reserve(runner.max_pending_forwards + 1, _host_numbers(shape))
    before, runner._dependent = runner._dependent, dependent
    try:
        with torch.inference_mode(), _products(fields):
            runner._graphs.capture(runner._compute, [shape], lambda *_: None)
        tokens = np.array([out.tokens for out in backend.forward(rows)])[:, 0].tolist()
        found = runner._graphs.find(HostStep(ForwardRows(rows), PAGE, runner._tiling).shape)
        assert found is not None
        residual = found[1].picked.residual.float().clone()
        return tokens, residual, min(repeated_ms(found[1].replay, _REPLAYS) for _ in range(2))
    finally:
        runner._dependent = before


@contextmanager
def _products(fields: Fields | None) -> Iterator[None]:
    """Within, linear layers launch such products; None: those that are shipped."""
    from executor_service.backends.torch_backend.cuda.linear import linears
    from tests.gpu.wave_products import Waves, waves_launch

    used = vars(linears)  # a module's own names: few_rows_launch is one that it imports
    shipped = used["few_rows_launch"]
    if fields is not None:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        used["few_rows_launch"] = partial(waves_launch, how=Waves(processors, **fields))
    try:
        yield
    finally:
        used["few_rows_launch"] = shipped
