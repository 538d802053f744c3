"""The steps that `tests.gpu` measures on a GPU are right: interpreted on CPU, launched ahead as there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.cuda.kernels import CudaKernels
from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner
from tests.gpu import e3_step, e9_dependent_launch
from tests.gpu.bench import PAGE
from tests.gpu.random_weights import RandomBackend
from tests.gpu.shapes import write_config

CONTEXT, ROWS = 30, 2
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what padding attends to is any number


class Interpreted(RandomBackend):
    """Its steps are those of CUDA, interpreted."""

    def _kernels(self) -> CudaKernels:
        return CudaKernels(torch.device("cpu"), torch.float32)

    @property
    def _runs_ahead(self) -> bool:
        return True


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreted]:
    path: Path = write_config("Qwen3-8B", tmp_path_factory.mktemp("models"), dry=True, layers=1)
    backend = Interpreted(TorchConfig(path, threads=1))
    backend.load(lambda what, done: None)
    backend.allocate(1 + ROWS * e3_step.pages_of_decode(CONTEXT), PAGE)
    torch.manual_seed(3)
    backend.fill_caches()
    yield backend
    backend.close()


def test_steps_launched_ahead_have_the_tokens_of_steps_one_by_one(backend: Interpreted) -> None:
    alone = e3_step._two_steps(backend, ROWS, CONTEXT, ahead=False)
    assert np.array_equal(e3_step._two_steps(backend, ROWS, CONTEXT, ahead=True), alone)


def test_a_sequence_that_goes_on_for_many_steps_stays_within_its_pages(backend: Interpreted) -> None:
    """Each token is stored in the row's page of its position."""
    rows = e3_step.decodes(backend, ROWS, CONTEXT)
    steps = 2 * PAGE + 1  # past the pages that the first step needs
    tokens = e9_dependent_launch._tokens(backend, ROWS, CONTEXT, steps)
    runner = backend._runner
    assert isinstance(runner, DeviceRunner)
    stored = runner._history.ids.view(-1, PAGE)
    for row, sampled in zip(rows, tokens.T, strict=True):
        places = np.arange(CONTEXT + 1, CONTEXT + steps)
        found = stored[row.block_table[places // PAGE], places % PAGE]
        assert found.tolist() == sampled[: steps - 1].tolist()
