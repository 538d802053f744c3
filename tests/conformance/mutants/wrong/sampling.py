"""The sampler: caught by test_sampling.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from executor_service.backends import numpy_sampler
from executor_service.contract import noise
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def noise_at_the_wrong_position() -> None:
    """the noise is keyed by the last token's position instead of the new one's"""
    wrap(noise, "key", lambda original, seed, position: original(seed, position - 1))
    wrap(noise, "keys", lambda original, seeds, positions: original(seeds, positions - 1))


@mutant()
def penalties_see_the_prompt() -> None:
    """presence and frequency penalties count the prompt's tokens too"""

    def choose(original: Any, logits: Any, history: Any, prompt_length: int, sampling: Any) -> Any:
        return original(logits, history, 0, sampling)

    wrap(numpy_sampler, "choose", choose)


@mutant()
def min_tokens_off_by_one() -> None:
    """stop ids are let through one token too early"""

    def choose(original: Any, logits: Any, history: Any, prompt_length: int, sampling: Any) -> Any:
        earlier = replace(sampling, min_tokens=max(sampling.min_tokens - 1, 0))
        return original(logits, history, prompt_length, earlier)

    wrap(numpy_sampler, "choose", choose)


@mutant()
def nucleus_before_temperature() -> None:
    """top-p looks at the probabilities of the raw logits"""

    def keep(original: Any, scaled: Any, sampling: Any) -> Any:
        return original(scaled * np.float32(sampling.temperature or 1.0), sampling)

    wrap(numpy_sampler, "keep", keep)
