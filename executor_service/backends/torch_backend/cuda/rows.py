"""`AttentionRows`: the rows of a step, and the items of work into which attention is cut.

The host cuts (`cut`), since it knows every length. The device derives nothing and reads nothing back, so a
CUDA graph captured with the rows of one step can be replayed with those of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int32]

SHORT_TOKENS = 16
"""A short row feeds at most this many tokens: a decode, or a verification of up to 15 drafts."""
SPLIT_TOKENS = 512
"""Keys of one item of a short row."""
# Lines of a query block's matrix: its tokens times the query heads that share a KV head. In fp32, for which
# there are no full matrix instructions, more would not fit into the registers.
_SHORT_LINES, _LONG_LINES, _LONG_LINES_FP32 = 32, 128, 32
_MAX_SHORT_BLOCK = 8  # tokens of a short row's query block


class Tiling(NamedTuple):
    """Tokens per query block; they follow from the model alone."""

    short: int  # in short rows
    long: int  # in all others

    @classmethod
    def of(cls, group: int, dtype: torch.dtype) -> Tiling:
        """For `group` query heads that share a KV head, and q of this dtype."""
        long = _LONG_LINES_FP32 if dtype == torch.float32 else _LONG_LINES
        return cls(min(max(_SHORT_LINES // group, 1), _MAX_SHORT_BLOCK), max(long // group, 1))


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Rows and items of work, int32 on the device of q.

    In `item_rows`, `merge_rows` and `long_rows`, -1 is padding.

    Row r has `q_lens[r]` tokens of the step's flat tokens, from index `q_starts[r]` on. They are the last of
    its `kv_lens[r]` keys, which are in the pages `tables[table_starts[r]:]`. Rows may be in any order.

    Raises ValueError for a tensor that is not int32 or not contiguous.
    """

    tables: torch.Tensor  # block tables of all rows, concatenated
    table_starts: torch.Tensor  # [rows]
    q_starts: torch.Tensor  # [rows]
    q_lens: torch.Tensor  # [rows]
    kv_lens: torch.Tensor  # [rows], this step's tokens included
    # Short rows: an item is a query block with SPLIT_TOKENS of its keys. A block's items are consecutive.
    item_rows: torch.Tensor  # [items]
    item_firsts: torch.Tensor  # [items]: index in the row of the block's first token
    item_pieces: torch.Tensor  # [items]: which piece of the keys, counted from 0
    # Tokens of short rows whose keys are in several items, so that their results have to be merged.
    merge_rows: torch.Tensor  # [merges]
    merge_tokens: torch.Tensor  # [merges]: index of the token in its row
    merge_items: torch.Tensor  # [merges]: the first item of the token's block
    # Long rows: a query block with all its keys.
    long_rows: torch.Tensor  # [blocks]
    long_firsts: torch.Tensor  # [blocks]: index in the row of the block's first token
    max_short_tokens: int  # of any short row

    def __post_init__(self) -> None:
        for name in self.__slots__:
            tensor = getattr(self, name)
            if isinstance(tensor, torch.Tensor) and (
                tensor.dtype != torch.int32 or not tensor.is_contiguous()
            ):
                raise ValueError(f"{name} has to be int32 and contiguous")


def cut(starts: Ints, counts: Ints, tiling: Tiling, split_tokens: int = SPLIT_TOKENS) -> dict[str, Ints]:
    """The fields of `AttentionRows` but the tables, for rows with `starts` cached and `counts` new tokens.

    starts, counts: [rows]. A row's items depend on the row alone, hence also its sums and their order.
    """
    short = counts <= SHORT_TOKENS
    numbers = np.arange(len(counts), dtype=np.int32)
    rows, firsts, begins = _blocks(numbers[short], counts[short], tiling.short)
    keys = starts[rows] + np.minimum(firsts + tiling.short, counts[rows])  # seen by the block's last token
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
    """Cut each row into blocks of up to `tokens`.

    Returns the row of each block, its first token in the row, and the index of each row's first block.
    """
    owners, numbers, begins = _spread(-(-counts // tokens))
    return rows[owners], numbers * np.int32(tokens), begins


def _spread(counts: Ints) -> tuple[Ints, Ints, Ints]:
    """`counts[i]` things for each i, in order.

    Returns the i of each thing, its number among those of its i, and the index of each i's first thing.
    """
    ends = np.cumsum(counts, dtype=np.int32)
    begins = ends - counts.astype(np.int32)
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return owners, np.arange(len(owners), dtype=np.int32) - begins[owners], begins
