"""What a layer of a mixture of experts launches."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from executor_service.backends.torch_backend.cuda.linear.experts import sum_experts
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.ops.stacked_experts import StackedExperts
from tests.triton.dry.fake_device import fake_runner
from tests.triton.dry.test_capture import BF16, buffered, shapes
from tests.triton.dry.unlaunched import unlaunched
from tests.triton.launch_counts import counted_launches

NAME = "Qwen3-30B-A3B"
PRODUCTS = ["aten::_grouped_mm"] * 2
MANY = ["_route_kernel", "_place_kernel", "_spread_kernel", "_gated_kernel", "_weigh_kernel"]


def step(layers: int, tokens: int) -> Counter[str]:
    """The launches of a captured step, by kind."""
    with counted_launches() as launches:
        model, runner = fake_runner(NAME, BF16, None, layers=layers, pages=100)
        compute = buffered(runner, next(s for s in shapes(model, runner._tiling) if s.tokens == tokens))
        with launches:
            compute()
        return launches.counts


@pytest.mark.parametrize(
    ("tokens", "experts", "total"),
    [
        (1, ["_route_kernel", "_few_gated_kernel", "_few_down_kernel", "_weigh_kernel"], 12),
        (32, [*MANY, *PRODUCTS], 15),
    ],
)
def test_a_layer_launches_few_kernels_beside_the_products_of_its_experts(
    tokens: int, experts: list[str], total: int, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = step(2, tokens) - step(1, tokens)
    with capsys.disabled():
        print(f"\n{NAME}, {tokens} tokens: {layer.total()} launches a layer")
        for kind, count in sorted(layer.items()):
            print(f"  {count:2}  {kind}")
    assert Counter(experts) <= layer
    assert layer.total() == total


def test_its_kernels_are_compiled_once_for_all_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", torch.zeros)  # nothing is computed: the ends of rows are zeros
    experts = StackedExperts(
        torch.zeros(8, 64, 32).bfloat16(), torch.zeros(8, 32, 32).bfloat16(), Activation.SILU
    )
    with unlaunched() as compiled:
        for tokens in (1, 2, 16, 33, 1000):
            x, shares = torch.zeros(tokens, 32).bfloat16(), torch.zeros(tokens, 2)
            sum_experts(x, shares, torch.zeros(tokens, 2, dtype=torch.int64), experts)
    few = ["_few_gated_kernel", "_few_down_kernel", "_weigh_kernel"]
    assert compiled == Counter([*few, *MANY[1:]])
