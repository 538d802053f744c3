"""Tokens of small random models on the device, beside the CPU's and transformers'."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from executor_service.backends.torch_backend import TorchBackend, TorchConfig
from executor_service.backends.torch_backend.quantized import MIN_FP8_CAPABILITY
from executor_service.contract.plan import OutputMode
from tests.gpu.bench import PAGE, Bench, Case
from tests.model.driver import Driver, logits_of, pages_from

_PROMPTS = (5, 47, 130)  # tokens; one of them longer than a tile of attention
# Of a logit, in standard deviations of the logits.
_ROUNDING = {"float32": 1e-3, "bfloat16": 0.3, "int8": 0.4, "fp8": 0.8}
_FAMILIES = ("qwen3", "llama3-rope", "qwen2", "qwen3-moe")


def run(bench: Bench) -> Iterator[Case]:
    """A case for each family and dtype on the device.

    The reference is fp32 on CPU, greedy. Its tokens are fed to the device's model, first the prompts beside
    one another, then one token each a step: a difference at one position is not one at all that follow. It
    fails at the end if anything differs by more than rounding does.
    """
    differ = []
    new = bench.pick(48, 8)
    for family in bench.pick(_FAMILIES, ("qwen3", "qwen3-moe")):
        from transformers.utils import logging

        from tests.model.tiny import save

        logging.disable_progress_bar()
        path = bench.directory / family
        theirs = save(family, path)
        prompts = [np.random.default_rng(n).integers(3, 211, n).tolist() for n in _PROMPTS]
        cpu = TorchBackend(TorchConfig(path, dtype="float32", threads=bench.threads))
        expected, tokens = _greedy(cpu, prompts, new)
        with torch.inference_mode():
            logits = [theirs(torch.tensor([p + t])).logits[0] for p, t in zip(prompts, tokens, strict=True)]
        equal = [
            one[len(prompt) - 1 : -1].argmax(-1).tolist() == chosen
            for one, prompt, chosen in zip(logits, prompts, tokens, strict=True)
        ]
        yield {"family": family, "compared": "CPU fp32, transformers fp32", "tokens_equal": all(equal)}
        differ += [] if all(equal) else [f"{family} in transformers"]
        for dtype in _dtypes(bench.device, family):
            case: Case = {"family": family, "compared": f"CPU fp32, {bench.device} {dtype}"}
            try:
                backend = TorchBackend(TorchConfig(path, str(bench.device), dtype, threads=bench.threads))
                ours, _ = _greedy(backend, prompts, new, follow=tokens)
            except Exception as error:  # one dtype that fails leaves the others
                yield case | {"tokens_equal": False, "failed": f"{type(error).__name__}: {error}"[:1000]}
                differ.append(f"{family} {dtype}")
                continue
            agreement = _agreement(expected, ours)
            yield case | agreement
            rounding = _ROUNDING[dtype] * agreement["spread"]
            differ += [f"{family} {dtype}"] if agreement["largest_logit_given_up"] > rounding else []
    if differ:
        raise AssertionError(f"tokens differ from the CPU's: {', '.join(differ)}")


def _dtypes(device: torch.device, family: str) -> Iterator[str]:
    if device.type == "cuda":
        yield "float32"
    yield "bfloat16"
    if "moe" not in family:
        yield "int8"
        if device.type == "cpu" or torch.cuda.get_device_capability(device) >= MIN_FP8_CAPABILITY:
            yield "fp8"


def _greedy(
    backend: TorchBackend, prompts: list[list[int]], new: int, follow: list[list[int]] | None = None
) -> tuple[np.ndarray, list[list[int]]]:
    """Logits [prompts, new, vocabulary] and the tokens chosen; with `follow` those are fed instead."""
    backend.load(lambda what, done: None)
    try:
        backend.allocate(64, PAGE)
        pages = pages_from(1)
        drivers = [Driver(pages, PAGE) for _ in prompts]
        chosen: list[list[int]] = [[] for _ in prompts]
        fed, steps = prompts, []
        for n in range(new):
            rows = [d.feed(tokens, output=OutputMode.FULL) for d, tokens in zip(drivers, fed, strict=True)]
            logits = np.stack([logits_of(out)[-1] for out in backend.forward(rows)])
            steps.append(logits)
            picked = logits.argmax(-1).tolist() if follow is None else [tokens[n] for tokens in follow]
            for tokens, token in zip(chosen, picked, strict=True):
                tokens.append(token)
            fed = [[token] for token in picked]
        return np.stack(steps, axis=1), chosen
    finally:
        backend.close()


def _agreement(expected: np.ndarray, logits: np.ndarray) -> Case:
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
    }
