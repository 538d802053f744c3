"""`resolve`: what only the device knows of a step's rows, in Triton kernels before everything else.

A row that follows one of the step before feeds the token that this one emitted last, and starts after the
drafts that this one accepted. The host has derived the step as if all of them were accepted. Here the token
is looked up, positions are set to what they are, and from these follow pages, slots, noise keys and the work
of attention. Tokens are stored in their pages too. Nothing is read back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from executor_service.backends.torch_backend.cuda.layout.row_ends import RowEnds
from executor_service.backends.torch_backend.cuda.layout.rows import ITEM_FIELDS, AttentionRows

_TILE = 256  # tokens, outputs or items of a program
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
# Fields of an item.
_TOKENS, _POSITION, _PIECE, _RUN = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(5)


@dataclass(frozen=True, slots=True)
class HostRows:
    """A step as the host knows it: int32 on the device, views of one buffer.

    A row r is written as r + 1; 0: none. A token of no row is padding: it goes to page 0.
    """

    tokens: torch.Tensor  # [tokens]; the first one of a row that follows another is not read
    positions: torch.Tensor  # [tokens]; as if all drafts of the step before were accepted
    owners: torch.Tensor  # [tokens]: the token's row
    follows: torch.Tensor  # [rows]: the row of the step before that the row follows
    starts: torch.Tensor  # [rows]: positions of their first tokens
    table_starts: torch.Tensor  # [rows]
    tables: torch.Tensor  # all block tables
    outputs: torch.Tensor  # [outputs]: indices of tokens
    seed_lows: torch.Tensor  # [outputs]: halves of the rows' seeds
    seed_highs: torch.Tensor


@dataclass(frozen=True, slots=True)
class Resolved:
    """A step as it is, int32 on the device."""

    tokens: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    pages: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens]
    key_lows: torch.Tensor  # [outputs]: halves of `noise.key`
    key_highs: torch.Tensor


@triton.jit
def _lateness(row, live, follows, starts, lengths):
    """The row that each row follows, or -1; its assumed start; by how much it starts earlier than that."""
    former = tl.load(follows + row, mask=live, other=0) - 1
    following = live & (former >= 0)
    assumed = tl.load(starts + row, mask=following, other=0)
    return former, assumed, assumed - tl.load(lengths + former, mask=following, other=0)


@triton.jit
def _mix64(x):
    """`noise.mix64` of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


_VIEWS = (
    "out_tokens", "out_positions", "out_pages", "out_slots", "key_lows", "key_highs", "tokens", "positions",
    "owners", "follows", "starts", "table_starts", "tables", "outputs", "seed_lows", "seed_highs",
    "token_count", "output_count",
)  # fmt: skip


@triton.jit(do_not_specialize=_VIEWS)
def _resolve_kernel(
    out_tokens, out_positions, out_pages, out_slots, key_lows, key_highs, ids, sampled, lengths,
    tokens, positions, owners, follows, starts, table_starts, tables, outputs, seed_lows, seed_highs,
    token_count, output_count, page_size: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Program (tile): `tile` tokens, and `tile` outputs."""
    begin_kernel()
    index = tl.program_id(0) * tile + tl.arange(0, tile)
    live = index < token_count
    owner = tl.load(owners + index, mask=live, other=0) - 1
    real = live & (owner >= 0)
    former, assumed, late = _lateness(owner, real, follows, starts, lengths)
    position = tl.load(positions + index, mask=real, other=0)
    unknown = real & (former >= 0) & (position == assumed)
    token = tl.load(tokens + index, mask=real, other=0)
    token = tl.where(unknown, tl.load(sampled + former, mask=unknown, other=0), token)
    position -= late
    place = tl.load(table_starts + owner, mask=real, other=0) + position // page_size
    page = tl.load(tables + place, mask=real, other=0)
    slot = position % page_size
    tl.store(ids + page.to(tl.int64) * page_size + slot, token, mask=live)
    tl.store(out_tokens + index, token, mask=live)
    tl.store(out_positions + index, position, mask=live)
    tl.store(out_pages + index, page, mask=live)
    tl.store(out_slots + index, slot, mask=live)

    live = index < output_count
    source = tl.load(outputs + index, mask=live, other=0)
    owner = tl.load(owners + source, mask=live, other=0) - 1
    real = live & (owner >= 0)
    _, _, late = _lateness(owner, real, follows, starts, lengths)
    # The output of position p is the token at index p + 1.
    sampling = tl.load(positions + source, mask=real, other=0) - late + 1
    low = tl.load(seed_lows + index, mask=live, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(seed_highs + index, mask=live, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    key = _mix64((high << 32 | low) + (sampling + 1).to(tl.uint64) * _GOLDEN)
    tl.store(key_lows + index, key.to(tl.uint32).to(tl.int32, bitcast=True), mask=live)
    tl.store(key_highs + index, (key >> 32).to(tl.uint32).to(tl.int32, bitcast=True), mask=live)


_ITEM_VIEWS = (
    "short_items", "short_bounds", "long_items", "long_bounds", "owners", "follows", "starts",
    "short_parts", "long_parts",
)  # fmt: skip


@triton.jit
def _resolve_class(
    items, bounds, parts, index, owners, follows, starts, lengths,
    window: tl.constexpr, split: tl.constexpr, fields: tl.constexpr,
):  # fmt: skip
    """Set the positions of a class of items; those of runs that a block does not see get no tokens."""
    live = index < tl.load(bounds + parts)
    item = items + index * fields
    owner = tl.load(owners + tl.load(item, mask=live, other=0), mask=live, other=0) - 1
    former, _, late = _lateness(owner, live, follows, starts, lengths)
    following = live & (former >= 0)
    tokens = tl.load(item + _TOKENS, mask=following, other=1)
    position = tl.load(item + _POSITION, mask=following, other=0) - late
    piece = tl.load(item + _PIECE, mask=following, other=0)
    seen = piece * split < position + tokens
    if window:
        run = tl.load(item + _RUN, mask=following, other=1)
        seen &= (piece + run) * split > position - (window - 1)
    # Attention stores nothing of an item without tokens.
    tl.store(item + _TOKENS, tl.where(seen, tokens, 0), mask=following)
    tl.store(item + _POSITION, tl.where(seen, position, 1), mask=following)


@triton.jit(do_not_specialize=_ITEM_VIEWS)
def _items_kernel(
    short_items, short_bounds, long_items, long_bounds, owners, follows, starts, lengths,
    short_parts, long_parts, window: tl.constexpr, short_split: tl.constexpr, long_split: tl.constexpr,
    fields: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Program (tile): `tile` items of each class."""
    begin_kernel()
    index = tl.program_id(0) * tile + tl.arange(0, tile)
    _resolve_class(
        short_items, short_bounds, short_parts, index, owners, follows, starts, lengths, window, short_split,
        fields,
    )  # fmt: skip
    _resolve_class(
        long_items, long_bounds, long_parts, index, owners, follows, starts, lengths, window, long_split,
        fields,
    )  # fmt: skip


def resolve(
    rows: HostRows, attention: Iterable[AttentionRows], before: RowEnds, history: TokenPages
) -> Resolved:
    """The step as it is, after the rows of the step `before`; its tokens are then in `history`.

    The items of `attention`, which has those for each window, are changed in place.
    """
    found = new_resolved(len(rows.tokens), len(rows.outputs), rows.tokens.device)
    resolve_launch(found, rows, before, history).run()
    for work in attention:
        items_launch(work, rows, before).run()
    return found


def new_resolved(tokens: int, outputs: int, device: torch.device) -> Resolved:
    """Room for a step of `tokens` tokens and `outputs` outputs."""
    by_token = torch.empty(4, tokens, dtype=torch.int32, device=device)
    by_output = torch.empty(2, outputs, dtype=torch.int32, device=device)
    return Resolved(*by_token.unbind(), *by_output.unbind())


def resolve_launch(found: Resolved, rows: HostRows, before: RowEnds, history: TokenPages) -> Launch:
    """The launch of `resolve` for tokens and outputs."""
    counts = len(rows.tokens), len(rows.outputs)
    return Launch(
        _resolve_kernel,
        (-(-max(counts) // _TILE), 1, 1),
        {
            "out_tokens": found.tokens, "out_positions": found.positions, "out_pages": found.pages,
            "out_slots": found.slots, "key_lows": found.key_lows, "key_highs": found.key_highs,
            "ids": history.ids, "sampled": before.tokens, "lengths": before.lengths,
            **{name: getattr(rows, name) for name in HostRows.__slots__},
            "token_count": counts[0], "output_count": counts[1],
        },
        {"page_size": history.page_size, "tile": _TILE},
        warps=4,
        stages=1,
    )  # fmt: skip


def items_launch(work: AttentionRows, rows: HostRows, before: RowEnds) -> Launch:
    """The launch of `resolve` for the items of one window."""
    short, long = work.short, work.long
    return Launch(
        _items_kernel,
        (-(-max(len(short.items), len(long.items), 1) // _TILE), 1, 1),
        {
            "short_items": short.items, "short_bounds": short.bounds, "long_items": long.items,
            "long_bounds": long.bounds, "owners": rows.owners, "follows": rows.follows,
            "starts": rows.starts, "lengths": before.lengths,
            "short_parts": len(short.bounds) - 1, "long_parts": len(long.bounds) - 1,
        },
        {
            "window": work.window, "short_split": short.cut.split, "long_split": long.cut.split,
            "fields": ITEM_FIELDS, "tile": _TILE,
        },
        warps=4,
        stages=1,
    )  # fmt: skip


class TokenPages:
    """The token ids of all sequences on the device, in `pages` pages of `page_size` each, as in the KV cache.

    A token's id has the page and the slot of its key and value. A row's history is therefore found through
    its block table, with the tokens that the host does not know yet; and what holds for keys and values holds
    for ids: prefix hits share them, forks and copied pages keep them, and rejected drafts are overwritten.
    `resolve` stores them. Those of page 0 are nobody's.
    """

    def __init__(self, pages: int, page_size: int, device: torch.device) -> None:
        self.ids = torch.zeros(pages, page_size, dtype=torch.int32, device=device)

    @property
    def page_size(self) -> int:
        return self.ids.shape[1]

    def copy(self, source: int, target: int) -> None:
        """Copy a page."""
        self.ids[target] = self.ids[source]
