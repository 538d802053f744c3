"""How many kernels a layer launches: the table of docs/devices.md, counted on the fake device."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import MAX_ROWS
from executor_service.backends.torch_backend.ops.quantized import Format, Fp8, Int8
from tests.triton.dry.fake_device import fake_runner
from tests.triton.dry.test_capture import BF16, buffered, shapes
from tests.triton.launch_counts import counted_launches

PAGE = Path(__file__).parents[3] / "docs" / "devices.md"
DENSE, MIXTURE = "Qwen3-8B", "Qwen3-30B-A3B"
KINDS: dict[str, tuple[str, torch.dtype, Format | None, bool]] = {
    "bf16": (DENSE, BF16, None, False),
    "fp16": (DENSE, torch.float16, None, False),
    "fp32": (DENSE, torch.float32, None, False),
    "int8": (DENSE, BF16, Int8(), False),
    "fp8": (DENSE, BF16, Fp8(), False),
    "bf16, steps with adapters": (DENSE, BF16, None, True),
    "mixture of experts, bf16": (MIXTURE, BF16, None, False),
}


def layer(kind: str, tokens: int) -> Counter[str]:
    """What one layer launches in a captured step of so many tokens, by name."""

    def step(layers: int) -> Counter[str]:
        name, dtype, form, adapted = KINDS[kind]
        with counted_launches() as launches:
            model, runner = fake_runner(name, dtype, form, layers=layers, pages=100)
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
    assert layer(kind, MAX_ROWS) == layer(kind, 1)
    assert table().keys() == KINDS.keys()


def test_gates_are_in_the_products_of_few_rows() -> None:
    assert layer("bf16", 1) == {
        "_few_rows_kernel": 4, "_norm_kernel": 2, "_rotary_kernel": 1, "_attention_kernel": 1,
    }  # fmt: skip
