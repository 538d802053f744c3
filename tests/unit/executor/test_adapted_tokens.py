"""The tokens of a step that adapters change, cut into tiles for the CUDA kernels."""

from __future__ import annotations

import numpy as np

from executor_service.backends.torch_backend.cuda.layout.adapted_tokens import (
    TILE_TOKENS,
    max_tiles,
    tile_tokens,
)


def test_tokens_are_cut_into_tiles_of_one_slot_each() -> None:
    rng = np.random.default_rng(4)
    for count, slots in ((1, 1), (16, 1), (17, 1), (40, 3), (300, 8), (20, 1000)):
        numbers = rng.integers(-1, slots, count).astype(np.int32)
        numbers[0] = 0
        tokens, tiles = tile_tokens(numbers)
        assert sorted(tokens.tolist()) == np.flatnonzero(numbers >= 0).tolist()
        covered = [range(first, first + size) for first, size, _ in tiles.tolist()]
        assert [place for places in covered for place in places] == list(range(len(tokens)))
        assert all(0 < len(places) <= TILE_TOKENS for places in covered)
        for places, (_, _, slot) in zip(covered, tiles.tolist(), strict=True):
            assert (numbers[tokens[places.start : places.stop]] == slot).all()
        assert len(tiles) <= max_tiles(count, slots)
