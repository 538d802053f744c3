"""`AttentionRows`: a step's rows, and the pieces of work that attention has with them.

The host cuts them (`cut`), for it knows every length; on the device nothing is derived and nothing is read
back, so a CUDA graph that was captured with one step's rows runs another's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int32]

SHORT_TOKENS = 16  # of a short row at most: a decode, or a verify of up to 15 drafts
SPLIT_TOKENS = 512  # keys of a piece of a short row's work
# Lines of a query block's matrix: its tokens times the query heads that share a KV head. fp32, which no
# matrix instruction takes whole, would not fit into the registers with more.
_SHORT_LINES, _LONG_LINES, _LONG_LINES_FP32 = 32, 128, 32
_SHORT_BLOCK = 8  # tokens


class Tiling(NamedTuple):
    """How many tokens of a row are a query block; it follows from the model alone."""

    short: int  # of rows of up to SHORT_TOKENS
    long: int

    @classmethod
    def of(cls, group: int, dtype: torch.dtype) -> Tiling:
        """For `group` query heads that share a KV head, and q of that dtype."""
        long = _LONG_LINES_FP32 if dtype == torch.float32 else _LONG_LINES
        return cls(min(max(_SHORT_LINES // group, 1), _SHORT_BLOCK), max(long // group, 1))


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Rows and work, all int32 on the device of q; -1 in `item_rows`, `merge_rows`, `long_rows`: padding.

    Row r is `q_lens[r]` tokens from `q_starts[r]` of the step's flat tokens. They are the last ones of its
    `kv_lens[r]` keys, which lie in the pages `tables[table_starts[r]:]`. Rows may come in any order.
    """

    tables: torch.Tensor  # pages of all rows, end to end
    table_starts: torch.Tensor  # [rows]
    q_starts: torch.Tensor  # [rows]
    q_lens: torch.Tensor  # [rows]
    kv_lens: torch.Tensor  # [rows], this step's tokens included
    # Short rows: a query block and SPLIT_TOKENS of its keys are an item; a block's items lie side by side.
    item_rows: torch.Tensor  # [items]
    item_firsts: torch.Tensor  # [items]: which of its row's tokens is the block's first
    item_pieces: torch.Tensor  # [items]: which SPLIT_TOKENS of the keys
    # Tokens whose keys are several pieces, which are to be merged.
    merge_rows: torch.Tensor  # [merges]
    merge_tokens: torch.Tensor  # [merges]: which of the row's
    merge_items: torch.Tensor  # [merges]: the first of its items
    # Long rows: a query block and all its keys.
    long_rows: torch.Tensor  # [blocks]
    long_firsts: torch.Tensor  # [blocks]
    most_tokens: int  # of a short row

    def __post_init__(self) -> None:
        for name in self.__slots__:
            tensor = getattr(self, name)
            if isinstance(tensor, torch.Tensor) and (
                tensor.dtype != torch.int32 or not tensor.is_contiguous()
            ):
                raise ValueError(f"{name} has to be int32 and contiguous")


def cut(starts: Ints, counts: Ints, tiling: Tiling, split_tokens: int = SPLIT_TOKENS) -> dict[str, Ints]:
    """Rows that feed `counts` tokens behind `starts` cached ones, [rows] each, and their work.

    What `AttentionRows` wants, but for the tables. A row's items depend on the row alone: so do the sums, and
    their order.
    """
    short = counts <= SHORT_TOKENS
    numbers = np.arange(len(counts), dtype=np.int32)
    rows, firsts, begins = _blocks(numbers[short], counts[short], tiling.short)
    keys = starts[rows] + np.minimum(firsts + tiling.short, counts[rows])  # what the block's last token sees
    items, pieces, item_begins = _spread(-(-keys // split_tokens))
    tokens_of, tokens, _ = _spread(counts[short])
    merged = starts[short][tokens_of] + tokens >= split_tokens
    tokens_of, tokens = tokens_of[merged], tokens[merged]
    long_rows, long_firsts, _ = _blocks(numbers[~short], counts[~short], tiling.long)
    return {
        "q_starts": np.cumsum(counts, dtype=np.int32) - counts,
        "q_lens": counts,
        "kv_lens": starts + counts,
        "item_rows": rows[items],
        "item_firsts": firsts[items],
        "item_pieces": pieces,
        "merge_rows": numbers[short][tokens_of],
        "merge_tokens": tokens,
        "merge_items": item_begins[begins[tokens_of] + tokens // tiling.short],
        # The last blocks of a row see the most keys: they start first.
        "long_rows": long_rows[::-1],
        "long_firsts": long_firsts[::-1],
    }


def _blocks(rows: Ints, counts: Ints, tokens: int) -> tuple[Ints, Ints, Ints]:
    """The row and first token of every block of so many tokens, and where each row's blocks begin."""
    owners, numbers, begins = _spread(-(-counts // tokens))
    return rows[owners], numbers * np.int32(tokens), begins


def _spread(counts: Ints) -> tuple[Ints, Ints, Ints]:
    """i, counts[i] times, for each i; the numbers 0 .. counts[i] - 1 beside them; where each i begins."""
    ends = np.cumsum(counts, dtype=np.int32)
    begins = ends - counts.astype(np.int32)
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return owners, np.arange(len(owners), dtype=np.int32) - begins[owners], begins
