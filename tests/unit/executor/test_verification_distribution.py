"""Accepting a draft because it is the target's own sample keeps the target's distribution, whoever drafts.

Verify rows go through the real engine and sampler over a 64-token Markov chain: the next token's logits
depend on the last token alone, so each token sampled is compared with the softmax it should come from.
The rule that published engines use beside argmax drafts fails the same comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.backends.numpy_sampler import sample_rows
from executor_service.backends.torch_backend.cpu.kernels import CpuKernels
from executor_service.backends.torch_backend.ops import sampler as torch_sampler
from executor_service.contract import noise
from executor_service.contract.plan import Opening, OutputMode, Row, Sampling, StepPlan
from executor_service.steps.engine import Engine
from tests.support.engine_steps import execute, planned
from tests.unit.executor.fakes import EMPTY, FakeBackend, limits

VOCAB, CONTEXTS, DRAFTS = 64, 4, 3
SEQUENCES, STEPS = 256, 60  # of one engine: each sequence is verified once a step
SIGNIFICANCE = 0.01

Tokens = NDArray[np.int64]
Sampler = Callable[[NDArray[np.float32], list[ForwardRow]], list[RowOutput]]
Drafter = Callable[[Tokens, Tokens, NDArray[np.uint64]], Tokens]
"""(last tokens, positions of the tokens to draft, seeds) -> one draft each."""

_rng = np.random.default_rng(64)
TARGET = _rng.normal(0, 1.2, (CONTEXTS, VOCAB)).astype(np.float32)
"""Logits [context, token]; the context of a position is its last token modulo CONTEXTS."""
OTHER = (TARGET + _rng.normal(0, 0.8, TARGET.shape)).astype(np.float32)
"""What a draft model of the same vocabulary might say."""
LIKELIEST: Tokens = TARGET.argmax(axis=1)
LEAST_LIKELY: Tokens = TARGET.argmin(axis=1)


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64))
    shares: NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
    return shares


def always_the_likeliest(last: Tokens, positions: Tokens, seeds: NDArray[np.uint64]) -> Tokens:
    return LIKELIEST[last % CONTEXTS]


def always_the_least_likely(last: Tokens, positions: Tokens, seeds: NDArray[np.uint64]) -> Tokens:
    return LEAST_LIKELY[last % CONTEXTS]


def drawn_with_another_seed(last: Tokens, positions: Tokens, seeds: NDArray[np.uint64]) -> Tokens:
    return drawn(TARGET, last, positions, seeds + np.uint64(1 << 40))


def drawn_by_another_model_with_the_same_noise(
    last: Tokens, positions: Tokens, seeds: NDArray[np.uint64]
) -> Tokens:
    return drawn(OTHER, last, positions, seeds)


def drawn(logits: NDArray[np.float32], last: Tokens, positions: Tokens, seeds: NDArray[np.uint64]) -> Tokens:
    keys = noise.keys(seeds, positions)
    found: Tokens = (logits[last % CONTEXTS] + noise.gumbel(keys[:, None], np.arange(VOCAB))).argmax(axis=1)
    return found


DRAFTERS = [
    always_the_likeliest,
    always_the_least_likely,
    drawn_with_another_seed,
    drawn_by_another_model_with_the_same_noise,
]


class MarkovBackend(FakeBackend):
    """The chain's logits, sampled for real; the storage check of its parent is left out for speed."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self.info = replace(self.info, vocab_size=VOCAB)
        self._sampler = sampler

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        last = np.concatenate([row.tokens[len(row.tokens) - row.outputs :] for row in rows])
        return self._sampler(TARGET[last % CONTEXTS], list(rows))


@dataclass
class Counts:
    """How often each token followed each context, int64 [context, token]."""

    first: NDArray[np.int64] = field(default_factory=lambda: np.zeros((CONTEXTS, VOCAB), np.int64))
    later: NDArray[np.int64] = field(default_factory=lambda: np.zeros((CONTEXTS, VOCAB), np.int64))

    def add(self, last: int, tokens: list[int]) -> None:
        """One verification's tokens; each after the first follows an accepted draft."""
        self.first[last % CONTEXTS, tokens[0]] += 1
        for before, token in pairwise(tokens):
            self.later[before % CONTEXTS, token] += 1


def verified(drafter: Drafter, sampler: Sampler, verifications: int) -> Counts:
    """Chains of verify rows through engines of their own, until there are enough."""
    counts = Counts()
    for first_seed in range(0, -(-verifications // STEPS), SEQUENCES):
        sequences = min(SEQUENCES, -(-verifications // STEPS) - first_seed)
        run_engine(drafter, sampler, np.arange(sequences, dtype=np.uint64) + np.uint64(first_seed), counts)
    return counts


def run_engine(drafter: Drafter, sampler: Sampler, seeds: NDArray[np.uint64], counts: Counts) -> None:
    size = len(seeds)
    bounds = limits(
        vocab_size=VOCAB,
        context_length=(DRAFTS + 1) * (STEPS + 1),
        page_size=16,
        total_pages=size * ((DRAFTS + 1) * (STEPS + 1) // 16 + 1),
        max_sequences=size,
        max_rows=size,
        max_step_tokens=size * (DRAFTS + 1),
    )
    engine = Engine(MarkovBackend(sampler), bounds, epoch=1)
    openings = [
        Opening(
            cache_id=index + 1,
            tokens=np.array([index % VOCAB, 7 * index % VOCAB], np.int32),
            prompt_length=2,
            limit=1,  # the prompt's last token is fed by the first verification
            sampling=Sampling(temperature=1.0, seed=int(seed)),
            output=OutputMode.SAMPLE,
            salt=index.to_bytes(4, "little"),
        )
        for index, seed in enumerate(seeds)
    ]
    execute(engine, StepPlan(openings=tuple(openings)))
    last = np.array([opening.tokens[-1] for opening in openings], np.int64)
    lengths = np.ones(size, np.int64)
    for _ in range(STEPS):
        drafts = np.empty((DRAFTS, size), np.int64)
        before = last
        for i in range(DRAFTS):
            before = drafts[i] = drafter(before, lengths + 1 + i, seeds)
        rows = tuple(
            Row(index + 1, length, EMPTY, ids)
            for index, (length, ids) in enumerate(
                zip(lengths.tolist(), drafts.T.astype(np.int32), strict=True)
            )
        )
        for index, result in enumerate(execute(engine, StepPlan(rows=planned(rows))).rows):
            assert result.refusal is None
            counts.add(int(last[index]), result.tokens)
            last[index], lengths[index] = result.tokens[-1], result.kv_length


def published_rule(verifications: int, seed: int) -> Counts:
    """Argmax drafts accepted with min(1, p/q), else a token of the residual max(p - q, 0).

    The rule of Leviathan et al. (2023) asks for drafts that were sampled from q; these were not.
    """
    rng = np.random.default_rng(seed)
    p, q = softmax(TARGET), softmax(OTHER)
    residual = np.maximum(p - q, 0).cumsum(axis=1)
    counts = Counts()
    context = rng.integers(0, CONTEXTS, verifications)
    draft = OTHER.argmax(axis=1)[context]
    accepted = rng.random(verifications) < p[context, draft] / q[context, draft]
    point = rng.random(verifications) * residual[context, -1]
    otherwise = (residual[context] < point[:, None]).sum(axis=1)
    np.add.at(counts.first, (context, np.where(accepted, draft, otherwise)), 1)
    return counts


def p_value(observed: NDArray[np.int64]) -> float:
    """Pearson's chi-square against the target: summed over contexts, rare tokens of a context pooled.

    The upper tail of chi-square with k degrees of freedom is the regularized gamma function
    Q(k/2, x/2).
    """
    statistic, freedom = 0.0, 0
    for counts, shares in zip(observed, softmax(TARGET), strict=True):
        expected = shares * counts.sum()
        rare = expected < 5
        cells = [(float(o), float(e)) for o, e in zip(counts[~rare], expected[~rare], strict=True)]
        if rare.any() and (pooled := float(expected[rare].sum())) >= 5:
            cells.append((float(counts[rare].sum()), pooled))
        statistic += sum((o - e) ** 2 / e for o, e in cells)
        freedom += max(len(cells) - 1, 0)
    if not freedom:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def numpy_sample(logits: NDArray[np.float32], rows: list[ForwardRow]) -> list[RowOutput]:
    return sample_rows(logits, rows)


_KERNELS = CpuKernels(2)


def torch_sample(logits: NDArray[np.float32], rows: list[ForwardRow]) -> list[RowOutput]:
    return torch_sampler.sample(torch.from_numpy(logits), rows, _KERNELS)


def check(drafter: Drafter, sampler: Sampler, verifications: int) -> None:
    counts = verified(drafter, sampler, verifications)
    values = p_value(counts.first), p_value(counts.later)
    print(
        f"{drafter.__name__}: {counts.first.sum()} verifications, {counts.later.sum()} tokens behind "
        f"accepted drafts; p-values {values[0]:.3f}, {values[1]:.3f}"
    )
    assert counts.first.sum() >= verifications
    assert min(values) > SIGNIFICANCE


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_verified_tokens_follow_the_targets_softmax(drafter: Drafter) -> None:
    check(drafter, numpy_sample, 5_000)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_million_verified_tokens_follow_the_targets_softmax(drafter: Drafter) -> None:
    check(drafter, numpy_sample, 1_000_000)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_verified_tokens_of_the_torch_sampler_follow_the_targets_softmax(drafter: Drafter) -> None:
    check(drafter, torch_sample, 50_000)


def test_the_published_rule_is_told_apart() -> None:
    counts = published_rule(5_000, seed=1)
    value = p_value(counts.first)
    print(f"argmax drafts with min(1, p/q): p-value {value:.1e}")
    assert value < SIGNIFICANCE / 1000
