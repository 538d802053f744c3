"""E11: products of few rows by `Tuning`, beside the shipped one and cuBLAS: weights read per second.

Each case is captured with so many copies of its weights that none is in the L2 cache. All kernels are
compiled first, by as many processes as there are cores. A tuning that does not compile, or computes something
else, is a case that failed; the others go on. On CPU plain products stand for all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from tests.gpu.bench import Bench, Case
from tests.gpu.parallel_compilation import compile_launches
from tests.gpu.timing import device_ms
from tests.gpu.tuned_products import PLAIN, Call, Part, Products, products

_SECONDS = 56.0  # for all: what is not measured by then is skipped
_COMPILING_S = 25.0  # of them
_COLD_BYTES = 200 << 20  # of weights in a round: four times the L2 cache
_PRODUCTS = (32, 64)  # in a round, at least and at most
_ERROR = 0.02  # of a result, of the largest one


def run(bench: Bench) -> Iterator[Case]:
    """A case for each of `products`: microseconds, and what part of the time E0's rate would take.

    `gb_s`: weights alone. `bits_of_one`: a row has the bits of the shipped product of one row. The first
    case says how many kernels were compiled, and for how long.
    """
    began = time.monotonic()
    end = began + bench.pick(_SECONDS, 3600.0)
    wanted = list(products(dry=bench.dry))
    if bench.device.type == "cuda":
        yield compile_launches(_launches(wanted), began + _COMPILING_S)
    weights = _Weights(bench.device, max(part.n * part.k for each in wanted for part in each.parts))
    for number, each in enumerate(wanted):
        if time.monotonic() > end:
            yield {"skipped": f"{len(wanted) - number} cases: the time is up"}
            return
        yield {**each.plain(), **_measured(bench, each, weights)}


class _Weights:
    """Random numbers that weights are parts of: one after the other, then from the beginning again."""

    def __init__(self, device: torch.device, most: int) -> None:
        self._numbers = torch.empty(most, dtype=torch.bfloat16, device=device).normal_(std=0.02)
        self._taken = 0

    def take(self, n: int, k: int) -> torch.Tensor:
        """Of size [n, k]."""
        if self._taken + n * k > len(self._numbers):
            self._taken = 0
        begin, self._taken = self._taken, self._taken + n * k
        return self._numbers[begin : self._taken].view(n, k)


def _launches(wanted: Sequence[Products]) -> list[tuple[Any, bool]]:
    """What is launched, each kernel once, and whether for dependent launches."""
    meta, seen = torch.device("meta"), set()
    launches: list[tuple[Any, bool]] = []
    for each in wanted:
        if each.how is None:
            continue
        for part in each.parts:
            x = torch.empty(each.rows, part.k, dtype=torch.bfloat16, device=meta)
            weight = torch.empty(part.n, part.k, dtype=torch.bfloat16, device=meta)
            launch = part.launch(x, weight, part.out(each.rows, meta), each.how)
            key = (str(launch.constants), launch.warps, launch.stages, part.layer == "head", each.dependent)
            if key not in seen:
                seen.add(key)
                launches.append((launch, each.dependent))
    return launches


def _how(*, dependent: bool) -> AbstractContextManager[None]:
    """Inside, launches are made so."""
    from executor_service.backends.torch_backend.cuda.launch.launch import dependent_launches

    return dependent_launches(on=dependent)


def _measured(bench: Bench, each: Products, weights: _Weights) -> Case:
    """Rounds of it, as far as they fit."""
    least, most = _PRODUCTS
    copies = min(max(-(-_COLD_BYTES // each.bytes), -(-least // len(each.parts))), most)
    device = bench.device
    try:
        same = [_check(device, part, each, weights) for part in each.parts]
        with _how(dependent=each.dependent):
            parts = each.parts * bench.pick(copies, 2)
            ms = device_ms([_call(device, part, each, weights) for part in parts], device) * len(each.parts)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    return {
        "us": 1e3 * ms,
        "gb_s": each.bytes / ms / 1e6,
        "fraction": 1e3 * each.bytes / bench.machine.bytes_per_s / ms,
        "bits_of_one": all(same),
    }


def _call(device: torch.device, part: Part, each: Products, weights: _Weights) -> Call:
    """One product, with memory of its own."""
    x = torch.randn(each.rows, part.k, device=device, dtype=torch.bfloat16)
    weight, out = weights.take(part.n, part.k), part.out(each.rows, device)
    if each.how is None or device.type != "cuda":
        return part.plain(x, weight, out)
    run: Call = part.launch(x, weight, out, each.how).run
    return run


def _check(device: torch.device, part: Part, each: Products, weights: _Weights) -> bool:
    """Whether its first row's bits are those of the shipped product of one row. Raises where it is wrong."""
    x = torch.randn(each.rows, part.k, device=device, dtype=torch.bfloat16)
    weight = weights.take(part.n, part.k)
    if device.type != "cuda":
        return each.rows == 1
    found, expected, one = part.out(each.rows, device), part.out(each.rows, device), part.out(1, device)
    expected = part.plain(x, weight, expected)()
    if each.how is None:
        found = expected
    else:
        with _how(dependent=each.dependent):
            part.launch(x, weight, found, each.how).run()
    part.launch(x[:1], weight, one, PLAIN).run()
    error = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
    if not error < _ERROR:
        raise AssertionError(f"it computes something else, by {error:.3g} of the largest result")
    return torch.equal(found[:1], one)
