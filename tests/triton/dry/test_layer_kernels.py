"""How many kernels a layer launches: the table of docs/devices.md, counted on the fake device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from executor_service.backends.torch_backend.cuda import kernels as kernels_of_cuda
from executor_service.backends.torch_backend.cuda.linear import packed_linear
from executor_service.backends.torch_backend.cuda.linear.packed import TILED_ROWS, PackedWeight
from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import MAX_ROWS, NARROW_ROWS
from executor_service.backends.torch_backend.ops.quantized import Format, Fp8, Int8
from tests.triton.dry import fake_device
from tests.triton.dry.test_capture import BF16, buffered, shapes
from tests.triton.launch_counts import counted_launches

PAGE = Path(__file__).parents[3] / "docs" / "devices.md"
DENSE, MIXTURE = "Qwen3-8B", "Qwen3-30B-A3B"
PACKED = "4 bits (`blocks`)"
KINDS: dict[str, tuple[str, torch.dtype, Format | None, bool]] = {
    "bf16": (DENSE, BF16, None, False),
    "fp16": (DENSE, torch.float16, None, False),
    "fp32": (DENSE, torch.float32, None, False),
    "int8": (DENSE, BF16, Int8(), False),
    "fp8": (DENSE, BF16, Fp8(), False),
    PACKED: (DENSE, BF16, None, False),
    "bf16, steps with adapters": (DENSE, BF16, None, True),
    "mixture of experts, bf16": (MIXTURE, BF16, None, False),
}


def packed(parts: Sequence[torch.Tensor], device: torch.device) -> PackedWeight:
    """Of parts of this size, without numbers; in groups of 128."""
    n, k = sum(map(len, parts)), parts[0].shape[1]
    codes = torch.empty(n // 64, k // 128, 64, 64, dtype=torch.uint8, device=device)
    return PackedWeight(n, k, 128, 1, codes, torch.empty(n // 64, k // 128, 64, device=device), None)


def layer(kind: str, tokens: int) -> Counter[str]:
    """What one layer launches in a captured step of so many tokens, by name."""

    def step(layers: int) -> Counter[str]:
        name, dtype, form, adapted = KINDS[kind]
        kernels = kernels_of_cuda.CudaBlockKernels if kind == PACKED else kernels_of_cuda.CudaKernels
        with (
            mock.patch.object(fake_device, "CudaKernels", kernels),
            mock.patch.object(kernels_of_cuda, "alike", list),
            mock.patch.object(packed_linear, "pack", packed),
            counted_launches() as launches,
        ):
            model, runner = fake_device.fake_runner(name, dtype, form, layers=layers, pages=100)
            every = shapes(model, runner._tiling)
            found = (s for s in every if s.tokens == tokens and bool(s.adapted_tiles) == adapted)
            compute = buffered(runner, next(found))
            with launches:
                compute()
            return launches.counts

    return step(2) - step(1)


def table() -> dict[str, tuple[int, int]]:
    """Of the page: kernels of up to MAX_ROWS tokens and of more, by kind."""
    text = PAGE.read_text()
    begin = text.index(f"| kernels of a layer | up to {MAX_ROWS} tokens | more |")
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \|$", text[begin:].split("\n\n")[0], re.MULTILINE)
    return {kind: (int(few), int(more)) for kind, few, more in rows}


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_says_how_many_kernels_a_layer_has(kind: str) -> None:
    assert (layer(kind, 1).total(), layer(kind, 128).total()) == table()[kind]
    narrow = kind in ("bf16", "fp16")
    assert layer(kind, NARROW_ROWS if narrow else MAX_ROWS) == layer(kind, 1)
    assert table().keys() == KINDS.keys()


def test_gates_are_in_the_products_of_few_rows() -> None:
    assert layer("bf16", 1) == {
        "_few_rows_kernel": 4, "_norm_kernel": 2, "_rotary_kernel": 1, "_attention_kernel": 1,
    }  # fmt: skip


def test_weights_of_4_bits_are_dequantized_before_products_of_many_tokens() -> None:
    found = layer(PACKED, 2 * TILED_ROWS)
    assert (found["_unpack_kernel"], found.total()) == (4, 4 + table()["bf16"][1])
