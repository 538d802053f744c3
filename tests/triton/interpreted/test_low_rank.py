"""The kernels of adapters, interpreted on CPU, add what plain torch adds, whatever rows share a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from executor_service.adapters.weights import LowRankChange, make_weights
from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.cuda.kernels import CudaKernels
from executor_service.backends.torch_backend.cuda.layout.adapted_tokens import AdaptedTokens, tile_tokens
from executor_service.backends.torch_backend.cuda.linear.device_adapters import CudaLowRank
from executor_service.backends.torch_backend.cuda.linear.low_rank import TableChanges
from executor_service.backends.torch_backend.model.shard import Whole
from executor_service.backends.torch_backend.model.slot_adapters import SlotAdapters
from executor_service.backends.torch_backend.ops.kernels import Kernels, PlainKernels
from executor_service.backends.torch_backend.ops.low_rank import (
    AdaptedRows,
    AdapterShape,
    LayerChanges,
    LinearPart,
    PartFactors,
)
from executor_service.backends.torch_backend.ops.quantized import Format, Int8
from executor_service.backends.torch_backend.parallel.cut import Cut
from executor_service.backends.torch_backend.parallel.tensor_shard import TensorShard
from tests.gpu.shapes import spec_of
from tests.support.untyped import present
from tests.unit.executor.rows import make_row

CPU = torch.device("cpu")
RANKS = (1, 3, 16, 17, 32, 40, 100, 256)
LAYER, LAYERS, SCALE = 1, 2, 0.7


def parts_of(inputs: int, **outputs: int) -> list[LinearPart]:
    """A stack of these parts."""
    parts, first = [], 0
    for name, count in outputs.items():
        parts.append(LinearPart(LAYER, f"{name}_proj", inputs, count, first))
        first += count
    return parts


def adapter(kernels: Kernels, parts: Sequence[LinearPart], rank: int, left_out: str = "") -> Any:
    """Packed, with factors that follow from the rank."""
    rng = np.random.default_rng(rank)
    changed = [part for part in parts if part.name != left_out]

    def random(lines: int, columns: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal((lines, columns), np.float32)) * columns**-0.5

    factors = [PartFactors(part, random(rank, part.inputs), random(part.outputs, rank)) for part in changed]
    return present(kernels.low_rank).pack(AdapterShape(LAYERS, rank, changed), SCALE, factors)


def changes(kernels: Kernels, adapters: Sequence[Any], rows: Sequence[tuple[int, int]]) -> LayerChanges:
    """Of rows with (number of the adapter, tokens); -1: none."""
    adapted, first = [], 0
    for number, count in rows:
        if number >= 0:
            adapted.append(AdaptedRows(adapters[number], first, count))
        first += count
    return present(kernels.low_rank).step(adapted, first).of_layer(LAYER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_eight_adapters_and_of_none_are_changed_as_in_plain_torch(dtype: torch.dtype) -> None:
    """Parts that begin within a block of columns, and adapters that leave some out."""
    parts = parts_of(72, q=150, k=20, v=20)
    rows = [(7, 1), (0, 3), (-1, 5), (4, 20), (2, 1), (-1, 1), (5, 1), (1, 2), (6, 1), (3, 2), (4, 1)]
    torch.manual_seed(1)
    x = torch.randn(sum(count for _, count in rows), 72).to(dtype)
    base = torch.randn(len(x), 190).to(dtype)
    results = []
    for kernels in (CudaKernels(CPU, dtype), PlainKernels(CPU, dtype)):
        left_out = ("", "v_proj", "k_proj", "", "", "q_proj", "", "")
        adapters = [adapter(kernels, parts, *each) for each in zip(RANKS, left_out, strict=True)]
        results.append(base.clone())
        changes(kernels, adapters, rows).qkv.add(x, results[-1])
    close = 2e-6 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(*results, atol=close, rtol=close)
    owners = np.repeat([number for number, _ in rows], [count for _, count in rows])
    untouched = torch.from_numpy(owners < 0)
    assert torch.equal(results[0][untouched], base[untouched])
    assert torch.equal(results[0][owners == 5, :150], base[owners == 5, :150])
    assert (results[0] != base).any(1)[~untouched].all()


def test_a_rows_change_is_bitwise_the_same_in_any_company_and_on_any_number_of_processors() -> None:
    kernels, parts = CudaKernels(CPU, torch.bfloat16), parts_of(4200, down=40)
    adapters = [adapter(kernels, parts, rank) for rank in (20, 16)]
    rows = [(0, 1), (1, 9), (0, 17), (-1, 2), (1, 1)]
    torch.manual_seed(2)
    x = torch.randn(30, 4200).bfloat16()  # in three pieces
    base, out = torch.randn(30, 40).bfloat16(), torch.empty(30, 80).bfloat16()
    results = out[:, :40]  # lines lie apart
    results.copy_(base)
    changes(kernels, adapters, rows).down.add(x, results)
    first = 0
    for number, count in rows:
        mine = slice(first, first + count)
        alone = base[mine].clone()
        if number >= 0:
            changes(kernels, adapters, [(number, count)]).down.add(x[mine], alone)
        assert torch.equal(alone, results[mine])
        first += count
    few = base.clone()
    slots = np.repeat([number for number, _ in rows], [count for _, count in rows]).astype(np.int32)
    listed, tiles = tile_tokens(slots)
    padded = np.append(tiles.ravel(), np.full(9, 2**31 - 1, np.int32))  # beyond the count nothing is read
    tile_count = torch.tensor([len(tiles)], dtype=torch.int32)
    tokens = AdaptedTokens(torch.from_numpy(listed), torch.from_numpy(padded), tile_count, processors=1)
    table = torch.stack([one.records for one in adapters])
    TableChanges(tokens, table).of_layer(LAYER).down.add(x, few)
    assert torch.equal(few, results)


class Rank:
    """What a shard asks its group."""

    def __init__(self, rank: int) -> None:
        self.rank, self.ranks, self.timeout_s = rank, 2, 60.0


def test_the_parts_of_two_ranks_are_those_of_the_whole() -> None:
    spec = replace(
        spec_of("Qwen3-0.6B"), layers=2, hidden_size=24, intermediate_size=20, heads=4, kv_heads=2, head_dim=8
    )
    rng, modules = np.random.default_rng(5), ("q_proj", "v_proj", "down_proj")
    changes = [
        LowRankChange(LAYER, name, *(rng.standard_normal(s).astype(np.float32) for s in ((5, k), (n, 5))))
        for name, (k, n) in zip(modules, ((24, 32), (24, 16), (20, 24)), strict=True)
    ]
    weights, x, inner = make_weights(5, SCALE, changes, b""), torch.randn(3, 24), torch.randn(3, 20)
    found = []
    for shard in (Whole(), TensorShard(Rank(0)), TensorShard(Rank(1))):  # type: ignore[arg-type]
        local, own = spec, inner
        if isinstance(shard, TensorShard):
            shard._cut = Cut(spec, shard.rank, 2)
            local, own = shard._cut.local, inner[:, shard.rank * 10 :][:, :10]
        slots = SlotAdapters(local, CudaLowRank(CPU, torch.float32), shard)
        slots.load(3, slots.pack(weights))
        row = make_row([1, 2, 3], [1])
        row.slot = 3
        change = present(slots.changes([row])).of_layer(LAYER)
        qkv, down = torch.zeros(3, (local.heads + 2 * local.kv_heads) * 8), torch.zeros(3, 24)
        change.qkv.add(x, qkv)
        change.down.add(own, down)
        found.append((qkv, down))
    (whole, whole_down), *ranks = found
    parts = [torch.split(qkv, [16, 8, 8], 1) for qkv, _ in ranks]
    torch.testing.assert_close(torch.cat([torch.cat(part, 1) for part in zip(*parts, strict=True)], 1), whole)
    torch.testing.assert_close(ranks[0][1] + ranks[1][1], whole_down)


@pytest.mark.parametrize("form", [None, Int8()], ids=lambda form: type(form).__name__)
def test_layers_of_every_format_add_it_to_what_they_compute(form: Format | None) -> None:
    """Of activations as they are: an input that rounding to 8 or 16 bits loses still counts."""
    ours, theirs = (kind(CPU, torch.bfloat16, form) for kind in (CudaKernels, PlainKernels))
    qkv, gated = parts_of(40, q=33, k=7, v=8), parts_of(40, gate=24, up=24)
    torch.manual_seed(3)
    x = torch.randn(6, 40).bfloat16()
    x[0], x[0, 0] = 1e-6, 1.0
    weights, bias = [torch.randn(part.outputs, 40) / 6 for part in qkv], torch.randn(48)
    gates, added = [torch.randn(24, 40) / 6 for _ in range(2)], torch.randn(6, 48).bfloat16()
    found = []
    for kernels in (ours, theirs):
        adapters = [adapter(kernels, [*qkv, *gated], rank) for rank in (16, 5)]
        change = changes(kernels, adapters, [(0, 2), (-1, 1), (1, 3)])
        found.append([
            kernels.linear(weights, bias)(x, change=change.qkv),
            kernels.linear(weights)(x, add_to=added.clone(), change=change.qkv),
            kernels.gated(gates[0], gates[1])(x, change=change.gated),
        ])  # fmt: skip
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=0.06, rtol=0.04)
    large = torch.full((1, 40), 2.0**17).index_fill_(1, torch.tensor([0]), 0.0)
    factors = [PartFactors(part, large, torch.ones(part.outputs, 1)) for part in qkv]
    packed = present(ours.low_rank).pack(AdapterShape(LAYERS, 1, qkv), SCALE, factors)
    nothing = ours.linear([torch.zeros(48, 40)])
    change = changes(ours, [packed], [(0, 1)])
    expected = torch.full((1, 48), SCALE * 2**17 * float(x[0, 1]) * 39).bfloat16()
    torch.testing.assert_close(nothing(x[:1], change=change.qkv), expected, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_adapter_takes_the_memory_that_is_said_before_it_is_packed(dtype: torch.dtype) -> None:
    kernels, parts = CudaKernels(CPU, dtype), parts_of(45, gate=31, up=31)
    for rank in RANKS:
        shape = AdapterShape(LAYERS, rank, parts)
        assert adapter(kernels, parts, rank).bytes == present(kernels.low_rank).bytes(shape)


def test_factors_that_a_dtype_is_too_narrow_for_are_refused_by_name() -> None:
    parts = parts_of(16, o=16)
    factors = [PartFactors(parts[0], torch.ones(1, 16), torch.full((16, 1), 1e5))]
    with pytest.raises(ModelError, match="o_proj in layer 1 has values that are too large for torch"):
        CudaLowRank(CPU, torch.float16).pack(AdapterShape(LAYERS, 1, parts), 1.0, factors)


def test_an_adapter_that_the_device_has_no_memory_for_is_refused() -> None:
    parts, full = parts_of(16, o=16), mock.Mock(side_effect=torch.OutOfMemoryError)
    with mock.patch.object(torch, "empty", full), pytest.raises(ModelError, match="no 1024 bytes left"):
        CudaLowRank(CPU, torch.bfloat16).pack(AdapterShape(LAYERS, 1, parts), 1.0, [])


def test_copies_wait_for_the_steps_that_had_the_memory_and_are_done_before_a_slot_can_name_it() -> None:
    """Also where reading a factor fails: the memory is then free for others."""
    calls = mock.MagicMock()
    names = ("device", "stream", "Stream", "Event", "default_stream")

    def copy() -> None:
        with CudaLowRank(torch.device("cuda"), torch.float32)._copying():
            calls.copy()
            raise ModelError("a factor")

    watched = mock.patch.multiple(torch.cuda, **{name: getattr(calls, name) for name in names})
    with watched, pytest.raises(ModelError):
        copy()
    stream, steps = calls.Stream.return_value, calls.default_stream.return_value
    in_order = ("wait_stream", "copy", "record", "synchronize")
    assert [call for call in calls.mock_calls if call[0].split(".")[-1] in in_order] == [
        mock.call.Stream().wait_stream(steps), mock.call.copy(), mock.call.Event().record(stream),
        mock.call.Event().synchronize(),
    ]  # fmt: skip
    calls.stream.assert_called_once_with(stream)
