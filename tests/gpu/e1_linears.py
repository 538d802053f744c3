"""E1: the linear layers of the 8B shape by the number of rows: weights read per second."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.gpu.bench import Bench, Case
from tests.gpu.shapes import spec_of
from tests.gpu.timing import device_ms

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_COLD_BYTES = 400 << 20  # of weights in a round: several times the L2 cache


def run(bench: Bench) -> Iterator[Case]:
    """A case for each layer and number of rows; `fraction` is of the roofline through E0's ceilings."""
    spec, device = spec_of("Qwen3-8B", dry=bench.dry), bench.device
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layers = {
        "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "qkv": (queries + 2 * keys, spec.hidden_size),
        "output": (spec.hidden_size, queries),
        "head": (spec.vocab_size, spec.hidden_size),
    }
    for name, (n, k) in layers.items():
        copies = bench.pick(max(-(-_COLD_BYTES // (2 * n * k)), 2), 2)
        weights = [_random(n, k, device) * k**-0.5 for _ in range(copies)]
        for rows in bench.pick(_ROWS, (1, 4)):
            x = _random(rows, k, device)
            ms = device_ms([_product(x, w) for w in weights], device)
            moved, flops = 2 * (n * k + rows * (n + k)), 2 * n * k * rows
            floor_ms = 1e3 * max(moved / bench.machine.bytes_per_s, flops / bench.machine.flop_per_s)
            yield {
                "layer": name,
                "rows": rows,
                "ms": ms,
                "gb_s": moved / ms / 1e6,
                "tflop_s": flops / ms / 1e9,
                "fraction": floor_ms / ms,
            }
        del weights


def _random(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)


def _product(x: torch.Tensor, w: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: torch.nn.functional.linear(x, w)
