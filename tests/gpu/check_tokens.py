"""Tokens of small random models on the device, in transformers, and in the CPU backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from executor_service.backends.base import RowOutput
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.ops.quantized import MIN_FP8_CAPABILITY
from executor_service.contract.plan import OutputMode
from tests.gpu import check_adapters
from tests.gpu.bench import PAGE, Bench, Case
from tests.gpu.references import GPTQ, PROMPTS, Reference, agreement_of, reference_of
from tests.model.driver import Driver, logits_of, pages_from

FAMILIES = ("qwen3", "llama3-rope", "qwen2", "gemma3", "qwen3-moe", GPTQ)
"""Each dtype and way."""
OTHERS = (
    "gpt_oss", "gemma2", "mixtral", "olmoe", "qwen2_moe", "glm4_moe", "minimax_m2", "granitemoehybrid",
    "exaone4", "glm4", "glm", "mistral", "phi3", "olmo2", "olmo3", "granite", "smollm3", "seed_oss",
    "ernie4_5", "hunyuan_v1_dense", "ministral3", "qwen3-windows",
)  # fmt: skip
"""In 32 and 16 bits; not one by one with dependent launches."""
_NARROW_PAGES = ("qwen3", "gemma3", "mistral")
"""With keys and values of 8 bits, too."""
# Of a logit, in standard deviations of the logits. A mixture's router chooses another expert where rounding
# decides between two: so many of its positions have other logits altogether.
_ROUTED = 0.1
ROUNDING = {"float32": 1e-3, "bfloat16": 0.3, "blocks": 0.3, "int8": 0.4, "fp8": 0.8}
_ROUNDING_OF_PAGES = {"int8": 0.2, "fp8": 0.8}
_MIXTURES = frozenset({
    "qwen3-moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "glm4_moe", "minimax_m2",
})  # fmt: skip
_DEPENDENT_CAPABILITY = (9, 0)
_PROCESSES = 10
_COMPILER = ("numba", "llvmlite")  # of the CPU backend's kernels: not everywhere


EAGER, CAPTURED, DEPENDENT = "eager", "captured", "captured, dependent launches"
EAGER_DEPENDENT = "eager, dependent launches"
"""Ways of launching a step's kernels."""


def run(bench: Bench) -> Iterator[Case]:
    """A case for each family, dtype and way on the device, and one for each of FAMILIES in the CPU backend.

    The reference is transformers in fp32, on the device if it runs there. Its tokens are fed to the other
    model, first the prompts, then one token each a step: a difference at one position is not one
    at all that follow. On a GPU, steps launched ahead must have exactly the tokens of steps one by one. It
    fails at the end if anything differs by more than rounding does. The CPU backend is skipped where it does
    not load, unless it is what is checked.
    """
    jobs: dict[str, Callable[[], list[Case]]] = {
        family: partial(_of_family, bench, family)
        for family in bench.pick((*FAMILIES, *OTHERS), ("qwen3", "gemma3", "qwen3-moe", GPTQ))
    }
    jobs["adapters"] = partial(check_adapters.cases, bench)
    wrong = []
    for name, cases in _done(bench, jobs):
        for case in cases:
            yield case
            wrong += [] if case["right"] else [f"{name}: {case['compared']} {case.get('way', '')}".strip()]
    if wrong:
        raise AssertionError(f"tokens differ from those of transformers: {'; '.join(wrong)}")


def _done(bench: Bench, jobs: dict[str, Callable[[], list[Case]]]) -> Iterator[tuple[str, list[Case]]]:
    """What each job found, as they end. On a GPU they share it, in a process each: they wait a lot."""
    if bench.device.type != "cuda":
        yield from ((name, job()) for name, job in jobs.items())
        return
    with ProcessPoolExecutor(_PROCESSES, get_context("fork")) as pool:  # this one leaves the device alone
        names = {pool.submit(_alone, job): name for name, job in jobs.items()}
        for done in as_completed(names):
            yield names[done], done.result()


def _alone(job: Callable[[], list[Case]]) -> list[Case]:
    torch.set_num_threads(1)
    try:
        return job()
    except Exception as error:  # one family that fails leaves the others
        return [{"compared": "", "right": False, "failed": f"{type(error).__name__}: {error}"[:1000]}]


def _of_family(bench: Bench, family: str) -> list[Case]:
    """On the device in each dtype and way, then in the CPU backend."""
    reference, device = reference_of(bench, family), str(bench.device)
    every, found = ways(bench.device), list[Case]()
    fewer = [way for way in every if way != EAGER_DEPENDENT]
    for dtype in dtypes(bench.device, family):
        for way in every if family in FAMILIES else fewer:
            found.append(_compared(bench, family, reference, device, dtype, way))
    if family in _NARROW_PAGES:
        for pages in ("int8", "fp8") if bench.device.type == "cuda" else ("int8",):
            for way in fewer:
                found.append(_compared(bench, family, reference, device, "bfloat16", way, pages))
    if family in FAMILIES:  # to compile its kernels takes a minute
        found.append(_compared(bench, family, reference, "cpu", "float32", EAGER))
    return found


def ways(device: torch.device) -> tuple[str, ...]:
    """Those that the device has."""
    if device.type != "cuda":
        return (EAGER,)
    dependent = torch.cuda.get_device_capability(device) >= _DEPENDENT_CAPABILITY
    return (EAGER, CAPTURED, *((DEPENDENT, EAGER_DEPENDENT) if dependent else ()))


def dtypes(device: torch.device, family: str) -> Iterator[str]:
    """Those that the device has for a family."""
    if family == GPTQ:
        yield "blocks" if device.type == "cuda" else "bfloat16"
        return
    if device.type == "cuda":
        yield "float32"
    yield "bfloat16"
    if family in FAMILIES and family not in _MIXTURES:
        yield "int8"
        if device.type == "cpu" or torch.cuda.get_device_capability(device) >= MIN_FP8_CAPABILITY:
            yield "fp8"


def follow(
    backend: TorchBackend, tokens: list[list[int]], slots: Sequence[int] = (-1,) * len(PROMPTS)
) -> np.ndarray:
    """Logits [prompts, new, vocabulary] of PROMPTS, each followed by its tokens, one a step.

    The last prompt has a step of its own: products have other kernels for as many tokens. `slots`: of the
    adapter of each.
    """
    drivers = _drivers()
    fed, steps = PROMPTS, list[np.ndarray]()
    for following in zip(*tokens, strict=True):
        rows = [
            replace(driver.feed(each, output=OutputMode.FULL), slot=slot)
            for driver, each, slot in zip(drivers, fed, slots, strict=True)
        ]
        parts = (rows,) if steps else (rows[:2], rows[2:])
        steps.append(np.stack([logits_of(out)[-1] for part in parts for out in backend.forward(part)]))
        fed = [[token] for token in following]
    return np.stack(steps, axis=1)


def loaded(
    bench: Bench,
    path: Path,
    device: str,
    dtype: str,
    way: str = EAGER,
    pages: str = "auto",
    adapters: int = 0,
) -> TorchBackend:
    """The backend with a saved model and pages for `follow`; its steps are launched in this way.

    `pages`: the dtype of keys and values. `adapters`: so many may be loaded.
    """
    dependent = way in (DEPENDENT, EAGER_DEPENDENT)
    config = TorchConfig(
        path, device, dtype, threads=bench.threads, kv_dtype=pages, programmatic_dependent_launch=dependent
    )
    backend = TorchBackend(config)
    backend.load(lambda what, done: None)
    if adapters:
        backend.offer_adapters(adapters, 1 << 22)
    backend.allocate(128, PAGE)
    if way in (CAPTURED, DEPENDENT):
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


def not_loaded(error: Exception, *, spare: bool = False) -> Case:
    """What a backend that did not load makes of a case. `spare`: it need not."""
    reason = f"{type(error).__name__}: {error}"[:1000]
    missing = isinstance(error, ModuleNotFoundError) and error.name in _COMPILER
    return {"right": True, "skipped": reason} if missing or spare else {"right": False, "failed": reason}


def _compared(
    bench: Bench, family: str, reference: Reference, device: str, dtype: str, way: str, pages: str = "auto"
) -> Case:
    on_cpu = device == "cpu" and bench.device.type != "cpu"
    what = f"{'CPU backend' if device == 'cpu' else device} {dtype}"
    case: Case = {"family": family, "compared": f"transformers fp32 on {reference.where}, {what}"}
    case |= {} if way == EAGER else {"way": way}
    case |= {} if pages == "auto" else {"pages": pages}
    try:
        backend = loaded(bench, reference.path, device, dtype, way, pages)
    except Exception as error:
        return case | not_loaded(error, spare=on_cpu)  # then the CPU backend is not what is checked here
    try:
        rounding = ROUNDING[dtype] + _ROUNDING_OF_PAGES.get(pages, 0.0)
        agreement = agreement_of(reference.logits, follow(backend, reference.tokens), rounding)
        same = backend.max_pending_forwards == 1 or ahead_as_one_by_one(backend, len(reference.tokens[0]))
    except Exception as error:  # one dtype that fails leaves the others
        return case | {"right": False, "failed": f"{type(error).__name__}: {error}"[:1000]}
    finally:
        backend.close()
    routed = _ROUTED if family in _MIXTURES and dtype != "float32" else 0.0
    near = agreement["positions_given_up"] <= routed
    return case | agreement | {"ahead_as_one_by_one": same, "right": near and same}
