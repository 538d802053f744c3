"""E0: what this device can do at most: bytes copied and bf16 products, each per second."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.gpu.bench import Bench, Case
from tests.gpu.timing import device_ms


def run(bench: Bench) -> Iterator[Case]:
    """One case: copying counts bytes read and written, a product 2 n^3 operations, on random numbers."""
    items, n = bench.pick(1 << 30, 1 << 16), bench.pick(8192, 128)
    yield {
        "copy_tb_s": 2 * 4 * items / _copy_ms(items, bench.device) / 1e9,
        "matmul_tflop_s": 2 * n**3 / _matmul_ms(n, bench.device) / 1e9,
        "copied_bytes": 4 * items,
        "matmul_n": n,
    }


def _copy_ms(items: int, device: torch.device) -> float:
    source = torch.randint(-100, 100, (items,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return device_ms([lambda: target.copy_(source)], device)


def _matmul_ms(n: int, device: torch.device) -> float:
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return device_ms([lambda: torch.mm(a, b)] * 4, device)
