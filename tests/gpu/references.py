"""What transformers computes in fp32, which the tokens of `check` are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.gpu.bench import Bench, Case

GPTQ = "qwen3-gptq"
"""qwen3 with weights of 4 bits in groups of 32, which stay so on CUDA."""
PROMPTS: list[list[int]] = [np.random.default_rng(n).integers(3, 211, n).tolist() for n in (5, 47, 130)]
"""One of them is longer than a tile of attention."""


@dataclass(frozen=True)
class Reference:
    """What transformers computes in fp32, greedily."""

    path: Path  # of the model
    where: str
    tokens: list[list[int]]
    logits: np.ndarray  # [prompts, new, vocabulary]


def saved(family: str, path: Path) -> Any:
    """A random model of this family, written to `path`: transformers' own of it."""
    from transformers.utils import logging

    from tests.model.tiny import save

    logging.disable_progress_bar()
    if family != GPTQ:
        return save(family, path)
    from tests.model.quantized.test_gptq import CONFIG, gptq
    from tests.model.quantized.written import write
    from tests.model.tiny import CONFIGS

    config = CONFIGS["qwen3"]()
    config.update({"head_dim": 32, "intermediate_size": 128})  # whole groups
    return write(config, path, gptq(group=32), CONFIG | {"group_size": 32})


def reference_of(bench: Bench, family: str) -> Reference:
    """Of a random model of this family, which is saved."""
    path, new = bench.directory / family, bench.pick(48, 8)
    model = saved(family, path)
    try:
        where = str(bench.device)
        return Reference(path, where, *greedy(model.to(where), new))
    except Exception:  # not each device has all of its operations; the CPU does
        return Reference(path, "cpu", *greedy(model.to("cpu"), new))


@torch.inference_mode()
def greedy(model: Any, new: int) -> tuple[list[list[int]], np.ndarray]:
    """Tokens and their logits, each of the whole text anew."""
    tokens: list[list[int]] = []
    logits = []
    for prompt in PROMPTS:
        text, steps = list(prompt), []
        for _ in range(new):
            steps.append(model(torch.tensor([text], device=model.device)).logits[0, -1].float().cpu().numpy())
            text.append(int(steps[-1].argmax()))
        tokens.append(text[len(prompt) :])
        logits.append(np.stack(steps))
    return tokens, np.stack(logits)


def agreement_of(expected: np.ndarray, logits: np.ndarray, rounding: float) -> Case:
    """How far logits [prompts, new, vocabulary] are from those expected."""
    best, other = expected.argmax(-1), logits.argmax(-1)
    given_up = expected.max(-1) - np.take_along_axis(expected, other[..., None], -1)[..., 0]
    return {
        "tokens_equal": bool((best == other).all()),
        "agreement": float((best == other).mean()),
        "positions": int(best.size),
        "largest_difference": float(np.abs(expected - logits).max()),
        "spread": float(expected.std()),
        # How much lower the reference has the differing tokens: near 0 where rounding decided a tie.
        "largest_logit_given_up": float(given_up.max()),
        "positions_given_up": float((given_up > rounding * expected.std()).mean()),
    }
