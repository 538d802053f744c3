"""Compiles Triton kernels into Triton's cache, by as many processes as there are cores."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

import torch

from tests.gpu.bench import Case

_launches: list[tuple[Any, bool]] = []  # what the processes find: launches can't be sent to them


def compile_launches(launches: Sequence[tuple[Any, bool]], until: float) -> Case:
    """Compile each launch, dependent or not, until the clock says so; how many were by then, and how long.

    One that fails does so again, as a case, when it is launched.
    """
    began, done = time.monotonic(), 0
    _launches[:] = launches
    processes = min(os.cpu_count() or 1, len(launches))
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:  # this process leaves the device alone
        with suppress(TimeoutError):
            futures = [pool.submit(_compile_one, number) for number in range(len(launches))]
            for _ in as_completed(futures, timeout=max(until - time.monotonic(), 0)):
                done += 1
        pool.shutdown(cancel_futures=True)
    return {"compiled": done, "wanted": len(launches), "seconds": time.monotonic() - began}


def _compile_one(number: int) -> None:
    from executor_service.backends.torch_backend.cuda.launch.launch import dependent_launches

    launch, dependent = _launches[number]
    torch.set_num_threads(1)
    with suppress(Exception), dependent_launches(on=dependent):
        launch.compiled()
