"""Logits equal transformers' to 1e-4 in fp32, however a sequence is cut up, batched, cut back or forked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from executor_service.backends.torch_backend import TorchBackend, TorchConfig
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.tiny import CONFIGS, save

TOLERANCE = 1e-4
PAGE = 16


class Pair:
    """Our backend beside transformers, on the same weights."""

    def __init__(self, name: str, path: Path) -> None:
        self.theirs: PreTrainedModel = save(name, path)
        self.ours = TorchBackend(TorchConfig(path))
        self.ours.load(lambda what, done: None)
        self.ours.allocate(64, PAGE)
        self.pages = pages_from(1)

    def driver(self) -> Driver:
        return Driver(self.pages, PAGE)

    def expected(self, tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            logits: np.ndarray = self.theirs(torch.tensor([tokens])).logits[0].numpy()
            return logits


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.ours.close()


@pytest.fixture(autouse=True)
def fresh_pages(pair: Pair) -> None:
    pair.ours.allocate(64, PAGE)
    pair.pages = pages_from(1)


def tokens_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 211, count).tolist()


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < TOLERANCE


def test_prefill_in_one_piece(pair: Pair) -> None:
    tokens = tokens_of(1, 67)
    [out] = pair.ours.forward([pair.driver().feed(tokens, outputs=67)])
    theirs = pair.expected(tokens)
    assert np.abs(theirs).max() > 0.5  # flat logits would prove nothing
    assert_close(logits_of(out), theirs)


@pytest.mark.parametrize("chunks", [[1] * 40, [7, 33], [16, 16, 8], [39, 1]])
def test_prefill_in_chunks(pair: Pair, chunks: list[int]) -> None:
    tokens = tokens_of(2, 40)
    driver, first, parts = pair.driver(), 0, []
    for chunk in chunks:
        row = driver.feed(tokens[first : first + chunk], outputs=chunk)
        parts.append(logits_of(pair.ours.forward([row])[0]))
        first += chunk
    assert_close(np.concatenate(parts), pair.expected(tokens))


def test_chunks_decodes_and_verifies_side_by_side(pair: Pair) -> None:
    sequences = [tokens_of(seed, 20 + 9 * seed) for seed in range(5)]
    drivers = [pair.driver() for _ in sequences]
    fed = [1, 5, 19, 40, 0]
    warm = [d.feed(s[:n], outputs=1) for d, s, n in zip(drivers, sequences, fed, strict=True) if n]
    pair.ours.forward(warm)
    asked = [1, 1, 6, 7, 30]  # decode, decode, verify, chunk, prefill
    rows = [
        d.feed(s[n : n + q], outputs=q) for d, s, n, q in zip(drivers, sequences, fed, asked, strict=True)
    ]
    outs = pair.ours.forward(rows)
    for out, s, n, q in zip(outs, sequences, fed, asked, strict=True):
        assert_close(logits_of(out), pair.expected(s[: n + q])[n:])


def test_a_row_is_bitwise_the_same_in_any_company(pair: Pair) -> None:
    def run(company: int) -> np.ndarray:
        pair.ours.allocate(64, PAGE)
        pair.pages = pages_from(1)
        driver, others = pair.driver(), [pair.driver() for _ in range(company)]
        pair.ours.forward([driver.feed(tokens_of(3, 21))])
        rows = [other.feed(tokens_of(i, 2 + i)) for i, other in enumerate(others)]
        return logits_of(pair.ours.forward([*rows, driver.feed([9])])[-1])

    alone = run(0)
    for company in (1, 2, 5, 9):
        assert np.array_equal(alone, run(company))


def test_after_truncate(pair: Pair) -> None:
    tokens, driver = tokens_of(4, 50), pair.driver()
    pair.ours.forward([driver.feed(tokens)])
    driver.truncate(37)
    other = tokens_of(5, 12)
    [out] = pair.ours.forward([driver.feed(other, outputs=12)])
    assert_close(logits_of(out), pair.expected(tokens[:37] + other)[37:])


def test_after_fork(pair: Pair) -> None:
    tokens, driver = tokens_of(6, 45), pair.driver()
    pair.ours.forward([driver.feed(tokens)])
    fork = driver.fork(pair.ours, 41)
    left, right = tokens_of(7, 9), tokens_of(8, 9)
    outs = pair.ours.forward([driver.feed(left, outputs=9), fork.feed(right, outputs=9)])
    assert_close(logits_of(outs[0]), pair.expected(tokens + left)[45:])
    assert_close(logits_of(outs[1]), pair.expected(tokens[:41] + right)[41:])


@pytest.mark.parametrize("page_size", [1, 5, 8, 32])
def test_any_page_size(pair: Pair, page_size: int) -> None:
    pair.ours.allocate(1 + -(-64 // page_size) * 2, page_size)
    driver, tokens = Driver(pages_from(1), page_size), tokens_of(9, 61)
    pair.ours.forward([driver.feed(tokens[:44])])
    [out] = pair.ours.forward([driver.feed(tokens[44:], outputs=17)])
    assert_close(logits_of(out), pair.expected(tokens)[44:])


def test_forward_once_touches_no_cache(pair: Pair) -> None:
    tokens, driver = tokens_of(10, 30), pair.driver()
    pair.ours.forward([driver.feed(tokens)])
    probe = np.array(tokens_of(11, 23), np.int32)
    [once] = pair.ours.forward_once([probe], frozenset({"hidden", "embedding", "logits"}))
    assert once.hidden is not None
    assert once.embedding is not None
    assert once.logits is not None
    assert_close(once.logits, pair.expected(probe.tolist()))
    assert once.hidden.shape == (23, pair.ours.info.hidden_size)
    mean = once.hidden.mean(0)
    assert np.allclose(once.embedding, mean / np.linalg.norm(mean), atol=1e-5)
    [out] = pair.ours.forward([driver.feed([5])])
    assert_close(logits_of(out), pair.expected([*tokens, 5])[-1:])
