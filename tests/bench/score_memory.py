"""Memory and time of scoring a long prompt, beside a plain prefill of it.

usage: python -m tests.bench.score_memory MODEL [--dtype float32] [--tokens 8192]
Each is computed in a process of its own, whose peak of resident memory is told.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.contract.limits import Limits
from executor_service.contract.plan import Opening, OutputMode, PoolingKind, Sampling, StepPlan
from executor_service.steps.engine import Engine
from tests.support.engine_steps import execute

PAGE = 16
KINDS = ("plain", "scored", "scored-20", "mean")


def opening_of(kind: str, tokens: np.ndarray) -> Opening:
    """The opening of a prompt that samples a token, is scored (with 20 alternatives), or gets its mean."""
    sampling = Sampling(logprobs=20 if kind == "scored-20" else None)
    plain = Opening(1, tokens, len(tokens), 0, sampling)
    if kind == "plain":
        return plain
    if kind == "mean":
        return replace(plain, output=OutputMode.HIDDEN, pooling=PoolingKind.MEAN)
    return replace(plain, scored_from=1, output=OutputMode.NONE)


def measure(model: Path, dtype: str, kind: str, count: int) -> None:
    """Compute the prompt once, and print the peak and the time."""
    backend = TorchBackend(TorchConfig(model, dtype=dtype))
    backend.load(lambda what, done: None)
    info, pages = backend.info, -(-count // PAGE) + 1
    limits = Limits(info.vocab_size, info.context_length, PAGE, pages, 4, 4, max_step_tokens=count)
    limits = replace(limits, max_piece_tokens=512, can_score=True, hidden_size=info.hidden_size)
    backend.allocate(pages + 1, PAGE)
    engine = Engine(backend, limits, 1)
    tokens = np.random.default_rng(1).integers(0, info.vocab_size, count).astype(np.int32)
    began = time.perf_counter()
    (row,) = execute(engine, StepPlan(openings=(opening_of(kind, tokens),))).rows
    elapsed = time.perf_counter() - began
    assert row.refusal is None, row.refusal
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{kind:10} {count} tokens: peak {peak:.0f} MiB, {elapsed:.1f} s, {count / elapsed:.0f} tokens/s")
    backend.close()


def main() -> None:
    """Measure all kinds, or the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--kind", choices=KINDS)
    arguments = parser.parse_args()
    if arguments.kind:
        measure(arguments.model, arguments.dtype, arguments.kind, arguments.tokens)
        return
    for kind in KINDS:
        command = [sys.executable, "-m", "tests.bench.score_memory", *sys.argv[1:], "--kind", kind]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
