"""Gloo ranks give the tokens of one, however a sequence is cut up, batched, cut back or forked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import pytest

from executor_service.backends.base import AdapterBackend, Backend, RowOutput
from executor_service.backends.factory import make_backend
from executor_service.backends.torch_backend.parallel import group
from executor_service.config import ExecutorConfig
from executor_service.contract.limits import Limits
from executor_service.contract.plan import OutputMode, PoolingKind, RowResult, Sampling
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.random_adapters import random_adapter
from tests.model.tiny import save
from tests.support.collectives import counted_collectives
from tests.support.untyped import present
from tests.unit.executor.harness import Harness, opening

pytestmark = pytest.mark.long

PAGE, PAGES, VOCABULARY = 16, 256, 211
PAIRS = [("llama-untied-bias", 2), ("qwen3-moe", 2)]
GROUPS = [
    *PAIRS,
    pytest.param(
        ("qwen3", 2), marks=pytest.mark.slow
    ),  # which qwen3-moe shows but for its MLP, and llama that
    pytest.param(("qwen3-moe", 4), marks=pytest.mark.slow),  # which has two KV heads
    pytest.param(("qwen3", 2, "int8"), marks=pytest.mark.slow),  # the dtype of pages
]
GREEDY = Sampling()


class TorchRanks(Backend, AdapterBackend, Protocol):
    """A torch backend of one rank or of several."""


def backend_of(config: ExecutorConfig) -> TorchRanks:
    return cast("TorchRanks", make_backend(config.backend_settings, config.follower_flags))


def config_of(model: Path, ranks: int, **settings: object) -> ExecutorConfig:
    return ExecutorConfig(model=model, device="cpu", threads=1, tensor_parallel=ranks, **settings)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pair:
    one: TorchRanks
    two: TorchRanks  # or more
    atol: float = 1e-4  # of numbers: a rank's sums may be rounded to other numbers of 8 bits


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, TorchRanks]]]:
    """A group for each family: all followers start at once, and wait for their rank 0."""
    groups = {}
    for name, ranks in PAIRS:
        path = tmp_path_factory.mktemp(name)
        save(name, path)
        groups[name] = path, backend_of(config_of(path, ranks))
    yield groups
    for _, backend in groups.values():
        backend._followers.kill()  # type: ignore[attr-defined]  # of groups that no test has joined


@pytest.fixture(scope="module", params=GROUPS, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    name, ranks, *rest = request.param
    pages = {"kv_dtype": rest[0]} if rest else {}
    if request.param in PAIRS:
        path, two = request.getfixturevalue("waiting")[name]
    else:
        path = tmp_path_factory.mktemp(name)
        save(name, path)
        two = backend_of(config_of(path, ranks, **pages))
    with ExitStack() as cleanup:
        pair = Pair(backend_of(config_of(path, 1, **pages)), two, **({"atol": 0.01} if pages else {}))
        for backend in (pair.one, pair.two):
            cleanup.callback(backend.close)
            backend.load(lambda what, fraction: None)
            backend.allocate(PAGES, PAGE)
        yield pair


def tokens_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()


def token_of(output: RowOutput) -> int:
    assert output.finite
    assert output.tokens is not None
    return int(output.tokens[-1])


def decoded(
    backend: TorchRanks, drivers: list[Driver], last: list[int], sampling: Sampling, steps: int
) -> list[list[int]]:
    """Go on with all sequences together, from the tokens `last`."""
    results: list[list[int]] = []
    for _ in range(steps):
        rows = [
            d.feed([token], output=OutputMode.SAMPLE, sampling=sampling)
            for d, token in zip(drivers, last, strict=True)
        ]
        last = [token_of(out) for out in backend.forward(rows)]
        results.append(last)
    return results


def history(backend: TorchRanks, sampling: Sampling) -> list[list[int]]:
    """Tokens of a prefill, chunks, batched decodes, after a truncation and after a fork."""
    pages = pages_from(1)
    drivers = [Driver(pages, PAGE) for _ in range(4)]
    chunks = [tokens_of(9, 40)[:13], tokens_of(9, 40)[13:30], tokens_of(9, 40)[30:]]
    for chunk in chunks[:2]:
        backend.forward([drivers[0].feed(chunk, outputs=0)])
    rows = [drivers[0].feed(chunks[2], output=OutputMode.SAMPLE, sampling=sampling)] + [
        d.feed(tokens_of(i, 7 + 19 * i), output=OutputMode.SAMPLE, sampling=sampling)
        for i, d in enumerate(drivers[1:])
    ]
    last = [token_of(out) for out in backend.forward(rows)]
    results = [last, *decoded(backend, drivers, last, sampling, steps=10)]
    for d in drivers:
        d.truncate(d.length - 9)
    results += decoded(backend, drivers, [5, 6, 7, 8], sampling, steps=4)
    fork = drivers[3].fork(backend, drivers[3].length - 3)
    results += decoded(backend, [drivers[3], fork], [11, 12], sampling, steps=4)
    return results


SAMPLINGS = {
    "greedy": GREEDY,
    "by every rule": Sampling(
        temperature=1.2,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        seed=9,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        logit_bias=((17, 2.0),),
    ),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_those_of_one_rank(pair: Pair, name: str) -> None:
    assert history(pair.two, SAMPLINGS[name]) == history(pair.one, SAMPLINGS[name])


def test_pages_are_divided_and_the_fingerprint_is_that_of_one_rank(pair: Pair) -> None:
    assert pair.two.info.fingerprint == pair.one.info.fingerprint
    assert pair.two.page_bytes(PAGE) < pair.one.page_bytes(PAGE)


def test_scores_and_vectors_are_those_of_one_rank(pair: Pair) -> None:
    """Of prompts in pieces, a slice of logits at a time, beside a row that samples."""

    def answers(backend: TorchRanks) -> Sequence[RowResult]:
        limits = Limits(VOCABULARY, 512, PAGE, PAGES - 1, 8, 8, 512, can_score=True, hidden_size=64)
        engine = Harness(replace(limits, max_piece_tokens=33), backend)
        texts = [tokens_of(30 + i, 9 + 17 * i) for i in range(5)]
        return engine.step(
            replace(opening(1, texts[0], logprobs=3), scored_from=1),
            replace(opening(2, texts[1], output=OutputMode.HIDDEN), pooling=PoolingKind.MEAN),
            replace(opening(3, texts[2], output=OutputMode.HIDDEN), scored_from=20),
            opening(4, texts[3]),
            replace(opening(5, texts[4], output=OutputMode.NONE), scored_from=2),
        ).rows

    one, two = answers(pair.one), answers(pair.two)
    assert [row.tokens for row in one] == [row.tokens for row in two]
    for ours, theirs in zip(two, one, strict=True):
        assert (ours.scores is None, ours.hidden is None) == (theirs.scores is None, theirs.hidden is None)
        if ours.scores is not None and theirs.scores is not None:
            assert ours.scores.first == theirs.scores.first
            np.testing.assert_allclose(ours.scores.logprobs, theirs.scores.logprobs, atol=pair.atol)
            np.testing.assert_allclose(ours.scores.top_logprobs, theirs.scores.top_logprobs, atol=pair.atol)
        if ours.hidden is not None and theirs.hidden is not None:
            np.testing.assert_allclose(ours.hidden, theirs.hidden, atol=pair.atol)


def test_rows_of_all_kinds_side_by_side(pair: Pair) -> None:
    def answers(backend: TorchRanks) -> list[RowOutput]:
        pages = pages_from(1)
        kinds: list[tuple[int, OutputMode, Sampling]] = [
            (5, OutputMode.SAMPLE, GREEDY),
            (3, OutputMode.FULL, GREEDY),
            (0, OutputMode.NONE, GREEDY),
            (1, OutputMode.SAMPLE, Sampling(temperature=0.7, seed=1)),
            (1, OutputMode.SAMPLE, GREEDY),
            (2, OutputMode.SAMPLE, Sampling(logprobs=4)),
            (0, OutputMode.SAMPLE, GREEDY),
        ]
        return backend.forward(
            [
                Driver(pages, PAGE).feed(tokens_of(20 + i, 9 + i), outputs, mode, sampling)
                for i, (outputs, mode, sampling) in enumerate(kinds)
            ]
        )

    one, two = answers(pair.one), answers(pair.two)
    assert np.abs(logits_of(one[1]) - logits_of(two[1])).max() < 1e-4
    for ours, theirs in zip(two, one, strict=True):
        if theirs.tokens is None:
            assert ours.tokens is None
        else:
            assert ours.tokens is not None
            assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert one[5].top_ids is not None
    assert two[5].top_ids is not None
    assert one[5].top_ids.tolist() == two[5].top_ids.tolist()


@pytest.mark.parametrize("prompt", [9, 230])
def test_a_step_is_one_broadcast_and_two_sums_a_layer(pair: Pair, prompt: int) -> None:
    """And a sum for the embedding, and what the vocabulary needs: 8 bytes a greedy row, others' logits."""
    layers = pair.two.info.layers
    drivers = [Driver(pages_from(1 + 64 * i), PAGE) for i in range(3)]
    with counted_collectives() as counts:
        pair.two.forward([d.feed(tokens_of(i, prompt), outputs=0) for i, d in enumerate(drivers)])
    assert counts == {"broadcast": 1, "_all_gather": 1 + 2 * layers}
    sampling = GREEDY, GREEDY, Sampling(temperature=0.7, seed=1)
    rows = [d.feed([5], 1, OutputMode.SAMPLE, s) for d, s in zip(drivers, sampling, strict=True)]
    with counted_collectives() as counts:
        pair.two.forward(rows)
    assert counts == {"broadcast": 1, "_all_gather": 1 + 2 * layers + 1, "gather": 1}


def test_a_plan_that_is_longer_than_a_frame_needs_two_broadcasts(pair: Pair) -> None:
    """What it says arrives: see the test of adapters."""
    prepared = pair.two.prepare_adapter(random_adapter(pair.one, 0, 16))
    assert prepared.buffer.size > group._FRAME
    with counted_collectives() as counts:
        pair.two.load_adapter(0, prepared)
    assert counts == {"broadcast": 2}
    pair.two.unload_adapter(0)


def test_a_row_is_bitwise_the_same_in_any_company(pair: Pair) -> None:
    def run(company: int) -> np.ndarray:
        pages = pages_from(1)
        driver, others = Driver(pages, PAGE), [Driver(pages, PAGE) for _ in range(company)]
        pair.two.forward([driver.feed(tokens_of(3, 21))])
        rows = [other.feed(tokens_of(i, 2 + i)) for i, other in enumerate(others)]
        return logits_of(pair.two.forward([*rows, driver.feed([9])])[-1])

    alone = run(0)
    assert np.array_equal(alone, run(1))
    assert np.array_equal(alone, run(6))


def test_forward_once_gives_what_one_rank_gives(pair: Pair) -> None:
    inputs = [np.array(tokens_of(i, 11 + i), np.int32) for i in range(2)]
    want = frozenset({"hidden", "embedding", "logits"})
    outputs = zip(pair.one.forward_once(inputs, want), pair.two.forward_once(inputs, want), strict=True)
    for one, two in outputs:
        for name in want:
            ours, theirs = getattr(two, name), getattr(one, name)
            assert ours.shape == theirs.shape
            assert np.abs(ours - theirs).max() < 1e-4


def test_adapters_change_what_they_change_on_one_rank(pair: Pair) -> None:
    adapters = [random_adapter(pair.one, seed, rank) for seed, rank in enumerate((4, 9, 16))]

    def answers(backend: TorchRanks) -> list[np.ndarray]:
        target = present(backend.info.adapters)
        prepared = [backend.prepare_adapter(adapter) for adapter in adapters]
        for one, adapter in zip(prepared, adapters, strict=True):
            size = one.own.bytes + one.buffer.nbytes if backend is pair.two else one.bytes
            assert size == target.held_bytes(adapter.rank, adapter.keys, adapter.bytes)
        pages, results = pages_from(1), []
        drivers = [Driver(pages, PAGE) for _ in range(5)]
        for slots in ((0, 1), (2, 1)):  # the first adapter's slot is given to the third
            for slot, number in enumerate(slots):
                backend.load_adapter(slot, prepared[number])
            rows = [
                replace(driver.feed(tokens_of(40 + i, 9 + i), outputs=3), slot=i % 3 - 1)
                for i, driver in enumerate(drivers)
            ]
            results += [logits_of(out) for out in backend.forward(rows)]
            backend.unload_adapter(0)
        return results

    one, two = answers(pair.one), answers(pair.two)
    assert max(np.abs(a - b).max() for a, b in zip(one, two, strict=True)) < 1e-4
    assert np.abs(one[1] - one[6]).max() > 0.1
