"""Scores and vectors of prompts with adapters, step by step: each is of its own adapter's model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from executor_service.adapters.registry import LoadedAdapter
from executor_service.adapters.weights import LowRankChange, make_weights
from executor_service.backends.numpy_sampler import log_softmax
from executor_service.backends.oracle_backend.clocked_oracle import oracle_of
from executor_service.backends.oracle_backend.settings import OracleSettings
from executor_service.backends.reference.paged_attention import PagedAttentionBackend, PagedAttentionConfig
from executor_service.contract.plan import Abandoned, Opening, OutputMode, PoolingKind
from tests.support.engine_steps import begin
from tests.support.untyped import present
from tests.unit.executor.fakes import limits
from tests.unit.executor.harness import Harness, Release, Truncate, fork, opening, plan, row

VOCAB, PAGE = 64, 4
FULL, HIDDEN, NONE = OutputMode.FULL, OutputMode.HIDDEN, OutputMode.NONE
LAST, MEAN = PoolingKind.LAST, PoolingKind.MEAN
PROMPT = np.random.default_rng(1).integers(0, VOCAB, 11).tolist()
BACKENDS = ["oracle", "clocked", "paged-attention"]
NAMES = "abc"


class AdaptedPrompts(Harness):
    """An engine with adapters a, b and c loaded, and two slots."""

    def __init__(self, name: str = "oracle", **bounds: Any) -> None:
        backend: Any
        if name == "paged-attention":
            backend = PagedAttentionBackend(PagedAttentionConfig(VOCAB, 256, heads=2, kv_heads=1, head_dim=8))
        else:
            step_ms = 0.01 if name == "clocked" else 0.0
            backend = oracle_of(OracleSettings(vocab_size=VOCAB, context_length=256, step_ms=step_ms))
        values = {
            "vocab_size": VOCAB, "page_size": PAGE,
            "can_score": True, "hidden_size": backend.info.hidden_size,
            "max_adapters": 3, "max_adapter_bytes": 1 << 20, "max_adapter_slots": 2, **bounds,
        }  # fmt: skip
        super().__init__(limits(**values), backend)
        self.slots = self.engine.store.adapters.slots
        self.fingerprints = {"": b""}
        for seed, adapter in enumerate(NAMES, 1):
            a, b = np.random.default_rng(seed).standard_normal((2, 2, 16)).astype(np.float32)
            changes = [
                LowRankChange(0, "v_proj", a[:, :8], b.T[:8]),
                LowRankChange(0, "o_proj", a, b.T),
            ]
            weights = make_weights(2, 0.5, changes, b"model")
            self.engine.store.adapters.add(adapter, LoadedAdapter(weights, backend.prepare_adapter(weights)))
            self.fingerprints[adapter] = weights.fingerprint

    def scored(self, cache_id: int, adapter: str, p: int = 1, limit: int = 0) -> Opening:
        base = opening(cache_id, PROMPT, limit, output=NONE, logprobs=2)
        return replace(base, scored_from=p, adapter=self.fingerprints[adapter])

    def pooled(self, cache_id: int, adapter: str, pooling: PoolingKind = MEAN, limit: int = 0) -> Opening:
        base = opening(cache_id, PROMPT, limit, output=HIDDEN)
        return replace(base, pooling=pooling, adapter=self.fingerprints[adapter])

    def opened(self, cache_id: int, adapter: str, tokens: Sequence[int], output: OutputMode) -> Any:
        base = opening(cache_id, list(tokens), output=output)
        return self.row(replace(base, adapter=self.fingerprints[adapter]))


def scores(name: str, adapter: str, p: int = 1) -> NDArray[np.float32]:
    """Logprobs of PROMPT[p:], token by token: each from the full logits after the tokens before it."""
    h, found = AdaptedPrompts(name), []
    for end in range(p, len(PROMPT)):
        logits = h.opened(end, adapter, PROMPT[:end], FULL).logits
        found.append(log_softmax(logits)[0, PROMPT[end]])
    return np.array(found, np.float32)


def states(name: str, adapter: str) -> NDArray[np.float32]:
    """The hidden state after each token of the prompt, each computed alone."""
    h = AdaptedPrompts(name)
    return np.stack([h.opened(n, adapter, PROMPT[:n], HIDDEN).hidden for n in range(1, len(PROMPT) + 1)])


def logprobs(*results: Any) -> list[float]:
    return [score for one in results if one.scores is not None for score in one.scores.logprobs.tolist()]


def true_for(calls: int) -> Callable[[], bool]:
    answers = iter([True] * calls)
    return lambda: next(answers, False)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_prompt_is_scored_with_its_own_adapter(name: str) -> None:
    """Beside other adapters and none, after a hit of its own pages, and in chunks."""
    h = AdaptedPrompts(name)
    expected = {adapter: scores(name, adapter).tolist() for adapter in ("", "a", "b")}
    assert len({tuple(one) for one in expected.values()}) == 3
    for first in (10, 20):
        beside = h.step(*(h.scored(first + i, adapter) for i, adapter in enumerate(expected))).rows
        assert [logprobs(one) for one in beside] == list(expected.values())
    for i, (adapter, want) in enumerate(expected.items()):
        hit = h.row(h.scored(30 + i, adapter, p=10))
        assert (hit.cached_length, logprobs(hit)) == (8, want[9:])
        chunk = h.row(h.scored(40 + i, adapter, limit=3))
        assert logprobs(chunk, h.row(row(40 + i, 3, output=NONE))) == want


@pytest.mark.parametrize("name", BACKENDS)
def test_a_vector_is_of_its_own_adapter(name: str) -> None:
    h = AdaptedPrompts(name)
    expected = {adapter: states(name, adapter) for adapter in ("", "a", "b")}
    assert not np.allclose(expected["a"], expected["b"], atol=1e-3)
    means = h.step(*(h.pooled(10 + i, adapter) for i, adapter in enumerate(expected))).rows
    lasts = h.step(*(h.pooled(20 + i, adapter, LAST) for i, adapter in enumerate(expected))).rows
    for i, (adapter, want) in enumerate(expected.items()):
        np.testing.assert_allclose(present(means[i].hidden), want.mean(0), atol=1e-5)
        np.testing.assert_array_equal(lasts[i].hidden, want[-1])
        h.row(h.pooled(30 + i, adapter, limit=5))
        chunked = h.row(row(30 + i, 5, output=HIDDEN))
        np.testing.assert_array_equal(chunked.hidden, means[i].hidden)


@pytest.mark.parametrize("name", BACKENDS)
def test_slots_of_vectors_are_free_for_the_next_ones_at_once(name: str) -> None:
    """Released by the very step that opens the next, which may be begun while they are computed."""
    h = AdaptedPrompts(name)
    expected = {adapter: h.row(h.pooled(i, adapter)).hidden for i, adapter in enumerate(NAMES[:2], 1)}
    h.op(Release((1, 2)))
    expected["c"] = h.row(h.pooled(3, "c")).hidden
    h.op(Release((3,)))
    begun, live = [], tuple[int, ...]()
    order = ["ab", "ca", "bc", "ab"]
    for i, pair in enumerate(order, 1):
        openings = [h.pooled(10 * i + j, adapter) for j, adapter in enumerate(pair)]
        begun.append(h.begin(*openings, ops=(Release(live),)))
        live = tuple(one.cache_id for one in openings)
    for pair, step in zip(order, begun, strict=True):
        for adapter, found in zip(pair, step.finish().rows, strict=True):
            np.testing.assert_array_equal(found.hidden, expected[adapter])
    h.op(Release(live))
    assert h.slots.used == 0


@pytest.mark.parametrize("name", BACKENDS)
def test_a_fork_has_its_sources_adapter_and_none_of_its_scores(name: str) -> None:
    h = AdaptedPrompts(name)
    want = scores(name, "a").tolist()
    first = h.row(h.scored(1, "a", limit=6))
    rows = row(2, 5, PROMPT[5:], output=HIDDEN), row(1, 6, output=NONE)
    copy, source = h.step(*rows, ops=(fork(1, 2, 5),)).rows
    assert logprobs(first, source) == want
    assert copy.scores is None
    np.testing.assert_array_equal(copy.hidden, states(name, "a")[-1])
    h.op(Release((1,)))
    assert h.slots.used == 1
    h.op(Release((2,)))
    assert h.slots.used == 0


def test_a_step_that_is_given_up_leaves_adapters_scores_and_sums() -> None:
    h = AdaptedPrompts(max_piece_tokens=4)
    begun = logprobs(h.row(h.scored(1, "a", limit=3)))
    h.row(h.pooled(2, "b", limit=3))
    for adapter in NAMES:
        h.engine.store.adapters.remove(adapter)
    ops = (fork(1, 3, 2), Release((1,)), Truncate(2, 1), fork(2, 4, 1))
    what = plan(row(2, 1, PROMPT[1:], output=NONE), row(4, 1, PROMPT[1:], output=NONE), ops=ops)
    for given_up_behind in range(5):
        with pytest.raises(Abandoned):
            begin(h.engine, what, true_for(given_up_behind), abandonable=True)
        h.engine.store.check()
        assert h.slots.used == 2
    scored, pooled = h.step(row(1, 3, output=NONE), row(2, 3, output=HIDDEN)).rows
    assert begun + logprobs(scored) == scores("oracle", "a").tolist()
    np.testing.assert_allclose(present(pooled.hidden), states("oracle", "b").mean(0), atol=1e-5)
    h.op(Release((1, 2)))
    assert h.slots.used == 0
    assert not h.engine.store.adapters.registry.adapters
