"""The normative sampling noise: these vectors are the ones in executor.proto."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_service.contract import noise

# seed, position, token id, key, hash, Gumbel noise
VECTORS = [
    (0x0, 0, 0, 0xE220A8397B1DCDAF, 0x90F2F1C9, 0.180099),
    (0x0, 1, 0, 0x6E789E6AA1B965F4, 0x6F339193, 0.562410),
    (0x1, 1, 1, 0xBEEB8DA1658EEC67, 0xB47728E1, -0.199332),
    (0x2A, 17, 256, 0x7ED90003F67F9E1D, 0x7051FCE2, 0.548890),
    (0x2A, 17, 151935, 0x7ED90003F67F9E1D, 0x013643E3, 5.350555),
    (0xFFFFFFFFFFFFFFFF, 0, 0, 0xE4D971771B652C20, 0x6CE57376, 0.590519),
    (0x8000000000000000, 65535, 1000, 0x1B799E5E6015C3E6, 0x36FA05E0, 1.419825),
    (0xFFFFFFFFFFFFFFFF, 2**31 - 1, 2**31 - 1, 0xE478654D2C0A5F3F, 0xB0326AE6, -0.153249),
    (4, 4000, 7191716, 0x4BD3072AB79585E7, 0x00000032, 18.258736),  # a hash near 0
    (8, 8000, 13496931, 0xB8C3F915B2056353, 0xFFFFFFAE, -2.811541),  # rounds to 1: w is clamped
]


@pytest.mark.parametrize(("seed", "position", "token", "key", "hash_", "gumbel"), VECTORS)
def test_the_normative_vectors(
    seed: int, position: int, token: int, key: int, hash_: int, gumbel: float
) -> None:
    assert noise.key(seed, position) == key
    assert noise.hash_tokens(key, np.array([token])).tolist() == [hash_]
    assert noise.gumbel(key, np.array([token]))[0] == pytest.approx(gumbel, abs=2e-6)


def test_index_seeds() -> None:
    assert [noise.index_seed(42, i) for i in range(3)] == [42, 0x4579B960BB007F46, 0xDB6685C74BCFF7FD]


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=9))
def test_batched_noise_is_bit_for_bit_the_noise_of_each(pairs: list[tuple[int, int]]) -> None:
    ids = np.arange(257)
    seeds, positions = zip(*pairs, strict=True)
    keys = noise.keys(np.array(seeds, dtype=np.uint64), np.array(positions))
    assert keys.tolist() == [noise.key(seed, position) for seed, position in pairs]
    batched = noise.gumbel(keys[:, None], ids)
    assert batched.dtype == np.float32
    for row, key in zip(batched, keys.tolist(), strict=True):
        assert np.array_equal(row, noise.gumbel(key, ids))


def test_the_noise_of_an_id_does_not_depend_on_its_neighbours() -> None:
    key = noise.key(5, 6)
    whole = noise.gumbel(key, np.arange(1000))
    some = np.array([999, 3, 500])
    assert np.array_equal(noise.gumbel(key, some), whole[some])


def test_fp32_noise_is_close_to_exact_arithmetic() -> None:
    ids = np.arange(200_000)
    w = (noise.hash_tokens(99, ids).astype(np.float64) + 0.5) * 2.0**-32
    exact = -np.log(-np.log1p(-np.minimum(w, 1 - 2.0**-24)))
    assert np.abs(noise.gumbel(99, ids) - exact).max() < 0.01  # near the clamp fp32 has few bits left
    inner = w < 0.99
    assert np.abs(noise.gumbel(99, ids) - exact)[inner].max() < 3e-6


def test_the_noise_is_standard_gumbel() -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)); 1.95 / sqrt(n) is its 0.1 % critical value."""
    for key in (noise.key(1, 1), noise.key(2**63, 12345)):
        x = np.sort(noise.gumbel(key, np.arange(100_000)).astype(np.float64))
        empirical = (np.arange(len(x)) + 0.5) / len(x)
        assert np.abs(np.exp(-np.exp(-x)) - empirical).max() < 1.95 / math.sqrt(len(x))
    sequence = np.array([noise.gumbel(noise.key(7, p), np.array([3]))[0] for p in range(5000)], np.float64)
    empirical = (np.arange(5000) + 0.5) / 5000
    assert np.abs(np.exp(-np.exp(-np.sort(sequence))) - empirical).max() < 1.95 / math.sqrt(5000)
    assert abs(np.corrcoef(sequence[1:], sequence[:-1])[0, 1]) < 0.05
