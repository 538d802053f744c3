"""`AdaptedTokens`: the tokens of a step that adapters change, in tiles of one slot each.

The host cuts, as it does for attention. Tokens of one slot need not follow each other in the step: a tile is
a part of a list of tokens in the order of their slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from executor_service.backends.torch_backend.cuda.layout.rows import Ints

TILE_TOKENS = 16
"""Tokens of a tile, at most: the fewest lines that a matrix instruction has."""
TILE_FIELDS = 3
"""int32s of a tile: the place of its first token in the list, its number of tokens, and its slot."""


@dataclass(frozen=True, slots=True)
class AdaptedTokens:
    """On the device, int32. A CUDA graph can be captured with more of both than a step has."""

    tokens: torch.Tensor  # [tokens]: indices of the step's tokens
    tiles: torch.Tensor  # [tiles * TILE_FIELDS]
    count: torch.Tensor  # [1]: tiles that the step has
    # Multiprocessors of the device, where launches have only the programs that it runs at once, whatever the
    # length of `tiles`; 0: a program for each piece of work.
    processors: int = 0


def tile_tokens(slots: Ints) -> tuple[Ints, Ints]:
    """The tokens and tiles [tiles, TILE_FIELDS] of a step whose token i has slots[i]; below 0: none."""
    tokens = np.argsort(slots, kind="stable").astype(np.int32)
    tokens = tokens[np.searchsorted(slots[tokens], 0) :]
    found, firsts, counts = np.unique(slots[tokens], return_index=True, return_counts=True)
    tiles = -(-counts // TILE_TOKENS)
    before = np.repeat(np.cumsum(tiles) - tiles, tiles)
    offsets = (np.arange(len(before)) - before) * TILE_TOKENS
    sizes = np.minimum(np.repeat(counts, tiles) - offsets, TILE_TOKENS)
    fields = np.repeat(firsts, tiles) + offsets, sizes, np.repeat(found, tiles)
    return tokens, np.stack(fields, 1).astype(np.int32)


def max_tiles(tokens: int, slots: int) -> int:
    """The most tiles that `tokens` tokens of `slots` slots are cut into."""
    return min(tokens, tokens // TILE_TOKENS + slots)
