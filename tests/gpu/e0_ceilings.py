"""E0: what this device can do at most: bytes copied and bf16 products, each per second."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.gpu.bench import Bench, Case
from tests.gpu.timing import device_ms, repeated_ms, wall_ms


def run(bench: Bench) -> Iterator[Case]:
    """One case: copying counts bytes read and written, a product 2 n^3 operations, on random numbers.

    `read_tb_s` is that of a sum: a decode step reads its bytes, and writes few. A copy is timed
    outside a graph, in which it would be left to the copy engine, which is slower than the kernel.
    """
    items, n = bench.pick(1 << 30, 1 << 16), bench.pick(8192, 128)
    yield {
        "copy_tb_s": 2 * 4 * items / _copy_ms(items, bench.device) / 1e9,
        "read_tb_s": 4 * items / _read_ms(items, bench.device) / 1e9,
        "matmul_tflop_s": 2 * n**3 / _matmul_ms(n, bench.device) / 1e9,
        "copied_bytes": 4 * items,
        "matmul_n": n,
    }


def _copy_ms(items: int, device: torch.device) -> float:
    source = torch.randint(-100, 100, (items,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    if device.type != "cuda":
        return wall_ms(lambda: target.copy_(source), device, 3)
    return repeated_ms(lambda: target.copy_(source), 10)


def _read_ms(items: int, device: torch.device) -> float:
    source = torch.rand(items, device=device)
    return device_ms([source.sum], device)


def _matmul_ms(n: int, device: torch.device) -> float:
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return device_ms([lambda: torch.mm(a, b)] * 4, device)
