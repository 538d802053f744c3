"""E1: the linear layers of the 8B shape by dtype and number of rows: weights read per second, and bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

import torch

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers
from executor_service.backends.torch_backend.ops.kernels import Linear, PlainKernels
from executor_service.backends.torch_backend.ops.quantized import Format, Fp8, Int8, QuantizedLinear
from tests.gpu.bench import Bench, Case
from tests.gpu.shapes import linears, spec_of
from tests.gpu.timing import device_ms

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_COLD_BYTES = 400 << 20  # of weights in a round: several times the L2 cache
_INT4 = 128
"""Columns of a group, of weights of 4 bits: as most files of GPTQ and AWQ have them."""
_FORMATS: dict[str, Format | int | None] = {"bfloat16": None, "int8": Int8(), "fp8": Fp8(), "int4": _INT4}
_FASTER = 2  # the rate of products of 8 bits, to that of bf16; a number of two digits takes two


def run(bench: Bench) -> Iterator[Case]:
    """A case for each dtype, layer and number of rows; `fraction` is of the roofline through E0's ceilings.

    Of int8 and fp8 `ms` has the rounding of the rows in it, `product_ms` has not. `bits_of_all`: whether the
    rows' results are those of all rows together. Each is called as in a step: the layers that end a half of a
    block add to the residual in the product itself, and the output layer's results are fp32.
    """
    spec, device = spec_of("Qwen3-8B", dry=bench.dry), bench.device
    for dtype, form in _FORMATS.items():
        for name, (n, k) in linears(spec).items():
            if name == "head" and form is not None:
                continue  # stays wide
            for case in _layer(bench, form, name, n, k):
                yield {"dtype": dtype, "layer": name, **case}
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _layer(bench: Bench, form: Format | int | None, name: str, n: int, k: int) -> Iterator[Case]:
    """form: int: of 4 bits, in groups of so many columns."""
    device, item_bytes = bench.device, 2.0 if form is None else 1.0
    if isinstance(form, int):
        item_bytes = 0.5 + 4 / form
    copies = bench.pick(max(-(-_COLD_BYTES // int(item_bytes * n * k)), 2), 2)
    try:
        linears = [_linear(form, name, n, k, device)]
        linears += [deepcopy(linears[0]) for _ in range(copies - 1)]
        adds = name in ("output", "down")
        counts = bench.pick(_ROWS, (1, 4))
        everything = _random(counts[-1], k, device)
        together = _call(linears[0], everything, n, adds=adds)()
        for rows in counts:
            x = everything[:rows]
            ms = device_ms([_call(linear, x, n, adds=adds) for linear in linears], device)
            moved, flops = item_bytes * n * k + 2 * rows * (n + k), 2 * n * k * rows
            eight = None if isinstance(form, int) else form
            rate = bench.machine.flop_per_s * (1 if eight is None else _FASTER / eight.digits)
            floor_ms = 1e3 * max(moved / bench.machine.bytes_per_s, flops / rate)
            case = {
                "rows": rows,
                "ms": ms,
                "gb_s": moved / ms / 1e6,
                "tflop_s": flops / ms / 1e9,
                "fraction": floor_ms / ms,
                "bits_of_all": torch.equal(_call(linears[0], x, n, adds=adds)(), together[:rows]),
            }
            if eight is not None:
                case["product_ms"] = device_ms([_product(linear, x) for linear in linears], device)
            yield case
    except (RuntimeError, ModelError) as error:  # of this dtype: the others go on
        yield {"rows": 0, "failed": f"{type(error).__name__}: {error}"[:1000]}


def _random(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)


def _linear(form: Format | int | None, name: str, n: int, k: int, device: torch.device) -> Linear:
    """As the backend's kernels make it."""
    if isinstance(form, int):
        return _linear_of_4_bits(n, k, form, device)
    weight = _random(n, k, device) * k**-0.5
    if form is not None:
        form.check(device)
    kernels = PlainKernels(device, torch.bfloat16, form)
    if device.type == "cuda":
        from executor_service.backends.torch_backend.cuda.kernels import CudaKernels

        kernels = CudaKernels(device, torch.bfloat16, form)
    return kernels.head(weight) if name == "head" else kernels.linear([weight])


def _linear_of_4_bits(n: int, k: int, group: int, device: torch.device) -> Linear:
    """Where there is no device, of the same numbers in bf16."""
    numbers = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    groups = torch.arange(k) // min(group, k)
    scales = torch.full((n, int(groups[-1]) + 1), k**-0.5 / 4)
    weight = ScaledNumbers(numbers, scales, groups)
    if device.type != "cuda":
        return PlainKernels(device, torch.bfloat16).linear([weight])
    from executor_service.backends.torch_backend.cuda.kernels import CudaBlockKernels

    return CudaBlockKernels(device, torch.bfloat16).linear([weight])


def _call(linear: Linear, x: torch.Tensor, n: int, *, adds: bool) -> Callable[[], torch.Tensor]:
    if not adds:
        return lambda: linear(x)
    residual = torch.zeros(len(x), n, device=x.device, dtype=x.dtype)
    return lambda: linear(x, add_to=residual)


def _product(linear: Linear, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    assert isinstance(linear, QuantizedLinear)
    rounded, scales = linear.form.round(x)
    return lambda: linear.product(rounded, scales)
