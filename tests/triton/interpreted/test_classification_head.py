"""Scores of a classification head, interpreted on CPU, are those of the host's runner."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_service.backends.base import PromptOutputs
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.cuda.kernels import CudaKernels
from executor_service.backends.torch_backend.cuda.run.device_runner import DeviceRunner
from executor_service.backends.torch_backend.model.host_runner import HostRunner
from executor_service.backends.torch_backend.model.shard import Whole
from executor_service.contract.plan import OutputMode
from tests.conformance.kit.tiny_model import HIDDEN, write_tiny_model
from tests.support.untyped import present
from tests.triton.interpreted.device_rows import PAGE, PAGES, row

LABELS = 3


def write_classifier(path: Path) -> Path:
    """A tiny model with a head in place of its output layer."""
    write_tiny_model(path, 128)
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["score.weight"] = torch.randn(LABELS, HIDDEN)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_labels": LABELS}))
    return path


def test_vectors_are_the_heads_scores_as_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        TorchBackend, "_kernels", lambda self: CudaKernels(torch.device("cpu"), torch.float32)
    )
    backend = TorchBackend(TorchConfig(write_classifier(tmp_path / "tiny")))
    backend.load(lambda what, done: None)
    asked: dict[str, Any] = {"outputs": 0, "output": OutputMode.HIDDEN}
    rows = ForwardRows(
        [
            replace(row("a", 0, 40, **asked), prompt=PromptOutputs(last=True)),
            replace(row("b", 0, 20, **asked), prompt=PromptOutputs(last=True, total=True)),
        ]
    )
    model = backend.model
    ours = DeviceRunner(model, model.new_caches(PAGES, PAGE), PAGE).launch(rows).outputs()
    theirs = HostRunner(model, Whole(), model.new_caches(PAGES, PAGE), PAGE).launch(rows).outputs()
    for a, b in zip(ours, theirs, strict=True):
        assert present(a.hidden).shape == (LABELS,)
        np.testing.assert_allclose(present(a.hidden), present(b.hidden), atol=1e-5)
    np.testing.assert_allclose(present(ours[1].hidden_sum), present(theirs[1].hidden_sum), atol=1e-3)
    backend.close()
