"""Scores of many texts, computed in many ways, beside transformers' own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.contract.limits import Limits
from executor_service.contract.plan import OutputMode
from tests.unit.executor.harness import Harness, Release, opening, row

MAX_ERROR = 1e-3  # of a logprob
_LIMITS, _SHARES = (0, 1, 7, 64, 500), (0.3, 0.05, 0.15, 0.25, 0.25)  # tokens in a step; 0: all


def lengths_of_200() -> list[int]:
    """Lengths of texts whose tokens but the first have scores: 1 to 2,000, of each magnitude alike."""
    drawn = np.exp(np.random.default_rng(5).uniform(0, np.log(2000), 198)).round().astype(int)
    return [2, 2001, *(1 + drawn).tolist()]


def check_scores(ours: TorchBackend, theirs: Any, texts: Sequence[list[int]]) -> None:
    """Score all texts: in chunks, up to four side by side, and again after the pages of the same text."""
    rng, scorer, worst, done = np.random.default_rng(6), _Scorer(ours), 0.0, 0
    while done < len(texts):
        group = texts[done : done + int(rng.integers(1, 5))]
        done += len(group)
        limits = rng.choice(_LIMITS, len(group), p=_SHARES).tolist()
        wholes = scorer([_Asked(text, 1, limit) for text, limit in zip(group, limits, strict=True)])
        firsts = [int(rng.integers(1, len(text))) for text in group]
        tails = scorer([_Asked(text, first, 0) for text, first in zip(group, firsts, strict=True)])
        for text, whole, first, tail in zip(group, wholes, firsts, tails, strict=True):
            expected = _logprobs(theirs, text)
            assert len(whole) == len(expected)
            assert np.array_equal(whole[first - 1 :], tail)
            worst = max(worst, float(np.abs(whole - expected).max()))
            assert worst <= MAX_ERROR, f"a text of {len(text)} tokens"
    tokens = sum(map(len, texts)) - len(texts)
    print(f"{tokens} scores of {len(texts)} texts: at most {worst:.1e} off; {scorer.hits} prefix hits")
    assert scorer.hits > len(texts) / 4


def _logprobs(theirs: Any, text: list[int]) -> np.ndarray:
    with torch.inference_mode():
        logits = theirs(torch.tensor([text])).logits[0, :-1]
        chosen = logits.gather(-1, torch.tensor(text[1:])[:, None])[:, 0]
        found: np.ndarray = (chosen - logits.logsumexp(-1)).numpy()
        return found


class _Asked(NamedTuple):
    """A text that is scored from `first` on, at most `limit` tokens in a step; 0: all that are left."""

    text: list[int]
    first: int
    limit: int


class _Scorer:
    """An engine that scores texts side by side, over pages that it keeps for those that follow."""

    def __init__(self, backend: TorchBackend) -> None:
        info = backend.info
        limits = Limits(info.vocab_size, info.context_length, 16, 520, 8, 8, max_step_tokens=8192)
        self._harness = Harness(replace(limits, max_piece_tokens=512, can_score=True), backend)
        self._ids = itertools.count(1)
        self.hits = 0

    def __call__(self, asked: Sequence[_Asked]) -> list[np.ndarray]:
        """The logprobs of each text's tokens from its first one on."""
        live = dict(zip(self._ids, asked, strict=False))
        parts: dict[int, list[np.ndarray]] = {i: [] for i in live}
        lengths = dict.fromkeys(live, 0)
        waiting = list(live)
        items: list[Any] = [
            replace(opening(i, one.text, one.limit, output=OutputMode.NONE), scored_from=one.first)
            for i, one in live.items()
        ]
        while items:
            for i, found in zip(waiting, self._harness.step(*items).rows, strict=True):
                assert found.refusal is None
                lengths[i] = found.kv_length
                self.hits += found.cached_length > 0
                if found.scores is not None:
                    parts[i].append(found.scores.logprobs)
            waiting = [i for i in waiting if lengths[i] < len(live[i].text)]
            items = [row(i, lengths[i], limit=live[i].limit, output=OutputMode.NONE) for i in waiting]
        self._harness.op(Release(tuple(live)))
        return [np.concatenate(found) for found in parts.values()]
