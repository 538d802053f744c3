"""Models of every architecture on the device's path, interpreted, give the logits of plain torch.

Their steps are captured, and replayed with other contents.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.cuda.kernels import CudaKernels
from executor_service.backends.torch_backend.cuda.run import graphs
from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner
from executor_service.backends.torch_backend.ops.kernels import Kernels, PlainKernels
from executor_service.contract.plan import OutputMode
from tests.model.tiny import save
from tests.unit.executor.rows import make_row

CPU, PAGE, PAGES = torch.device("cpu"), 16, 20
TOKENS = np.random.default_rng(5).integers(3, 211, 90).tolist()
TABLES = [[3, 1, 5, 2, 4, 6], [9, 7, 8, 10, 12, 11]]
# Prompts; a decode beside a chunk; verifications; decodes.
STEPS = [[(0, 30), (0, 3)], [(30, 1), (3, 40)], [(31, 5), (43, 3)], [(36, 1), (46, 1)]]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding is whatever lay in memory


def loaded(path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> TorchBackend:
    backend = TorchBackend(TorchConfig(path))
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_kernels", lambda: kernels)
        backend.load(lambda what, done: None)
    return backend


def rows_of(step: list[tuple[int, int]]) -> list[ForwardRow]:
    return [
        make_row(TOKENS[: start + count], table, start=start, outputs=count, output=OutputMode.FULL)
        for (start, count), table in zip(step, TABLES, strict=True)
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3-windows", "qwen3-moe", "gemma3", "gemma2", "gpt_oss", "phi3", "olmo2", "smollm3"),
        *("glm4_moe", "qwen2_moe", "ministral3", "hunyuan_v1_dense"),
    ],
)
def test_captured_steps_give_the_logits_of_plain_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(name, tmp_path)
    plain = loaded(tmp_path, PlainKernels(CPU, torch.float32), monkeypatch)
    plain.allocate(PAGES, PAGE)
    model = loaded(tmp_path, CudaKernels(CPU, torch.float32), monkeypatch).model
    runner = DeviceRunner(model, model.new_caches(PAGES, PAGE), PAGE)
    for field, size in {"_SHORT_TOKENS": (8,), "_LONG_TOKENS": (48,), "_LONG_OUTPUTS": (48,)}.items():
        monkeypatch.setattr(graphs, field, size)
    runner.capture(4, 160, lambda what, done: None)
    for step in STEPS:
        rows = rows_of(step)
        for ours, theirs in zip(runner.launch(ForwardRows(rows)).outputs(), plain.forward(rows), strict=True):
            assert ours.logits is not None
            assert theirs.logits is not None
            np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-4)
