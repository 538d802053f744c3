"""Random plans: the interpreted device runner, a step ahead of its answers, and the host's, which waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from executor_service.backends.base import PendingForward
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.cuda.kernels import CudaKernels
from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner
from executor_service.backends.torch_backend.model.host_runner import HostRunner
from executor_service.backends.torch_backend.model.shard import Whole
from executor_service.contract.plan import OutputMode, RequestRefused, Sampling, StepResult
from tests.model.tiny import save_random
from tests.support.untyped import present
from tests.unit.executor.fakes import VOCAB, limits
from tests.unit.executor.rows import make_row
from tests.unit.executor.two_ways import TwoWays, assert_same

# Padding tokens attend to nothing, and what they are then is whatever lay in memory.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CONTEXT = 48
BOUNDS = limits(total_pages=600, context_length=CONTEXT)
SMALLEST: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": CONTEXT,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip


class Ahead(TorchBackend):
    """Its steps are those of CUDA, interpreted."""

    open_rows = 0  # that were launched before the host knew where they start

    def _kernels(self) -> CudaKernels:
        return CudaKernels(torch.device("cpu"), torch.float32)

    def _new_runner(self, page_size: int) -> DeviceRunner:
        return DeviceRunner(self.model, self._caches, page_size)

    def launch(self, rows: ForwardRows) -> PendingForward:
        self.open_rows += sum(row.slack > 0 for row in rows)
        return super().launch(rows)


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TorchBackend, Ahead]]:
    """One that computes on the host, and one that runs ahead."""
    path = tmp_path_factory.mktemp("model")
    save_random(Qwen3Config(**SMALLEST), path)
    pair = TorchBackend(TorchConfig(path, threads=1)), Ahead(TorchConfig(path))
    for backend in pair:
        backend.load(lambda what, done: None)
    yield pair
    for backend in pair:
        backend.close()


class Oracle:
    """Next tokens from another cache of the host's, for drafts that are right."""

    def __init__(self, backend: TorchBackend) -> None:
        page = BOUNDS.page_size
        self._table = list(range(1, 1 + CONTEXT // page))
        caches = backend.model.new_caches(1 + len(self._table), page)
        self._runner = HostRunner(backend.model, Whole(), caches, page)

    def __call__(self, known: list[int], count: int, seed: int) -> list[int]:
        """The next `count` tokens; fewer at the end of the context, none after nothing."""
        found: list[int] = []
        while known and len(found) < count and len(known) + len(found) < CONTEXT:
            whole = make_row(
                known + found, self._table, output=OutputMode.SAMPLE, sampling=Sampling(seed=seed)
            )
            (output,) = self._runner.launch(ForwardRows([whole])).outputs()
            found.append(int(present(output.tokens)[0]))
        return found


def assert_nearly_same(
    ours: StepResult | RequestRefused, theirs: StepResult | RequestRefused, *, exact: bool
) -> None:
    """Tokens, lengths, refusals and free pages are the same; numbers are within 1e-4."""
    if isinstance(ours, StepResult) and isinstance(theirs, StepResult):
        for mine, other in zip(ours.rows, theirs.rows, strict=True):
            for name in ("logprobs", "top_logprobs", "logits"):
                a, b = getattr(mine, name), getattr(other, name)
                assert (a is None) == (b is None), name
                if a is not None and b is not None:
                    np.testing.assert_allclose(a, b, atol=1e-4)
                setattr(mine, name, None)
                setattr(other, name, None)
    assert_same(ours, theirs, exact=exact)


def check(backends: tuple[TorchBackend, Ahead], seed: int, steps: int) -> None:
    """Compare the answers to one schedule."""
    for backend in backends:
        backend.allocate(BOUNDS.total_pages + 1, BOUNDS.page_size)
    oracle = Oracle(backends[0])
    ways = TwoWays(seed, BOUNDS, backends=backends, continues=oracle, compare=assert_nearly_same)
    ways.client.drafts, ways.client.odd = 60, 2
    ways.run(steps)


def test_a_step_ahead_answers_like_one_that_waits(backends: tuple[TorchBackend, Ahead]) -> None:
    for seed in range(3):
        check(backends, seed, 12)
    assert backends[1].open_rows


@pytest.mark.slow
def test_so_it_does_1000_times(backends: tuple[TorchBackend, Ahead]) -> None:
    before = backends[1].open_rows
    for seed in range(1000):
        check(backends, seed, 12)
    print(f"\n1000 schedules, {backends[1].open_rows - before} rows behind unread verifications")
    assert backends[1].open_rows - before > 500
