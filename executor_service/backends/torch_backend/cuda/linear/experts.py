"""`SumExperts` in Triton: four launches beside the two grouped products, not fourteen as in plain torch.

Up to MAX_ROWS tokens of 16 bits have the products of `few_experts`, and three launches in all. Integers alone
decide where a row lies among the others, and a token's experts are added up in their order: a row's result
does not depend on the other rows, as far as the grouped products' do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from executor_service.backends.torch_backend.cuda.linear.few_experts import few_experts
from executor_service.backends.torch_backend.cuda.linear.pointwise import gated
from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import MAX_ROWS
from executor_service.backends.torch_backend.ops.stacked_experts import StackedExperts, grouped_product

_PAIRS = 2048  # that a program looks at, at once
_COLUMNS = 512  # of a row, per program


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """A row for each pair of a token and one of its experts: sorted by expert, then by token."""

    rows: torch.Tensor  # [pairs, hidden]: of the pair's token
    ends: torch.Tensor  # int32 [experts]: of each expert's rows
    places: torch.Tensor  # int32 [tokens, experts of a token]: among the rows

    @classmethod
    def empty(cls, x: torch.Tensor, chosen: torch.Tensor, experts: int) -> ExpertGroups:
        """Of `experts` experts, without contents."""
        pairs, device, numbers = chosen.numel(), x.device, torch.int32
        return cls(
            torch.empty(pairs, x.shape[1], dtype=x.dtype, device=device),
            torch.empty(experts, dtype=numbers, device=device),
            torch.empty(chosen.shape, dtype=numbers, device=device),
        )


@triton.jit(do_not_specialize=("pairs",))
def _place_kernel(chosen, places, ends, pairs, scan: tl.constexpr):
    """Program (expert): where its rows end, and each one's place, from all pairs, `scan` at a time."""
    begin_kernel()
    expert, experts = tl.program_id(0), tl.num_programs(0)
    next_pairs = tl.arange(0, scan)
    before, own = tl.zeros([scan], tl.int32), tl.zeros([scan], tl.int32)
    for first in range(0, pairs, scan):
        pair = first + next_pairs
        number = tl.load(chosen + pair, mask=pair < pairs, other=experts).to(tl.int32)
        before += (number < expert).to(tl.int32)
        own += (number == expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(ends + expert, place + tl.sum(own, 0))
    for first in range(0, pairs, scan):
        pair = first + next_pairs
        number = tl.load(chosen + pair, mask=pair < pairs, other=experts).to(tl.int32)
        is_own = (number == expert).to(tl.int32)
        tl.store(places + pair, place + tl.cumsum(is_own, 0) - 1, mask=is_own == 1)
        place += tl.sum(is_own, 0)


@triton.jit
def _spread_kernel(
    x, places, rows, x_stride, count: tl.constexpr, width: tl.constexpr, columns: tl.constexpr
):  # fmt: skip
    """Program (token, block of columns): a copy of the token's row for each of its experts."""
    begin_kernel()
    token, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * columns + tl.arange(0, columns)
    mask = d < width
    row = tl.load(x + token * x_stride + d, mask=mask)
    for i in tl.static_range(count):
        place = tl.load(places + token * count + i).to(tl.int64)
        tl.store(rows + place * width + d, row, mask=mask)


@triton.jit
def _weigh_kernel(
    rows, places, shares, out,
    count: tl.constexpr, width: tl.constexpr, placed: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Program (token, block of columns): the rows of its experts times their shares, added up in fp32.

    Without `placed` rows are in the order of pairs.
    """
    begin_kernel()
    token, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * columns + tl.arange(0, columns)
    mask = d < width
    total = tl.zeros([columns], tl.float32)
    for i in tl.static_range(count):
        pair = token * count + i
        place = pair
        if placed:
            place = tl.load(places + pair).to(tl.int64)
        row = tl.load(rows + place * width + d, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(shares + pair) * row
    tl.store(out + token * width + d, total.to(out.dtype.element_ty), mask=mask)


def sum_experts(
    x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, experts: StackedExperts
) -> torch.Tensor:
    """As `stacked_experts.sum_experts`; x has contiguous columns, and shares and chosen are contiguous."""
    if len(x) <= MAX_ROWS and x.dtype != torch.float32:
        rows, places = few_experts(x, chosen, experts), None
    else:
        groups = ExpertGroups.empty(x, chosen, len(experts.down))
        for launch in group_launches(x, chosen, groups):
            launch.run()
        both = grouped_product(groups.rows, experts.gate_up, groups.ends)
        rows = grouped_product(gated(both, experts.activation), experts.down, groups.ends)
        places = groups.places
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    weigh_launch(rows, places, shares, out).run()
    return out


def group_launches(x: torch.Tensor, chosen: torch.Tensor, groups: ExpertGroups) -> Iterator[Launch]:
    """The launches that fill the groups: first where rows lie, then the rows."""
    tokens, width = x.shape
    yield Launch(
        _place_kernel,
        (len(groups.ends), 1, 1),
        {"chosen": chosen, "places": groups.places, "ends": groups.ends, "pairs": chosen.numel()},
        {"scan": _PAIRS},
        warps=8,
        stages=1,
    )
    yield Launch(
        _spread_kernel,
        (tokens, -(-width // _COLUMNS), 1),
        {"x": x, "places": groups.places, "rows": groups.rows, "x_stride": x.stride(0)},
        {"count": chosen.shape[1], "width": width, "columns": _COLUMNS},
        warps=4,
        stages=1,
    )


def weigh_launch(
    rows: torch.Tensor, places: torch.Tensor | None, shares: torch.Tensor, out: torch.Tensor
) -> Launch:
    """The launch of the weighted sum: rows [pairs, hidden] and out [tokens, hidden], contiguous.

    places: of each pair's row, as in `ExpertGroups`; None: rows are in the order of pairs.
    """
    tokens, width = out.shape
    return Launch(
        _weigh_kernel,
        (tokens, -(-width // _COLUMNS), 1),
        {"rows": rows, "places": rows if places is None else places, "shares": shares, "out": out},
        {
            "count": shares.shape[1], "width": width, "placed": int(places is not None),
            "columns": _COLUMNS,
        },
        warps=4,
        stages=1,
    )  # fmt: skip
