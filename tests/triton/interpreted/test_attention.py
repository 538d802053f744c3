"""Paged attention equals dense attention, reads only what it may, and keeps rows apart to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.backends.torch_backend.cuda.rows import AttentionRows
from tests.triton.interpreted.paged import Paged, Row

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def assert_dense(paged: Paged, rows: list[Row], split_tokens: int = 512) -> None:
    for row, out in zip(rows, paged.attend(rows, split_tokens), strict=True):
        if row.q_len:
            error = (out.double() - paged.dense(row)).abs().max().item()
            assert error < TOLERANCE[paged.dtype], row


@pytest.mark.parametrize("page_size", [1, 7, 16, 32])
def test_rows_that_end_at_and_around_page_and_piece_borders(page_size: int) -> None:
    lengths = [1, page_size, page_size + 1, 63, 64, 65, 129]
    paged = Paged(lengths, heads=2, kv_heads=1, page_size=page_size)
    assert_dense(paged, [Row(i, n, min(1 + i % 3, n)) for i, n in enumerate(lengths)], split_tokens=64)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (4, 1, 128, torch.bfloat16),
        (6, 2, 64, torch.float16),
        (7, 1, 64, torch.bfloat16),
        (2, 2, 64, torch.float32),
        (16, 1, 24, torch.float16),
    ],
)
def test_every_dtype_and_group(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    paged = Paged([100, 70, 20], heads, kv_heads, head_dim, dtype=dtype)
    rows = [Row(0, 100, 1), Row(1, 70, 5), Row(2, 20, 20), Row(0, 90, 9)]  # decode, verify, prefill, chunk
    assert_dense(paged, rows, split_tokens=64)


def test_more_query_heads_to_a_kv_head_than_a_matrix_has_lines() -> None:
    assert_dense(Paged([11, 20], 40, 1, 10), [Row(0, 11, 2), Row(1, 20, 9)])


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.data())
def test_any_mix_of_rows(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=3))
    kv_heads, group = data.draw(st.sampled_from([(1, 4), (2, 3), (2, 1)]))
    page_size, split = data.draw(st.sampled_from([3, 8, 16])), data.draw(st.sampled_from([48, 64, 512]))
    paged = Paged(lengths, kv_heads * group, kv_heads, 16, page_size)
    asked = [min(n, data.draw(st.sampled_from([1, 2, 5, 8, 9, n]))) for n in lengths]
    rows = [Row(i, n, q) for i, (n, q) in enumerate(zip(lengths, asked, strict=True))]
    assert_dense(paged, data.draw(st.permutations(rows)), split)


def test_a_row_is_bitwise_the_same_in_any_company() -> None:
    lengths = [150, 30, 70]
    paged, wide = Paged(lengths, 2, 1), Paged(lengths, 2, 1, width=30)
    for mine in (Row(0, 150, 1), Row(0, 150, 4), Row(0, 150, 20)):  # decode, verify, chunk
        [alone] = paged.attend([mine], split_tokens=64)
        together = wide.attend([Row(1, 30, 1), Row(2, 70, 6), mine, Row(1, 30, 20)], split_tokens=64)
        assert torch.equal(together[2], alone)


def test_a_verified_token_is_bitwise_the_decoded_one() -> None:
    paged = Paged([133], heads=8, kv_heads=1)
    [verified] = paged.attend([Row(0, 133, 6)], split_tokens=64)
    for i in (0, 1, 2, 5):
        [decoded] = paged.attend([Row(0, 128 + i, 1)], split_tokens=64)
        assert torch.equal(decoded[0], verified[i])


def test_a_prompt_is_bitwise_the_same_however_it_is_cut_into_long_chunks() -> None:
    paged = Paged([150])
    [whole] = paged.attend([Row(0, 150, 150)])
    first, parts = 0, []
    for count in (17, 53, 60, 20):
        first += count
        parts += paged.attend([Row(0, first, count)])
    assert torch.equal(torch.cat(parts), whole)


def test_padding_changes_nothing() -> None:
    paged = Paged([70, 9, 20])
    rows = [Row(0, 70, 1), Row(1, 9, 0), Row(2, 20, 20), Row(0, 70, 4)]
    for plain, padded in zip(paged.attend(rows, 32), paged.attend(rows, 32, spare=2, padding=3), strict=True):
        assert torch.equal(plain, padded)


def test_a_nan_stays_in_its_own_row() -> None:
    paged = Paged([70, 70])
    for pages in (paged.k_pages, paged.v_pages):
        pages[paged.table[0, 2], 3] = torch.nan
    outs = paged.attend([Row(0, 70, 2), Row(1, 70, 2), Row(0, 33, 9)], split_tokens=32)
    assert outs[0].isnan().all()
    assert outs[1].isfinite().all()
    assert outs[2].isfinite().all()  # it ends before the NaN


def test_what_the_kernel_does_not_take_is_refused() -> None:
    paged = Paged([8], heads=2, head_dim=130)
    with pytest.raises(ValueError, match="head_dim 130"):
        paged.attend([Row(0, 8, 1)])
    paged = Paged([8], heads=5)
    with pytest.raises(ValueError, match="5 query heads"):
        paged.attend([Row(0, 8, 1)])
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="kv_lens"):
        AttentionRows(one, one, one, one, one.long(), *[one] * 8, max_short_tokens=1)  # type: ignore[arg-type,misc]
    scattered: list[Any] = [torch.ones(3, 2, dtype=torch.int32)[:, 0]] * 13
    with pytest.raises(ValueError, match="contiguous"):
        AttentionRows(*scattered, max_short_tokens=1)  # type: ignore[misc]
