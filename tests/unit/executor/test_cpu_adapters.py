"""Adapters on the CPU kernels: what plain torch adds, for each row alone what it is in any company."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from executor_service.backends.torch_backend.cpu.kernels import CpuInt8Kernels, CpuKernels
from executor_service.backends.torch_backend.ops.kernels import GatedLinear, Kernels, Linear, PlainKernels
from executor_service.backends.torch_backend.ops.low_rank import (
    AdaptedRows,
    AdapterShape,
    LayerChanges,
    LinearPart,
    PartFactors,
)
from tests.support.untyped import present

PLAIN = PlainKernels(torch.device("cpu"), torch.float32)
FP32, INT8 = CpuKernels(2), CpuInt8Kernels(2)
HIDDEN, INNER, LAYER, LAYERS = 40, 52, 1, 2
SCALE = 0.7
# Outputs of queries, keys and values that do and do not begin at multiples of 16.
WIDTHS = [(16, 16, 16), (90, 30, 30), (70, 7, 5)]
GROUPS = [(0, 5, 4), (1, 9, 30), (2, 39, 1), (0, 50, 11)]  # adapter, first token, tokens; of 61


@dataclass(frozen=True)
class Layers:
    """The same weights in some kernels."""

    kernels: Kernels
    qkv: Linear
    gated: GatedLinear

    def __call__(self, x: torch.Tensor, changes: LayerChanges) -> tuple[torch.Tensor, torch.Tensor]:
        with self.kernels.step():
            return self.qkv(x, change=changes.qkv), self.gated(x, change=changes.gated)


def parts_of(widths: tuple[int, int, int]) -> list[LinearPart]:
    parts, first = [], 0
    for name, outputs in zip(("q_proj", "k_proj", "v_proj"), widths, strict=True):
        parts.append(LinearPart(LAYER, name, HIDDEN, outputs, first))
        first += outputs
    gates = [
        LinearPart(LAYER, "gate_proj", HIDDEN, INNER, 0),
        LinearPart(LAYER, "up_proj", HIDDEN, INNER, INNER),
    ]
    return parts + gates


def factors_of(parts: list[LinearPart], rank: int, seed: int, left_out: str = "") -> list[PartFactors]:
    torch.manual_seed(seed)
    return [
        PartFactors(part, torch.randn(rank, part.inputs) * 0.2, torch.randn(part.outputs, rank) * 0.2)
        for part in parts
        if part.name != left_out
    ]


def adapters_of(parts: list[LinearPart]) -> list[list[PartFactors]]:
    """Of different ranks, two of which leave something as it is."""
    return [
        factors_of(parts, 3, 1), factors_of(parts, 16, 2, "k_proj"), factors_of(parts, 33, 3, "gate_proj")
    ]  # fmt: skip


def packed(kernels: Kernels, factors: list[PartFactors]) -> object:
    shape = AdapterShape(LAYERS, len(factors[0].a), [one.part for one in factors])
    return present(kernels.low_rank).pack(shape, SCALE, factors)


def changes_of(kernels: Kernels, adapters: list[object], groups: list[tuple[int, int, int]]) -> LayerChanges:
    rows = [AdaptedRows(adapters[number], first, count) for number, first, count in groups]
    return present(kernels.low_rank).step(rows, 61).of_layer(LAYER)


def layers_of(kernels: Kernels, widths: tuple[int, int, int]) -> Layers:
    torch.manual_seed(0)
    weights = [torch.randn(width, HIDDEN) * 0.1 for width in widths]
    qkv = kernels.linear(weights, torch.randn(sum(widths)))
    return Layers(
        kernels, qkv, kernels.gated(torch.randn(INNER, HIDDEN) * 0.1, torch.randn(INNER, HIDDEN) * 0.1)
    )


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_rows_are_changed_as_plain_torch_changes_them(widths: tuple[int, int, int]) -> None:
    parts, x = parts_of(widths), torch.randn(61, HIDDEN)
    results = []
    for kernels in (FP32, PLAIN):
        adapters = [packed(kernels, factors) for factors in adapters_of(parts)]
        results.append(layers_of(kernels, widths)(x, changes_of(kernels, adapters, GROUPS)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("kernels", [FP32, INT8], ids=["fp32", "int8"])
def test_a_row_is_bitwise_the_same_in_any_company(kernels: CpuKernels, widths: tuple[int, int, int]) -> None:
    layers, x = layers_of(kernels, widths), torch.randn(61, HIDDEN)
    adapters = [packed(kernels, factors) for factors in adapters_of(parts_of(widths))]
    together = layers(x, changes_of(kernels, adapters, GROUPS))
    untouched = layers(x, LayerChanges())
    owners = {token: number for number, first, count in GROUPS for token in range(first, first + count)}
    for token in range(61):
        if token in owners:
            alone = layers(x[token : token + 1], changes_of(kernels, adapters, [(owners[token], 0, 1)]))
        else:
            alone = untouched[0][token : token + 1], untouched[1][token : token + 1]
        for one, many in zip(alone, together, strict=True):
            assert torch.equal(one[0], many[token])


def test_int8_adapters_read_activations_before_they_are_rounded() -> None:
    """One large activation makes all others zero in 16 bits, but not for the adapter."""
    parts = parts_of((16, 16, 16))
    x = torch.full((1, HIDDEN), 1e-6)
    x[0, 0] = 1.0
    factors = [
        PartFactors(
            part, torch.cat([torch.zeros(1, 1), torch.full((1, HIDDEN - 1), 2.0**17)], 1), torch.ones(16, 1)
        )
        for part in parts[:3]
    ]
    qkv = INT8.linear([torch.zeros(16, HIDDEN)] * 3)
    changed = qkv(x, change=changes_of(INT8, [packed(INT8, factors)], [(0, 0, 1)]).qkv)
    torch.testing.assert_close(changed, torch.full((1, 48), SCALE * 2**17 * 1e-6 * (HIDDEN - 1)))


@pytest.mark.parametrize(("a", "b"), [(1e-20, 1e20), (1e20, 1e-20), (3e4, 3e4), (1e-6, 1e-6), (1.0, 0.0)])
def test_factors_that_fp16_can_not_hold_are_scaled(a: float, b: float) -> None:
    (part, *_) = parts_of((16, 16, 16))
    factors = [PartFactors(part, torch.full((1, HIDDEN), a), torch.full((16, 1), b))]
    qkv = INT8.linear([torch.zeros(48, HIDDEN)])
    changed = qkv(torch.ones(1, HIDDEN), change=changes_of(INT8, [packed(INT8, factors)], [(0, 0, 1)]).qkv)
    torch.testing.assert_close(changed[0, :16], torch.full((16,), SCALE * HIDDEN * a * b), rtol=1e-3, atol=0)
    assert not changed[0, 16:].any()


@pytest.mark.parametrize("kernels", [FP32, INT8], ids=["fp32", "int8"])
def test_an_adapter_takes_the_memory_that_is_said_before_it_is_packed(kernels: CpuKernels) -> None:
    for factors in adapters_of(parts_of((70, 7, 5))):
        shape = AdapterShape(LAYERS, len(factors[0].a), [one.part for one in factors])
        adapter = kernels.low_rank.pack(shape, SCALE, factors)
        assert adapter.panels.nbytes + adapter.changes.nbytes == kernels.low_rank.bytes(shape)
