"""Speed of the CPU's fp32 matrix products by how weights are stored, as a ratio to weights in fp32.

usage: python -m tests.bench.stored_weights [--layers 12] [--repeats 15] [--rows 1,4,8,16,32,64,256]
Shapes are those of SmolLM2-135M, its output layer included. One thread; its CPU time is measured, so that a
busy machine disturbs little. The ways take turns. Prints a JSON object for each number of rows:
milliseconds (medians), and the median of each turn's ratio to fp32.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from executor_service.backends.torch_backend.cpu.kernels import CpuKernels
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, Weight

HIDDEN, INNER, QKV, VOCABULARY = 576, 1536, 960, 49_152
GROUP = 64  # columns; divides both sizes of inputs
Store = Callable[[torch.Tensor], Weight]
"""From an fp32 weight [n, k] to what a checkpoint has."""


def scaled(dtype: torch.dtype, largest: float, group: int | None) -> Store:
    """Numbers of 8 bits, with a scale for each row or group of columns."""

    def store(weight: torch.Tensor) -> ScaledNumbers:
        n, k = weight.shape
        parts = weight.view(n, -1, group or k)
        scales = parts.abs().amax(2) / largest
        numbers = (parts / scales[:, :, None]).view(n, k)
        rounded = numbers if dtype.is_floating_point else numbers.round()
        return ScaledNumbers(rounded.to(dtype), scales, torch.arange(k) // (group or k))

    return store


STORES: dict[str, Store] = {
    "fp32": lambda weight: weight,
    "bf16": lambda weight: weight.to(torch.bfloat16),
    "fp16": lambda weight: weight.to(torch.float16),
    "int8": scaled(torch.int8, 127, None),
    "int8 in groups": scaled(torch.int8, 127, GROUP),
    "fp8": scaled(torch.float8_e4m3fn, 448, None),
    "fp8 in groups": scaled(torch.float8_e4m3fn, 448, GROUP),
}

Call = tuple[Callable[[torch.Tensor], torch.Tensor], int]
"""A layer and the size of its inputs."""


def layers_of(kernels: CpuKernels, layers: int, store: Store) -> list[Call]:
    """The linear layers of a model."""

    def drawn(n: int, k: int) -> Weight:
        return store(torch.randn(n, k) * k**-0.5)

    calls: list[Call] = [(kernels.linear([drawn(VOCABULARY, HIDDEN)]), HIDDEN)]
    for _ in range(layers):
        calls += [
            (kernels.linear([drawn(QKV, HIDDEN)]), HIDDEN),
            (kernels.linear([drawn(HIDDEN, HIDDEN)]), HIDDEN),
            (kernels.gated(drawn(INNER, HIDDEN), drawn(INNER, HIDDEN)), HIDDEN),
            (kernels.linear([drawn(HIDDEN, INNER)]), INNER),
        ]
    return calls


def milliseconds(kernels: CpuKernels, calls: list[Call], rows: int) -> float:
    """CPU time of all layers once."""
    inputs = {size: torch.randn(rows, size) for size in (HIDDEN, INNER)}
    begin = time.thread_time()
    with kernels.step():
        for layer, size in calls:
            layer(inputs[size])
    return 1e3 * (time.thread_time() - begin)


def compare(
    kernels: CpuKernels, models: Mapping[str, list[Call]], rows: int, repeats: int
) -> dict[str, object]:
    """One line of the output."""
    times = np.array(
        [[milliseconds(kernels, calls, rows) for calls in models.values()] for _ in range(repeats)]
    )
    medians, ratios = np.median(times, 0), np.median(times[:, :1] / times, 0)
    return {
        "rows": rows,
        "ms": dict(zip(models, medians.round(2).tolist(), strict=True)),
        "speed": dict(zip(models, ratios.round(2).tolist(), strict=True)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", default="1,4,8,16,32,64,256")
    flags = parser.parse_args()
    torch.manual_seed(0)
    kernels = CpuKernels(1)
    models = {name: layers_of(kernels, flags.layers, store) for name, store in STORES.items()}
    for rows in map(int, flags.rows.split(",")):
        print(json.dumps(compare(kernels, models, rows, flags.repeats)), flush=True)
    kernels.close()


if __name__ == "__main__":
    main()
