"""Tokens of small random models on the device, in transformers, and in the CPU backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor_service.backends.base import RowOutput
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.ops.quantized import MIN_FP8_CAPABILITY
from executor_service.contract.plan import OutputMode
from tests.gpu.bench import PAGE, Bench, Case
from tests.model.driver import Driver, logits_of, pages_from

GPTQ = "qwen3-gptq"
"""qwen3 with weights of 4 bits in groups of 32, which stay so on CUDA."""
FAMILIES = ("qwen3", "llama3-rope", "qwen2", "gemma3", "qwen3-moe", GPTQ)
PROMPTS: list[list[int]] = [np.random.default_rng(n).integers(3, 211, n).tolist() for n in (5, 47, 130)]
"""One of them is longer than a tile of attention."""
# Of a logit, in standard deviations of the logits. A mixture's router chooses another expert where rounding
# decides between two: so many of its positions have other logits altogether.
_ROUTED = 0.1
_ROUNDING = {"float32": 1e-3, "bfloat16": 0.3, "blocks": 0.3, "int8": 0.4, "fp8": 0.8}
_DEPENDENT_CAPABILITY = (9, 0)
_COMPILER = ("numba", "llvmlite")  # of the CPU backend's kernels: not everywhere


@dataclass(frozen=True)
class Reference:
    """What transformers computes in fp32, greedily."""

    path: Path  # of the model
    where: str
    tokens: list[list[int]]
    logits: np.ndarray  # [prompts, new, vocabulary]


EAGER, CAPTURED, DEPENDENT = "eager", "captured", "captured, dependent launches"
"""Ways of launching a step's kernels."""


def run(bench: Bench) -> Iterator[Case]:
    """A case for each family, dtype and way on the device, then one for each family in the CPU backend.

    The reference is transformers in fp32, on the device if it runs there. Its tokens are fed to the other
    model, first the prompts, then one token each a step: a difference at one position is not one
    at all that follow. On a GPU, steps launched ahead must have exactly the tokens of steps one by one. It
    fails at the end if anything differs by more than rounding does. The CPU backend is skipped where it does
    not load, unless it is what is checked.
    """
    references, wrong = {}, []
    for family in bench.pick(FAMILIES, ("qwen3", "gemma3", "qwen3-moe", GPTQ)):
        references[family] = _reference(bench, family)
        for dtype in dtypes(bench.device, family):
            for way in ways(bench.device):
                yield (case := _compared(bench, family, references[family], str(bench.device), dtype, way))
                wrong += [] if case["right"] else [f"{family} {dtype} {way}"]
    for family, reference in references.items():  # last: to compile its kernels takes a minute
        yield (case := _compared(bench, family, reference, "cpu", "float32", EAGER))
        wrong += [] if case["right"] else [f"{family} in the CPU backend"]
    if wrong:
        raise AssertionError(f"tokens differ from those of transformers: {', '.join(wrong)}")


def ways(device: torch.device) -> tuple[str, ...]:
    """Those that the device has."""
    if device.type != "cuda":
        return (EAGER,)
    dependent = torch.cuda.get_device_capability(device) >= _DEPENDENT_CAPABILITY
    return (EAGER, CAPTURED, DEPENDENT) if dependent else (EAGER, CAPTURED)


def dtypes(device: torch.device, family: str) -> Iterator[str]:
    """Those that the device has for a family."""
    if family == GPTQ:
        yield "blocks" if device.type == "cuda" else "bfloat16"
        return
    if device.type == "cuda":
        yield "float32"
    yield "bfloat16"
    if "moe" not in family:
        yield "int8"
        if device.type == "cpu" or torch.cuda.get_device_capability(device) >= MIN_FP8_CAPABILITY:
            yield "fp8"


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


def follow(backend: TorchBackend, tokens: list[list[int]]) -> np.ndarray:
    """Logits [prompts, new, vocabulary] of PROMPTS, each followed by its tokens, one a step.

    The last prompt has a step of its own: products have other kernels for as many tokens.
    """
    drivers = _drivers()
    fed, steps = PROMPTS, list[np.ndarray]()
    for following in zip(*tokens, strict=True):
        rows = [d.feed(each, output=OutputMode.FULL) for d, each in zip(drivers, fed, strict=True)]
        parts = (rows,) if steps else (rows[:2], rows[2:])
        steps.append(np.stack([logits_of(out)[-1] for part in parts for out in backend.forward(part)]))
        fed = [[token] for token in following]
    return np.stack(steps, axis=1)


def loaded(bench: Bench, path: Path, device: str, dtype: str, way: str = EAGER) -> TorchBackend:
    """The backend with a saved model and pages for `follow`; its steps are launched in this way."""
    dependent = way == DEPENDENT
    backend = TorchBackend(
        TorchConfig(path, device, dtype, threads=bench.threads, programmatic_dependent_launch=dependent)
    )
    backend.load(lambda what, done: None)
    backend.allocate(128, PAGE)
    if way != EAGER:
        backend.capture(len(PROMPTS), sum(map(len, PROMPTS)), lambda what, done: None)
    return backend


def ahead_as_one_by_one(backend: TorchBackend, new: int) -> bool:
    """Whether greedy tokens are the same where each step is launched before the one before it is read."""
    drivers, steps = _drivers(), []
    flight = backend.launch(
        ForwardRows([d.feed(p, output=OutputMode.SAMPLE) for d, p in zip(drivers, PROMPTS, strict=True)])
    )
    for _ in range(new):
        rows = [d.feed([0], output=OutputMode.SAMPLE) for d in drivers]  # the token is known to the device
        following = backend.launch(
            ForwardRows([replace(row, follows=index) for index, row in enumerate(rows)])
        )
        steps.append([_token(out) for out in flight.outputs()])
        flight = following
    flight.outputs()
    drivers = _drivers()
    fed = PROMPTS
    for step in steps:
        rows = [d.feed(each, output=OutputMode.SAMPLE) for d, each in zip(drivers, fed, strict=True)]
        fed = [[_token(out)] for out in backend.forward(rows)]
        if fed != [[token] for token in step]:
            return False
    return True


def _token(output: RowOutput) -> int:
    assert output.tokens is not None
    return int(output.tokens[0])


def _drivers() -> list[Driver]:
    pages = pages_from(1)
    return [Driver(pages, PAGE) for _ in PROMPTS]


def _reference(bench: Bench, family: str) -> Reference:
    path, new = bench.directory / family, bench.pick(48, 8)
    model = saved(family, path)
    try:
        where = str(bench.device)
        return Reference(path, where, *_greedy(model.to(where), new))
    except Exception:  # not each device has all of its operations; the CPU does
        return Reference(path, "cpu", *_greedy(model.to("cpu"), new))


@torch.inference_mode()
def _greedy(model: Any, new: int) -> tuple[list[list[int]], np.ndarray]:
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


def _compared(bench: Bench, family: str, reference: Reference, device: str, dtype: str, way: str) -> Case:
    on_cpu = device == "cpu" and bench.device.type != "cpu"
    what = f"{'CPU backend' if device == 'cpu' else device} {dtype}"
    case: Case = {"family": family, "compared": f"transformers fp32 on {reference.where}, {what}"}
    case |= {} if way == EAGER else {"way": way}
    try:
        backend = loaded(bench, reference.path, device, dtype, way)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:1000]
        missing = isinstance(error, ModuleNotFoundError) and error.name in _COMPILER
        if missing or on_cpu:  # then the CPU backend is not what is checked here
            return case | {"right": True, "skipped": reason}
        return case | {"right": False, "failed": reason}
    try:
        agreement = _agreement(reference.logits, follow(backend, reference.tokens), _ROUNDING[dtype])
        same = backend.max_pending_forwards == 1 or ahead_as_one_by_one(backend, len(reference.tokens[0]))
    except Exception as error:  # one dtype that fails leaves the others
        return case | {"right": False, "failed": f"{type(error).__name__}: {error}"[:1000]}
    finally:
        backend.close()
    routed = _ROUTED if "moe" in family and dtype != "float32" else 0.0
    near = agreement["positions_given_up"] <= routed
    return case | agreement | {"ahead_as_one_by_one": same, "right": near and same}


def _agreement(expected: np.ndarray, logits: np.ndarray, rounding: float) -> Case:
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
