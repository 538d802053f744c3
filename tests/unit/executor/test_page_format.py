"""Keys and values of 8 bits: how they are rounded, and that each vector is rounded by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.cpu.kernels import CpuInt8Kernels, CpuKernels
from executor_service.backends.torch_backend.ops.kernels import (
    AttentionShape,
    AttentionWeights,
    Kernels,
    PlainKernels,
)
from executor_service.backends.torch_backend.ops.page_format import (
    LARGEST,
    copy_keys_and_values,
    get,
    plain_cache,
    put,
    rounded,
    token_bytes,
)
from executor_service.backends.torch_backend.ops.row_tensors import Batch
from tests.unit.executor.rows import make_row

CPU = torch.device("cpu")
HEADS, DIM, PAGE = 2, 24, 16
FORMATS = list(LARGEST)
HALF_STEP = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 0.5**4}
"""Largest error: of a vector's largest magnitude in int8, of each number in e4m3."""


def vectors() -> torch.Tensor:
    """Of magnitudes from 1e-12 to 1e12."""
    torch.manual_seed(2)
    return torch.randn(300, HEADS, DIM) * torch.logspace(-12, 12, 300)[:, None, None]


@pytest.mark.parametrize("dtype", FORMATS)
def test_no_number_is_further_from_its_own_than_half_a_step(dtype: torch.dtype) -> None:
    x = vectors().double()
    numbers, scales = rounded(x.float(), dtype)
    error = (numbers.double() * scales[..., None].double() - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    # A scale is up to 1/128 larger than it has to be; the smallest numbers of e4m3 are multiples of 2^-9.
    unit = largest if dtype == torch.int8 else x.abs() + largest * 2**-5 / 448
    assert (error <= unit * HALF_STEP[dtype] * (1 + 1 / 128)).all()
    assert numbers.float().abs().max() <= LARGEST[dtype]
    assert numbers.float().abs().amax(-1).min() >= LARGEST[dtype] * (1 - 1 / 64)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite_has_the_scale_nan_and_harms_no_other(
    bad: float, dtype: torch.dtype
) -> None:
    x = vectors()
    good, expected = rounded(x, dtype)
    x[7, 1, 3] = bad
    numbers, scales = rounded(x, dtype)
    assert scales.isnan().nonzero().tolist() == [[7, 1]]
    others = scales.isfinite()
    assert torch.equal(scales[others], expected[others])
    assert torch.equal(numbers.float()[others], good.float()[others])


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_vector_of_zeros_stays_zero(dtype: torch.dtype) -> None:
    numbers, scales = rounded(torch.zeros(3, 5), dtype)
    assert not numbers.float().any()
    assert (scales > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *FORMATS])
def test_a_page_and_its_copy_give_back_what_was_put(dtype: torch.dtype) -> None:
    cache, (k, v) = plain_cache(4, PAGE, HEADS, DIM, dtype, CPU), vectors()[:200].view(2, 100, HEADS, DIM)
    k, v = (x[40:72] / x.abs().amax() for x in (k, v))
    places = torch.arange(32) // PAGE + 1, torch.arange(32) % PAGE
    put(cache, places, k, v) if dtype in LARGEST else put(cache, places, k.to(dtype), v.to(dtype))
    copy_keys_and_values([cache], 2, 3)
    for table, expected in (([1, 2], slice(0, 32)), ([3], slice(16, 32))):
        for got, x in zip(get(cache, torch.tensor(table), torch.float32), (k, v), strict=True):
            of_format = rounded(x, dtype) if dtype in LARGEST else (x.to(dtype), torch.ones(32, HEADS))
            numbers, scales = (part[expected].float() for part in of_format)
            assert torch.equal(got, numbers * scales[..., None])
    assert cache.nbytes == 4 * PAGE * token_bytes(HEADS, DIM, dtype)


@pytest.mark.parametrize("kind", [CpuKernels, CpuInt8Kernels])
@pytest.mark.parametrize("page_size", [7, 16])
def test_the_cpu_kernels_write_the_same_numbers_and_scales(page_size: int, kind: type[CpuKernels]) -> None:
    """Bit for bit, of what is given to both: nothing is rotated or normed."""
    tokens = 20
    qkv = torch.cat([vectors()[i : i + tokens].flatten(1) for i in (0, 280, 140)], 1)
    qkv[5, 3 * HEADS * DIM - 1] = torch.nan
    angles, none = (torch.ones(99, DIM // 2), torch.zeros(99, DIM // 2)), torch.empty(0)
    w = AttentionWeights(HEADS, HEADS, DIM, 1e-6, *angles, none, none, DIM**-0.5)
    plain = PlainKernels(CPU, torch.float32, cache_dtype=torch.int8)
    every: tuple[Kernels, ...] = kind(1, torch.int8), plain
    ours, theirs = (kernels.new_cache(5, page_size, HEADS, DIM) for kernels in every)
    batch = Batch.of(ForwardRows([make_row(range(tokens), [3, 1, 2])]), page_size, CPU)
    for kernels, cache in zip(every, (ours, theirs), strict=True):
        kernels.attention(qkv.clone(), cache, kernels.prepare(batch, AttentionShape(1, DIM)), w)
    tiles = -(-page_size // 16)
    # K [pages, heads, tiles, dim, 16], V [pages, heads, dim tiles, slots, 16], scales [..., tiles, 2, 16]
    k = ours.k.permute(0, 2, 4, 1, 3).reshape(5, tiles * 16, HEADS, DIM)[:, :page_size]
    v = ours.v.permute(0, 3, 1, 2, 4).reshape(5, page_size, HEADS, -1)[..., :DIM]
    scales = ours.scales.permute(0, 2, 4, 1, 3).reshape(5, tiles * 16, HEADS, 2)[:, :page_size]
    assert torch.equal(k, theirs.k)
    assert torch.equal(v, theirs.v)
    assert scales.isnan().sum() == 1
    assert torch.equal(scales.nan_to_num(), theirs.scales.nan_to_num())
