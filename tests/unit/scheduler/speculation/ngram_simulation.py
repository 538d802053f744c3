"""n-gram speculation on written texts in front of a step time that is a formula, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable

from scheduler_service.core.speculation.controller import Candidate, Controller
from scheduler_service.core.speculation.drafters import NgramDrafter, ngram_populations
from scheduler_service.core.speculation.step_time import Work

MOST = 8  # drafts
Text = tuple[list[int], list[int]]
"""A prompt and what the model says to it."""


def cpu_step_s(work: Work) -> float:
    """About what the default model takes on two cores."""
    return 25e-3 + 2.5e-3 * work.tokens


def gpu_step_s(work: Work) -> float:
    """Flat up to 64 tokens, then slowly rising."""
    return 8e-3 + 0.05e-3 * max(0, work.tokens - 64)


def chat(rng: random.Random, length: int) -> Text:
    """Words as often as in prose (Zipf), in no order: pairs recur, what follows them mostly does not."""
    words = [int(1.0004 ** rng.randrange(24_000)) for _ in range(length + 200)]
    return words[:200], words[200:]


def copying(rng: random.Random, length: int) -> Text:
    """A prompt that is said again with one token in 30 changed."""
    source = [rng.randrange(1000, 40_000) for _ in range(length)]
    return source, [token if rng.random() > 1 / 30 else rng.randrange(1000, 40_000) for token in source]


def tokens_per_second(
    texts: list[Text], step_s: Callable[[Work], float], length: int | None, noise: float = 0.05
) -> float:
    """Of all texts decoded at once; each starts anew when it ends, until all have ended once.

    length: of all proposals; None: the controller's choice.
    """
    rng = random.Random(5)
    controller, pool = Controller(MOST), ngram_populations()
    known = [list(prompt) for prompt, _ in texts]
    at = [0] * len(texts)
    drafters = [NgramDrafter(tokens, pool) for tokens in known]
    for drafter in drafters:
        drafter.update()
    now, emitted = 0.0, 0
    while all(i < len(text[1]) for i, text in zip(at, texts, strict=True)):
        base = Work(len(texts), len(texts), sum(map(len, known)))
        candidates: dict[int, Candidate] = {}
        for i, drafter in enumerate(drafters):
            candidate = drafter.candidate(min(MOST, len(texts[i][1]) - at[i] - 1))
            if candidate is not None:
                candidates[i] = candidate
        if length is None:
            lengths = controller.lengths(base, list(candidates.values()))
        else:
            lengths = [min(length, candidate.most) for candidate in candidates.values()]
        drafts: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(texts)), ())
        for i, count in zip(candidates, lengths, strict=True):
            drafts[i] = drafters[i].drafts(count)
        work = Work(base.rows, base.tokens + sum(lengths), base.context)
        seconds = step_s(work) * rng.lognormvariate(0.0, noise)
        controller.target.observe(work, seconds)
        now += seconds
        for i, (_, said) in enumerate(texts):
            count = 1
            while count <= len(drafts[i]) and drafts[i][count - 1] == said[at[i] + count - 1]:
                count += 1
            known[i] += said[at[i] : at[i] + count]
            at[i] += count
            emitted += count
            drafters[i].update()
    return emitted / now
