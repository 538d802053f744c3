"""When a model has been loaded and its graphs are captured, no step compiles anything."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.cuda.kernels import CudaKernels
from executor_service.backends.torch_backend.cuda.linear.device_adapters import DeviceSlots
from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner
from executor_service.backends.torch_backend.model.model import Model
from executor_service.backends.torch_backend.model.shard import Whole
from executor_service.backends.torch_backend.model.uncached import compile_kernels
from executor_service.contract.plan import OutputMode, Sampling
from tests.gpu.shapes import spec_of
from tests.support.untyped import present
from tests.triton.dry.fake_device import Weights
from tests.triton.dry.unlaunched import unlaunched

STEPS = 400
PAGES, PAGE, SLOTS = 2000, 16, 4
CPU, ALLOCATE = torch.device("cpu"), torch.empty
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=1.0, top_k=5),
    Sampling(logprobs=0),
    Sampling(logprobs=20),
    Sampling(frequency_penalty=0.1),
    Sampling(repetition_penalty=1.1, logit_bias=((5, 1.0),), logprobs=3),
    Sampling(stop_token_ids=(1, 2, 3), min_tokens=9000),
]


def new_memory(*size: Any, dtype: torch.dtype = torch.float32, **how: Any) -> torch.Tensor:
    """As torch.empty. Nothing is computed, so that indices must be zeros from the beginning."""
    make = ALLOCATE if dtype.is_floating_point else torch.zeros
    return make(*size, dtype=dtype, **how)


def rows(sizes: list[tuple[int, int, int]], sampling: Sampling, slots: Iterator[int]) -> list[ForwardRow]:
    """Of so many cached and fed tokens and outputs each, with adapters in these slots."""
    made, first = [], 1
    for start, count, outputs in sizes:
        pages = -(-(start + count) // PAGE)
        history = np.zeros(start + count, np.int32)
        table = (np.arange(first, first + pages, dtype=np.int32) % (PAGES - 1)) + 1
        first += pages
        row = ForwardRow(start, history[start:], history, start, table, outputs, OutputMode.SAMPLE, sampling)
        made.append(replace(row, slot=next(slots)))
    return made


def sizes_of(rng: random.Random) -> list[tuple[int, int, int]]:
    """A step as schedulers send them: decodes, verifications, remainders of prompts, chunks, or several."""
    kinds = rng.sample(["decodes", "verifications", "remainders", "chunks"], rng.choice([1, 1, 2, 3]))
    sizes: list[tuple[int, int, int]] = []
    for kind in kinds:
        if kind == "decodes":
            sizes += [(rng.randrange(1, 1500), 1, 1) for _ in range(rng.randrange(1, 130))]
        elif kind == "verifications":
            drafts = [rng.randrange(1, 16) for _ in range(rng.randrange(1, 20))]
            sizes += [(rng.randrange(1, 1500), 1 + n, 1 + n) for n in drafts]
        elif kind == "remainders":
            sizes += [(PAGE * rng.randrange(30), rng.randrange(1, 17), 1) for _ in range(rng.randrange(1, 4))]
        else:
            sizes += [
                (rng.randrange(3000), rng.randrange(17, 1500), rng.randrange(2))
                for _ in range(rng.randrange(1, 3))
            ]
    return sizes


def test_no_step_compiles_anything_after_the_capture(capsys: pytest.CaptureFixture[str]) -> None:
    # Of the 8B model only what kernels are compiled for; products of matrices are small.
    spec = replace(
        spec_of("Qwen3-8B"),
        layers=1,
        hidden_size=64,
        intermediate_size=64,
        vocab_size=512,
        context_length=8192,
    )
    rng = random.Random(1)
    with unlaunched() as compiled, mock.patch.object(torch, "empty", new_memory):
        with torch.inference_mode():
            kernels = CudaKernels(CPU, torch.bfloat16)
            model = Model(Weights(spec), kernels, lambda what, done: None)
            adapters = DeviceSlots(spec, present(kernels.low_rank), Whole(), CPU)
            adapters.reserve(SLOTS)
        compile_kernels(model, Whole(), spec.context_length)
        runner = DeviceRunner(model, model.new_caches(PAGES, PAGE), PAGE, adapters)
        runner.capture(256, 2048, lambda what, done: None)
        before = Counter(compiled)
        for _ in range(STEPS):
            numbers = rng.choice(([-1], [2], range(-1, SLOTS)))
            step = rows(sizes_of(rng), rng.choice(SAMPLINGS), (rng.choice(n) for n in repeat(numbers)))
            runner.launch(ForwardRows(step)).outputs()
            assert compiled == before, (
                compiled - before,
                [(r.start, len(r.tokens), r.outputs, r.slot) for r in step],
            )
    with capsys.disabled():
        print(f"\ncompiled before {STEPS} random steps, and nothing after: {dict(before)}")
    assert before["_attention_kernel"] == 2  # of short and of long rows
    # Of one, two and three parts; in this model all have the same number of inputs and outputs, or nearly.
    assert before["_shrink_kernel"] <= 4
    assert before["_expand_kernel"] <= 4
