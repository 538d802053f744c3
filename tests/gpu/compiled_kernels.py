"""Compiles the Triton kernels of later experiments into Triton's cache, in as many processes as cores.

Each process runs what the experiments run, on the device, with models of one layer: kernels don't depend on
how many there are. A kernel that can't be compiled fails here, in the first minute, with its model's name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context

import torch

from executor_service.contract.plan import Sampling
from tests.bench.step_time import rows_of
from tests.gpu import check_tokens, references
from tests.gpu.bench import Bench, Case

_CONTEXT = 48  # tokens


def run(bench: Bench) -> Iterator[Case]:
    """A case for each model and dtype, with the seconds it took: of whole steps, then of check's models."""
    shapes = bench.pick(("Qwen3-8B", "Qwen3-0.6B", "Qwen3-30B-A3B", "Qwen3-4B"), ("Qwen3-0.6B",))
    jobs: dict[str, Callable[[], None]] = {}
    for name in shapes:
        jobs[name] = partial(_steps, bench, name, dependent=False)
        jobs[f"{name}, dependent launches"] = partial(_steps, bench, name, dependent=True)
    for family in bench.pick(check_tokens.FAMILIES, ()):
        jobs[family] = partial(_tokens, bench, family)
    processes = min(bench.pick(os.cpu_count() or 1, 2), len(jobs))
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:  # this process leaves the device alone
        names = {pool.submit(_timed, job): name for name, job in jobs.items()}
        for done in as_completed(names):
            yield {"compared": names[done], **done.result()}


def _timed(job: Callable[[], None]) -> Case:
    began = time.perf_counter()
    torch.set_num_threads(1)
    try:
        job()
    except Exception as error:  # one model that fails leaves the others
        return {"failed": f"{type(error).__name__}: {error}"[:1000]}
    return {"seconds": time.perf_counter() - began}


def _steps(bench: Bench, name: str, *, dependent: bool) -> None:
    """Prompts and decodes launched kernel by kernel, then what is captured."""
    if dependent and check_tokens.DEPENDENT not in check_tokens.ways(bench.device):
        return
    rows, prompt = bench.pick(128, 4), bench.pick(2048, 48)
    backend = bench.backend(name, max(rows * 2 * _CONTEXT, prompt), dependent=dependent, layers=1)
    try:
        for sampling in (Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=1)):
            for count in (1, 2, rows):
                backend.forward(rows_of(count, 1, _CONTEXT, sampling, backend.info.vocab_size))
            backend.forward(rows_of(1, prompt, 0, sampling, backend.info.vocab_size))
        backend.capture(rows, 2 * prompt, lambda what, done: None)
    finally:
        backend.close()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _tokens(bench: Bench, family: str) -> None:
    """A few tokens of one of check's models in each of its dtypes."""
    path = bench.directory / "compiled" / family
    references.saved(family, path)
    for dtype in check_tokens.dtypes(bench.device, family):
        backend = check_tokens.loaded(bench, path, str(bench.device), dtype)
        try:
            check_tokens.follow(backend, [[3] * 2] * len(references.PROMPTS))
        finally:
            backend.close()
