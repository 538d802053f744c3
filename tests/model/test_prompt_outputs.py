"""Scores and vectors of prompts: those of transformers, and the same bits however a prompt is computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from executor_service.backends import prompt_outputs
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.contract.limits import Limits
from executor_service.contract.plan import Opening, OutputMode, PoolingKind, Reason, RowResult
from tests.model.many_texts import check_scores, lengths_of_200
from tests.model.tiny import save
from tests.unit.executor.harness import Harness, opening, row

NONE, HIDDEN = OutputMode.NONE, OutputMode.HIDDEN
TEXTS = [np.random.default_rng(length).integers(3, 211, length).tolist() for length in (2, 3, 50, 131)]
LONG = TEXTS[-1]


class Pair:
    """An engine over our backend beside transformers, on the same weights."""

    def __init__(self, name: str, path: object) -> None:
        self.theirs: PreTrainedModel = save(name, path)  # type: ignore[arg-type]
        self.ours = TorchBackend(TorchConfig(path, threads=2))  # type: ignore[arg-type]
        self.ours.load(lambda what, done: None)

    def engine(self, max_piece_tokens: int = 512) -> Harness:
        hidden, limits = self.ours.info.hidden_size, Limits(211, 512, 16, 63, 32, 32, 512)
        limits = replace(limits, can_score=True, hidden_size=hidden, max_piece_tokens=max_piece_tokens)
        return Harness(limits, self.ours)

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """[tokens - 1, vocabulary]: of what follows each token but the last."""
        with torch.inference_mode():
            logits = self.theirs(torch.tensor([tokens])).logits[0, :-1]
            found: np.ndarray = logits.double().log_softmax(-1).numpy()
            return found

    def states(self, tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            found: np.ndarray = self.theirs.model(torch.tensor([tokens])).last_hidden_state[0].numpy()
            return found


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3-moe"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.ours.close()


def scored(cache_id: int, tokens: list[int], p: int = 1, k: int = 0, limit: int = 0) -> Opening:
    return replace(opening(cache_id, tokens, limit, output=NONE, logprobs=k), scored_from=p)


def pooled(cache_id: int, tokens: list[int], pooling: PoolingKind, limit: int = 0) -> Opening:
    return replace(opening(cache_id, tokens, limit, output=HIDDEN), pooling=pooling)


def chunks_of(engine: Harness, first: Opening, *limits: int) -> list[RowResult]:
    results = [engine.row(first)]
    for limit in limits:
        at = results[-1].kv_length
        if at == len(first.tokens):  # after a prefix hit
            break
        results.append(engine.row(row(first.cache_id, at, limit=limit, output=first.output)))
    return results


def bits(*results: RowResult) -> bytes:
    return b"".join(result.scores.logprobs.tobytes() for result in results if result.scores is not None)


def test_scores_are_transformers(pair: Pair) -> None:
    engine = pair.engine()
    results = engine.step(*(scored(1 + i, text, k=3) for i, text in enumerate(TEXTS))).rows
    for text, result in zip(TEXTS, results, strict=True):
        theirs, ours = pair.logprobs(text), result.scores
        assert ours is not None
        assert ours.first == 1
        np.testing.assert_allclose(ours.logprobs, theirs[np.arange(len(text) - 1), text[1:]], atol=1e-3)
        np.testing.assert_allclose(ours.top_logprobs, -np.sort(-theirs)[:, :3], atol=1e-3)
        np.testing.assert_allclose(np.take_along_axis(theirs, ours.top_ids, 1), ours.top_logprobs, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3-moe"])
def test_scores_of_200_texts_are_transformers(name: str, tmp_path: Path) -> None:
    theirs = save(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    ours = TorchBackend(TorchConfig(tmp_path))
    ours.load(lambda what, done: None)
    rng = np.random.default_rng(7)
    check_scores(ours, theirs, [rng.integers(3, 211, length).tolist() for length in lengths_of_200()])
    ours.close()


def test_scores_have_the_same_bits_however_they_are_computed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, in pieces, beside others, after a prefix hit, and with few logits at a time."""
    engine = pair.engine()
    want = bits(engine.row(scored(1, LONG)))
    assert len(want) == 4 * 130
    assert bits(*chunks_of(engine, scored(2, LONG, limit=1), 40, 0)) == want
    others = [scored(3 + i, text, k=2) for i, text in enumerate(TEXTS[:3])]
    assert bits(engine.step(*others, opening(6, LONG), scored(7, LONG)).rows[-1]) == want
    hit = engine.row(scored(8, LONG, p=60))
    assert hit.cached_length == 48
    assert bits(hit) == want[4 * 59 :]
    assert bits(pair.engine(max_piece_tokens=16).row(scored(1, LONG))) == want
    monkeypatch.setattr(prompt_outputs, "SLICE_BYTES", 4 * 211 * 3)
    assert bits(pair.engine().row(scored(1, LONG))) == want


def test_a_score_has_the_bits_of_the_logprob_that_sampling_gives(pair: Pair) -> None:
    engine = pair.engine()
    alone = engine.row(opening(1, LONG, logprobs=0))
    result = engine.row(scored(2, [*LONG, *alone.tokens], p=len(LONG)))
    assert alone.logprobs is not None
    assert bits(result) == alone.logprobs.tobytes()


def test_the_logprob_of_a_sampled_token_does_not_depend_on_its_batch(pair: Pair) -> None:
    engine = pair.engine()
    alone = engine.row(opening(1, LONG, logprobs=2))
    beside = engine.step(*(opening(2 + i, text, logprobs=2) for i, text in enumerate(TEXTS))).rows[-1]
    for name in ("logprobs", "top_logprobs"):
        assert getattr(alone, name).tobytes() == getattr(beside, name).tobytes()


def test_vectors_are_transformers(pair: Pair) -> None:
    engine = pair.engine()
    for pooling in PoolingKind:
        base = 10 * pooling
        results = engine.step(*(pooled(base + i, text, pooling) for i, text in enumerate(TEXTS, 1))).rows
        for text, result in zip(TEXTS, results, strict=True):
            states = pair.states(text)
            want = states[-1] if pooling is PoolingKind.LAST else states.mean(0)
            assert np.abs(want).max() > 0.1
            np.testing.assert_allclose(result.hidden, want, atol=1e-4)  # type: ignore[arg-type]


def test_vectors_have_the_same_bits_however_they_are_computed(pair: Pair) -> None:
    for pooling in PoolingKind:
        engine = pair.engine()
        want = engine.row(pooled(1, LONG, pooling)).hidden
        assert want is not None
        cut = chunks_of(engine, pooled(2, LONG, pooling, limit=1), 40, 0)
        pieces = pair.engine(max_piece_tokens=16).row(pooled(1, LONG, pooling))
        beside = engine.step(pooled(3, TEXTS[2], pooling), scored(4, TEXTS[1]), pooled(5, LONG, pooling)).rows
        for other in (cut[-1], pieces, beside[1 + 1]):
            assert other.hidden is not None
            assert other.hidden.tobytes() == want.tobytes()


def test_a_prompt_that_is_not_finite_is_refused_alone(pair: Pair) -> None:
    engine = pair.engine()
    engine.row(opening(1, LONG))
    for cache in pair.ours._caches:
        cache.v[:, :] = torch.nan
    texts = scored(2, LONG, p=130), pooled(3, LONG, PoolingKind.LAST), scored(4, TEXTS[2])
    results = engine.step(*texts).rows
    reasons = [result.refusal and result.refusal.reason for result in results]
    assert reasons == [Reason.NOT_FINITE, Reason.NOT_FINITE, None]
