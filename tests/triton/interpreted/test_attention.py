"""Paged attention equals dense attention, reads only what it may, and keeps rows apart to the last bit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.backends.torch_backend.cuda.layout.rows import (
    MAX_CONTEXT,
    SHORT_TOKENS,
    RowWork,
    Tiling,
    cut,
    names_of,
)
from executor_service.backends.torch_backend.ops.page_format import LARGEST
from tests.triton.interpreted.paged import Paged, Row

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def assert_dense(
    paged: Paged, rows: list[Row], split_tokens: int = 512, *, part: int = 512, processors: int = 0
) -> None:
    # Over pages of 8 bits, weights are rounded to bf16 for fp16 too.
    narrow = paged.cache.k.dtype in LARGEST and paged.dtype != torch.float32
    tolerance = TOLERANCE[torch.bfloat16 if narrow else paged.dtype]
    found = paged.attend(rows, split_tokens, part=part, processors=processors)
    for row, out in zip(rows, found, strict=True):
        if row.q_len:
            error = (out.double() - paged.dense(row)).abs().max().item()
            assert error < tolerance, row


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
        (4, 1, 256, torch.bfloat16),
    ],
)
def test_every_dtype_and_group(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    paged = Paged([100, 70, 20], heads, kv_heads, head_dim, dtype=dtype)
    rows = [Row(0, 100, 1), Row(1, 70, 5), Row(2, 20, 20), Row(0, 90, 9)]  # decode, verify, prefill, chunk
    assert_dense(paged, rows, split_tokens=64)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("pages", LARGEST)
def test_pages_of_8_bits(pages: torch.dtype, dtype: torch.dtype) -> None:
    paged = Paged([100, 20], 4, 2, 24, dtype=dtype, pages_dtype=pages)
    assert_dense(paged, [Row(0, 100, 1), Row(0, 90, 5), Row(1, 20, 20)], split_tokens=64)


def test_fp16_sums_up_small_values_of_8_bits() -> None:
    """Whose scales times weights are less than fp16 has."""
    paged = Paged([90], dtype=torch.float16, pages_dtype=torch.int8)
    paged.cache.scales[..., 1] *= 2.0**-20
    paged.q[0] *= 0
    [out] = paged.attend([Row(0, 90, 1)], split_tokens=64)
    expected = (paged.v[0] * 2.0**-20).mean(0).repeat_interleave(2, 0).flatten()
    assert (out.double() - expected.double()).abs().max() < 2.0**-24  # fp16 has multiples of it


@pytest.mark.parametrize("pages", LARGEST)
def test_rows_over_pages_of_8_bits_are_bitwise_the_same_in_any_company_and_chunks(pages: torch.dtype) -> None:
    paged = Paged([90, 30], 2, 1, pages_dtype=pages)
    [whole] = paged.attend([Row(0, 90, 90)])
    parts = paged.attend([Row(1, 30, 1), Row(0, 50, 50), Row(0, 70, 20), Row(1, 30, 20), Row(0, 90, 20)])
    assert torch.equal(torch.cat([parts[1], parts[2], parts[4]]), whole)
    [verified] = paged.attend([Row(0, 90, 6)], split_tokens=64)
    _, decoded = paged.attend([Row(1, 30, 4), Row(0, 87, 1)], split_tokens=64)
    assert torch.equal(decoded[0], verified[2])


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
    part, processors = data.draw(st.sampled_from([(3, 0), (512, 1), (512, 2), (5, 1)]))
    assert_dense(paged, data.draw(st.permutations(rows)), split, part=part, processors=processors)


@pytest.mark.parametrize(("window", "split"), [(1, 64), (20, 64), (64, 64), (65, 48), (100, 512)])
def test_a_window_hides_what_is_before_it(window: int, split: int) -> None:
    paged = Paged([150, 70, 9], heads=4, kv_heads=2, window=window)
    rows = [Row(0, 150, 1), Row(0, 130, 5), Row(1, 70, 70), Row(0, 150, 40), Row(2, 9, 2)]
    assert_dense(paged, rows, split)
    assert_dense(paged, rows, split, part=5, processors=1)


@pytest.mark.parametrize(
    ("window", "cap", "sinks", "dtype", "pages"),
    [
        (0, 1.5, False, torch.float32, None),
        (20, 1.5, False, torch.bfloat16, None),
        (0, 0.0, True, torch.float32, None),
        (20, 0.0, True, torch.bfloat16, None),
        (65, 1.5, True, torch.float32, torch.int8),
    ],
)
def test_scores_are_capped_and_stand_beside_a_sink(
    window: int, cap: float, sinks: bool, dtype: torch.dtype, pages: torch.dtype | None
) -> None:
    """In one piece and in several; each token's bits are those that it has alone."""
    paged = Paged([150, 70, 9], 4, 2, dtype=dtype, window=window, pages_dtype=pages, cap=cap, sinks=sinks)
    rows = [Row(0, 150, 1), Row(0, 130, 5), Row(1, 70, 70), Row(0, 150, 40), Row(2, 9, 2)]
    assert_dense(paged, rows)
    assert_dense(paged, rows, 64, part=5, processors=1)
    [verified] = paged.attend([Row(0, 133, 6)], split_tokens=64)
    for i in (0, 1, 2, 5):
        [decoded] = paged.attend([Row(0, 128 + i, 1)], split_tokens=64)
        assert torch.equal(decoded[0], verified[i])


@pytest.mark.parametrize("window", [20, 70])
def test_pages_before_a_window_are_not_read(window: int) -> None:
    paged = Paged([150], window=window)
    for row in (Row(0, 150, 1), Row(0, 150, 4), Row(0, 150, 20)):
        expected = paged.attend([row], split_tokens=64)[0]
        before = (row.kv_len - row.q_len - window + 1) // 64 * 64 // 16  # tiles have up to 64 keys
        paged.table[0, :before] = -(2**20)
        assert torch.equal(paged.attend([row], split_tokens=64)[0], expected)
        paged = Paged([150], window=window)


@pytest.mark.parametrize("window", [0, 50])
def test_a_row_is_bitwise_the_same_in_any_company(window: int) -> None:
    lengths = [150, 30, 70]
    paged, wide = Paged(lengths, 2, 1, window=window), Paged(lengths, 2, 1, width=30, window=window)
    for mine in (Row(0, 150, 1), Row(0, 150, 4), Row(0, 150, 20)):  # decode, verify, chunk
        [alone] = paged.attend([mine], split_tokens=64)
        together = wide.attend([Row(1, 30, 1), Row(2, 70, 6), mine, Row(1, 30, 20)], split_tokens=64)
        assert torch.equal(together[2], alone)


@pytest.mark.parametrize("window", [0, 6, 66])
def test_a_verified_token_is_bitwise_the_decoded_one(window: int) -> None:
    paged = Paged([133], heads=8, kv_heads=1, window=window)
    [verified] = paged.attend([Row(0, 133, 6)], split_tokens=64)
    for i in (0, 1, 2, 5):
        [decoded] = paged.attend([Row(0, 128 + i, 1)], split_tokens=64)
        assert torch.equal(decoded[0], verified[i])


@pytest.mark.parametrize("window", [0, 30])
def test_a_prompt_is_bitwise_the_same_however_it_is_cut_into_long_chunks(window: int) -> None:
    paged = Paged([150], window=window)
    [whole] = paged.attend([Row(0, 150, 150)])
    first, parts = 0, []
    for count in (17, 53, 60, 20):
        first += count
        parts += paged.attend([Row(0, first, count)])
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("window", [0, 40])
def test_a_row_that_starts_earlier_than_assumed_is_bitwise_the_same(window: int) -> None:
    """It has items of keys that it does not reach: short and long rows, of one piece and of several."""
    paged = Paged([200, 130, 64, 100], page_size=16, window=window)
    rows = [Row(0, 130, 5), Row(1, 128, 40), Row(2, 64, 1), Row(3, 65, 20)]
    expected = paged.attend(rows, split_tokens=64)
    found = paged.attend(rows, split_tokens=64, late=[64, 1, 30, 0], processors=2, part=7)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_padding_changes_nothing() -> None:
    paged = Paged([70, 9, 20])
    rows = [Row(0, 70, 1), Row(1, 9, 0), Row(2, 20, 20), Row(0, 70, 4)]
    for plain, padded in zip(paged.attend(rows, 32), paged.attend(rows, 32, spare=2, padding=3), strict=True):
        assert torch.equal(plain, padded)


@pytest.mark.parametrize("window", [0, 70])
def test_neither_parts_nor_the_number_of_programs_change_a_bit(window: int) -> None:
    """Programs that do several items end in another order, so that another one merges a block."""
    paged = Paged([150, 130, 70], window=window)
    rows = [Row(0, 150, 1), Row(1, 130, 4), Row(2, 70, 40), Row(0, 140, 20)]
    expected = paged.attend(rows, 32)
    for part, processors in ((5, 0), (7, 1), (512, 1), (512, 2), (512, 5)):
        for plain, other in zip(
            expected, paged.attend(rows, 32, part=part, processors=processors), strict=True
        ):
            assert torch.equal(plain, other)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("late", [(), (0, 40, 3, 0)])
def test_how_pieces_are_shared_out_changes_no_bit(window: int, late: tuple[int, ...]) -> None:
    """One piece an item, runs of some, and whole blocks, whose results are never stored in between."""
    paged = Paged([150, 130, 70], window=window)
    rows = [Row(0, 150, 1), Row(1, 130, 4), Row(2, 70, 40), Row(0, 140, 20)]
    expected = paged.attend(rows, 32)
    for busy, part, processors in ((9, 512, 2), (4, 7, 0), (3, 512, 1), (1, 512, 0)):
        found = paged.attend(rows, 32, part=part, processors=processors, busy=busy, late=late)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True)), busy


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 300)), min_size=1, max_size=20),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.integers(1, 17),
    st.sampled_from([0, 1, 700, 2100]),
    st.sampled_from([1, 3, 10, 1000]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_items_hold_each_key_that_a_token_sees_once_and_no_part_is_too_large(
    rows: list[tuple[int, int]], dtype: torch.dtype, group: int, window: int, busy: int
) -> None:
    starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    tiling = Tiling.of(group, dtype)
    tiling = Tiling(
        tiling.short._replace(part=14, busy=busy), tiling.long._replace(part=9, busy=busy), (window,)
    )
    arrays = cut(starts, counts, np.arange(len(rows), dtype=np.int32) * 1000, tiling)
    flat = np.cumsum(counts) - counts
    covered: dict[tuple[int, int], list[int]] = {}
    for name, how in tiling.classes:
        items, bounds = (arrays[key] for key in names_of(name, window))
        runs, room = items[: bounds[-1]].tolist(), items[bounds[-1] :]
        assert bounds[0] == 0
        assert not room.any()
        assert len(items) == sum(run for *_, run, _ in runs)
        blocks = [item[:4] for item in runs]
        assert all(bound in (0, len(runs)) or blocks[bound] != blocks[bound - 1] for bound in bounds)
        for begin, end in pairwise(bounds):
            taken = [slot + i for *_, run, slot in runs[begin:end] for i in range(run)]
            assert taken == list(range(len(taken)))
            assert len(taken) <= how.part
        for first, tokens, position, table, first_piece, run, _ in runs:
            row = table // 1000
            assert 0 < tokens <= how.block
            assert (position - starts[row], (counts[row] <= SHORT_TOKENS)) == (
                first - flat[row],
                name == "short",
            )
            for piece in range(first_piece, first_piece + run):
                assert piece * how.split < position + tokens
                assert not window or (piece + 1) * how.split > position - window + 1  # some key is seen
                for token in range(tokens):
                    covered.setdefault((row, position + token), []).append(piece)
    for row, (start, count) in enumerate(rows):
        for position in range(start, start + count):
            pieces, split = (
                covered.pop((row, position)),
                (tiling.short if count <= SHORT_TOKENS else tiling.long).split,
            )
            first_seen = max(position - window + 1, 0) if window else 0
            assert pieces == list(range(pieces[0], pieces[-1] + 1))
            assert pieces[0] * split <= first_seen
            assert (pieces[-1] + 1) * split > position
    assert not covered


@pytest.mark.parametrize("count", [1, 100])
def test_the_longest_context_fits_into_one_launch_and_what_does_not_is_refused(count: int) -> None:
    fed, cached = np.array([count], np.int32), np.array([MAX_CONTEXT - count], np.int32)
    tiling = Tiling.of(4, torch.bfloat16)
    cut(cached, fed, np.zeros(1, np.int32), tiling)
    pieces = MAX_CONTEXT // (tiling.short if count == 1 else tiling.long).split
    small = Tiling(*(how._replace(part=pieces - 1) for _, how in tiling.classes))
    with pytest.raises(ValueError, match=f"{pieces} pieces .* above the {pieces - 1} of a launch"):
        cut(cached, fed, np.zeros(1, np.int32), small)


def test_what_the_kernel_does_not_take_is_refused() -> None:
    paged = Paged([8], heads=2, head_dim=258)
    with pytest.raises(ValueError, match="head_dim 258"):
        paged.attend([Row(0, 8, 1)])
    paged = Paged([8], heads=5)
    with pytest.raises(ValueError, match="5 query heads"):
        paged.attend([Row(0, 8, 1)])
    how = Tiling.of(1, torch.float32).short
    items, bounds = torch.ones(1, 7, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="bounds"):
        RowWork(items, bounds.long(), how)
    with pytest.raises(ValueError, match=r"items .* contiguous"):
        RowWork(torch.ones(5, 3, dtype=torch.int32).T, bounds, how)
