"""Products over weights of 4 bits, interpreted, give what the files' numbers do, whatever rows are beside."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.cuda.kernels import CudaBlockKernels
from executor_service.backends.torch_backend.cuda.linear.packed import (
    FEW_ROWS,
    TILED_ROWS,
    packed_rows_launch,
)
from executor_service.backends.torch_backend.cuda.linear.packed_linear import (
    PackedLinear,
    is_supported,
    pack,
)
from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import new_arrivals
from executor_service.backends.torch_backend.cuda.run import graphs
from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers
from executor_service.backends.torch_backend.ops.kernels import PlainKernels
from tests.model.architectures import config_of
from tests.model.quantized.test_gptq import CONFIG, gptq
from tests.model.quantized.written import write
from tests.triton.interpreted.test_architectures import CPU, PAGE, PAGES, STEPS, loaded, rows_of
from tests.triton.interpreted.test_skinny_gemm import counted

BF16 = torch.bfloat16
KINDS = ("symmetric", "zero points", "minima")


def weight(n: int, k: int, group: int, kind: str = "symmetric") -> ScaledNumbers:
    """Random numbers as files have them: Q4_0 and GPTQ; AWQ; Q4_1 and Q4_K."""
    groups = torch.arange(k) // group
    count = int(groups[-1]) + 1
    codes = torch.randint(0, 16, (n, k), dtype=torch.int8)
    zeros = torch.full((n, count), 8, dtype=torch.int8)
    if kind == "zero points":
        zeros = torch.randint(0, 17, (n, count), dtype=torch.int8)
    if kind == "minima":
        zeros.zero_()
    scales = (0.01 + torch.rand(n, count) / k**0.5).half().float()
    minima = -8 * scales * torch.rand(n, count) if kind == "minima" else None
    return ScaledNumbers(codes - zeros[:, groups], scales, groups, minima)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "k", "group"), [(19, 128, 32), (70, 300, 300), (96, 640, 128), (40, 1090, 64), (33, 480, 96)]
)
def test_packed_numbers_are_those_of_the_file_in_4_bits(kind: str, n: int, k: int, group: int) -> None:
    torch.manual_seed(n)
    parts = [weight(n, k, group, kind), weight(3, k, group, kind)]
    assert all(map(is_supported, parts))
    linear = PackedLinear(parts, None, new_arrivals(CPU))
    expected = torch.cat([part.plain() for part in parts])
    assert torch.equal(linear.unpacked(), expected.to(BF16))
    assert torch.equal(linear.rows(torch.tensor([n, 1])), expected[[n, 1]].to(BF16))
    padded = -(-(n + 3) // 64) * 64 * -(-k // 128) * 128
    scales = 4 * linear.packed.words.numel() * (2 if kind == "minima" else 1)
    assert linear.bytes() == padded // 2 + scales


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "n", "k", "group"),
    [
        (1, 32, 128, 128), (3, 70, 1090, 64), (4, 19, 300, 300), (5, 40, 640, 32), (33, 64, 512, 128),
        (70, 20, 96, 32),
    ],
)  # fmt: skip
def test_products_equal_those_in_fp32_rounded_once(kind: str, rows: int, n: int, k: int, group: int) -> None:
    torch.manual_seed(rows)
    whole = torch.full((rows + 2, k + 7), torch.nan, dtype=BF16)
    whole[:rows, :k] = torch.randn(rows, k)
    x, numbers, arrivals = whole[:rows, :k], weight(n, k, group, kind), new_arrivals(CPU)
    bias = torch.randn(n).to(BF16)
    behind = torch.full((rows + 2, n), 7.0, dtype=BF16)
    out = behind[:rows]
    out.copy_(torch.randn(rows, n))
    expected = (x.double() @ numbers.plain().double().T + bias + out).to(BF16)
    packed_rows_launch(x, pack([numbers], CPU), bias, out, arrivals, add=True).run()
    assert (out == expected).float().mean() > 0.96  # sums between two numbers may be rounded to either
    torch.testing.assert_close(out, expected, rtol=0.008, atol=2e-3)
    assert (behind[rows:] == 7).all()
    assert not arrivals.any()  # as the next launch needs them


@pytest.mark.parametrize(
    ("kind", "rows", "activation"),
    [
        *((kind, 1 + FEW_ROWS, Activation.SILU) for kind in KINDS),
        *(("minima", rows, Activation.CLAMPED) for rows in (1, FEW_ROWS, TILED_ROWS + 1)),
    ],
)
def test_layers_equal_those_of_dequantized_weights(kind: str, rows: int, activation: Activation) -> None:
    torch.manual_seed(rows)
    kernels, k = CudaBlockKernels(CPU, BF16), 512
    parts, bias, x = (
        [weight(n, k, 32, kind) for n in (24, 24)],
        torch.randn(48),
        torch.randn(rows, k).to(BF16),
    )
    plain = [part.plain() for part in parts]
    for add_to in (None, torch.randn(rows, 48).to(BF16)):
        ours, theirs = (
            linear(x, add_to=None if add_to is None else add_to.clone())
            for linear in (kernels.linear(parts, bias), kernels.linear(plain, bias))
        )
        torch.testing.assert_close(ours, theirs, atol=0.06, rtol=0.02)
    ours = kernels.gated(parts[0], parts[1], activation, bias)(x)
    theirs = kernels.gated(plain[0], plain[1], activation, bias)(x)
    torch.testing.assert_close(ours, theirs, atol=0.15, rtol=0.03)


@pytest.mark.parametrize("rows", [FEW_ROWS, 40])
def test_a_row_is_bitwise_the_same_beside_any_others(rows: int) -> None:
    torch.manual_seed(2)
    linear = PackedLinear([weight(40, 640, 32, "minima")], None, new_arrivals(CPU))
    x = torch.randn(rows, 640).to(BF16)
    least = 1 if rows <= FEW_ROWS else FEW_ROWS + 1
    together = linear(x)
    assert torch.equal(linear(x[:least]), together[:least])
    beside = x.flip(0)
    beside[0] = torch.nan
    found = linear(beside)
    assert found[0].isnan().all()
    assert torch.equal(found[1:], together.flip(0)[1:])


@pytest.mark.parametrize("n", [64, 1024, 4096, 24_576])
def test_parts_of_a_product_follow_from_the_layer_alone(n: int) -> None:
    packed = replace(pack([weight(32, 4096, 128)], CPU), n=n)
    arrivals = new_arrivals(torch.device("meta"))
    for every in (range(1, FEW_ROWS + 1), (5, 16, 33, 64, 128)):
        grids = set()
        for rows in every:
            x, out = (torch.empty(rows, size, dtype=BF16, device="meta") for size in (4096, n))
            launch = packed_rows_launch(x, packed, None, out, arrivals)
            part, (blocks, splits, above) = launch.constants["part"], launch.grid
            assert part * splits >= 4096 > part * (splits - 1)
            assert splits == 1 or blocks * above <= len(arrivals)
            assert launch.constants["lines"] * above >= rows
            grids.add((blocks, splits))
        assert len(grids) == 1


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (1, ["_packed_rows_kernel"]),
        (TILED_ROWS, ["_packed_rows_kernel"]),
        (TILED_ROWS + 1, ["_unpack_kernel"]),
    ],
)
def test_the_number_of_rows_decides_which_product_is_launched(rows: int, names: list[str]) -> None:
    linear = CudaBlockKernels(CPU, BF16).linear([weight(32, 64, 32)])
    with counted() as counts:
        linear(torch.randn(rows, 64).to(BF16))
    assert counts == Counter(names)


def test_what_has_no_product_is_dequantized() -> None:
    numbers = weight(8, 96, 32)
    wide = replace(numbers, numbers=numbers.numbers * 2)  # more than 16 levels
    mixed = replace(numbers, groups=numbers.groups.flip(0))
    narrow = weight(8, 96, 16)
    infinite = replace(numbers, scales=numbers.scales / 0)
    fp8 = replace(numbers, numbers=numbers.numbers.to(torch.float8_e4m3fn))
    kernels = CudaBlockKernels(CPU, BF16)
    assert not any(map(kernels.keeps, (wide, mixed, narrow, infinite, fp8)))
    assert kernels.keeps(numbers)
    assert not isinstance(kernels.linear([numbers, weight(8, 96, 32).plain()]), PackedLinear)
    assert not isinstance(kernels.linear([numbers, weight(8, 96, 96)]), PackedLinear)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding is whatever lay in memory
def test_a_model_of_gptq_in_groups_of_32_keeps_its_weights_and_gives_the_logits_of_plain_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In captured steps, of few rows and of more."""
    config = config_of("mistral", "plain", sliding_window=None, hidden_size=64, intermediate_size=128,
                       num_attention_heads=4, head_dim=16, num_hidden_layers=1)  # fmt: skip
    write(config, tmp_path, gptq(group=32), CONFIG | {"group_size": 32})
    plain = loaded(tmp_path, PlainKernels(CPU, BF16), monkeypatch)
    plain.allocate(PAGES, PAGE)
    caplog.clear()
    backend = loaded(tmp_path, CudaBlockKernels(CPU, BF16), monkeypatch)
    assert "no kernel multiplies" not in caplog.text
    model = backend.model
    assert model.bytes() < 0.8 * plain.model.bytes()  # embedding and output layer stay in bf16
    runner = DeviceRunner(model, model.new_caches(PAGES, PAGE), PAGE)
    for field, size in {"_SHORT_TOKENS": (8,), "_LONG_TOKENS": (48,), "_LONG_OUTPUTS": (48,)}.items():
        monkeypatch.setattr(graphs, field, size)
    runner.capture(4, 160, lambda what, done: None)
    for step in STEPS:
        rows = rows_of(step)
        for ours, theirs in zip(runner.launch(ForwardRows(rows)).outputs(), plain.forward(rows), strict=True):
            assert ours.logits is not None
            assert theirs.logits is not None
            assert np.abs(ours.logits - theirs.logits).mean() < 0.02 * theirs.logits.std()
