"""Logits equal transformers' to 1e-4 in fp32, however a sequence is cut up, batched, cut back or forked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from executor_service.adapters.weights import PARENTS, AdapterWeights
from executor_service.backends.base import PromptOutputs, RowOutput
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.random_adapters import random_adapter
from tests.model.tiny import CONFIGS, save
from tests.support.untyped import present

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


@contextmanager
def changed(model: PreTrainedModel, adapter: AdapterWeights) -> Iterator[None]:
    """Transformers' model with the adapter's changes in its weights."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for change in adapter.changes:
        path = f"model.layers.{change.layer}.{PARENTS[change.module]}.{change.module}"
        a, b = torch.from_numpy(change.a), torch.from_numpy(change.b)
        model.get_parameter(f"{path}.weight").data += adapter.scale * (b @ a)
    yield
    model.load_state_dict(before)


def load_adapters(backend: TorchBackend, adapters: list[AdapterWeights]) -> None:
    for slot, adapter in enumerate(adapters):
        backend.load_adapter(slot, backend.prepare_adapter(adapter))


def test_adapters_change_what_the_same_changes_of_the_weights_do(pair: Pair) -> None:
    adapters = [random_adapter(pair.ours, seed, rank) for seed, rank in enumerate((1, 8, 33))]
    load_adapters(pair.ours, adapters)
    prompts = [tokens_of(20 + i, 19 + 30 * i) for i in range(4)]
    slots = [2, 0, -1, 1]
    drivers = [pair.driver() for _ in prompts]
    for begin, end in ((0, 18), (18, None)):  # the prompts, and then more of some beside a token of others
        rows = [
            replace(driver.feed(prompt[begin:end], outputs=len(prompt[begin:end])), slot=slot)
            for driver, prompt, slot in zip(drivers, prompts, slots, strict=True)
        ]
        outs = pair.ours.forward(rows)
        for out, prompt, slot in zip(outs, prompts, slots, strict=True):
            plain = pair.expected(prompt)[begin:end]
            if slot < 0:
                assert_close(logits_of(out), plain)
                continue
            with changed(pair.theirs, adapters[slot]):
                expected = pair.expected(prompt)[begin:end]
            assert np.abs(expected - plain).max() > 0.1
            assert_close(logits_of(out), expected)


def test_a_row_with_or_without_an_adapter_is_bitwise_the_same_in_any_company(pair: Pair) -> None:
    load_adapters(pair.ours, [random_adapter(pair.ours, seed, 3 + 5 * seed) for seed in range(8)])
    slots = [i % 9 - 1 for i in range(32)]
    prompts = [tokens_of(60 + i, 6 + i % 7) for i in range(32)]

    def run(chosen: list[int]) -> dict[int, np.ndarray]:
        pair.ours.allocate(64, PAGE)
        pair.pages = pages_from(1)
        fresh = [pair.driver() for _ in chosen]
        for begin, end in ((0, 5), (5, None)):
            rows = [
                replace(driver.feed(prompts[i][begin:end], outputs=1), slot=slots[i])
                for i, driver in zip(chosen, fresh, strict=True)
            ]
            outs = pair.ours.forward(rows)
        return {i: logits_of(out) for i, out in zip(chosen, outs, strict=True)}

    together = run([*range(17, 32), *range(17)])
    for i in (0, 1, 8, 9, 13, 31):
        assert np.array_equal(run([i])[i], together[i])
    some = run([3, 30, 12, 21, 4])
    assert all(np.array_equal(some[i], together[i]) for i in some)


def test_prompts_with_adapters_have_their_own_scores_and_vectors_in_any_order_of_slots(pair: Pair) -> None:
    load_adapters(pair.ours, [random_adapter(pair.ours, seed, 4) for seed in range(2)])
    slots, prompts = [1, -1, 0, 1, -1], [tokens_of(80 + i, 9 + 4 * i) for i in range(5)]

    def run(chosen: list[int]) -> list[RowOutput]:
        pair.ours.allocate(64, PAGE)
        pair.pages = pages_from(1)
        rows = []
        for i in chosen:
            prompt = PromptOutputs(1, np.array(prompts[i][1:], np.int32), last=i != 2, total=i == 3)
            rows.append(replace(pair.driver().feed(prompts[i], i % 2), slot=slots[i], prompt=prompt))
        return pair.ours.forward(rows)

    for i, output in enumerate(run([0, 1, 2, 3, 4])):
        (alone,) = run([i])
        assert np.array_equal(present(output.scores).logprobs, present(alone.scores).logprobs)
        for name in ("logits", "hidden", "hidden_sum"):
            one, many = getattr(alone, name), getattr(output, name)
            assert one is many is None or np.array_equal(one, many)


def test_long_and_short_steps_with_adapters_give_the_same_bits(pair: Pair) -> None:
    """Steps above 256 tokens are not recorded."""
    load_adapters(pair.ours, [random_adapter(pair.ours, 1, 8)])
    tokens = tokens_of(70, 300)

    def run(chunks: list[int]) -> np.ndarray:
        pair.ours.allocate(64, PAGE)
        pair.pages = pages_from(1)
        driver, first, parts = pair.driver(), 0, []
        for chunk in chunks:
            row = replace(driver.feed(tokens[first : first + chunk], outputs=chunk), slot=0)
            parts.append(logits_of(pair.ours.forward([row])[0]))
            first += chunk
        return np.concatenate(parts)

    assert np.array_equal(run([300]), run([200, 99, 1]))


def test_an_adapter_takes_the_memory_that_is_said_before_it_is_read(pair: Pair) -> None:
    target = present(pair.ours.info.adapters)
    for rank in (1, 16, 17):
        adapter = random_adapter(pair.ours, 0, rank)
        prepared = pair.ours.prepare_adapter(adapter)
        assert prepared.bytes == target.held_bytes(rank, adapter.keys, adapter.bytes)
