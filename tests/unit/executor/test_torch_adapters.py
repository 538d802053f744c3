"""Adapters of the torch backend on GGUF files and in 16 bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from executor_service.adapters.weights import PARENTS, AdapterWeights, LowRankChange, make_weights
from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.files.tensor_shapes import expected_shapes
from executor_service.backends.torch_backend.files.weights import Checkpoint, open_checkpoint
from tests.model.random_adapters import random_adapter
from tests.unit.executor.model_files import write_config, write_gguf, write_model
from tests.unit.executor.rows import last_logits, make_row

TOKENS = [3, 17, 4, 4, 22, 9, 0, 3, 11]


def load(path: Path, dtype: str = "float32") -> TorchBackend:
    backend = TorchBackend(TorchConfig(path, dtype=dtype, threads=1))
    backend.load(lambda what, done: None)
    backend.allocate(4, 16)
    return backend


def logits(backend: TorchBackend, slot: int = -1) -> np.ndarray:
    row = make_row(TOKENS, [1], outputs=len(TOKENS))
    row.slot = slot
    return last_logits(backend, row)


def write_changed(path: Path, checkpoint: Checkpoint, adapter: AdapterWeights) -> None:
    """A directory with the checkpoint's weights, in which the adapter's changes are."""
    tensors = {name: checkpoint.read(name).float() for name, _ in expected_shapes(checkpoint.spec)}
    for change in adapter.changes:
        name = f"model.layers.{change.layer}.{PARENTS[change.module]}.{change.module}.weight"
        tensors[name] += adapter.scale * (torch.from_numpy(change.b) @ torch.from_numpy(change.a))
    path.mkdir()
    write_config(path)
    save_file(tensors, path / "model.safetensors")


def directory(path: Path) -> Path:
    write_model(path / "tiny")
    return path / "tiny"


def test_an_adapter_of_a_gguf_file_changes_what_the_same_change_of_the_weights_does(tmp_path: Path) -> None:
    """GGUF has Llama's queries and keys in another order than adapters have."""
    write_gguf(tmp_path / "tiny.gguf")
    backend = load(tmp_path / "tiny.gguf")
    adapter = random_adapter(backend, 1, 4)
    backend.load_adapter(3, backend.prepare_adapter(adapter))
    write_changed(tmp_path / "changed", open_checkpoint(tmp_path / "tiny.gguf"), adapter)
    expected = logits(load(tmp_path / "changed"))
    assert np.abs(expected - logits(backend)).max() > 0.1
    np.testing.assert_allclose(logits(backend, 3), expected, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_an_adapter_is_as_exact_as_the_model(dtype: str, tmp_path: Path) -> None:
    exact, rounded = (load(directory(tmp_path), kind) for kind in ("float32", dtype))
    for backend in (exact, rounded):
        backend.load_adapter(3, backend.prepare_adapter(random_adapter(exact, 1, 4)))
    changes = [np.abs(logits(backend, 3) - logits(backend)).mean() for backend in (exact, rounded)]
    errors = [np.abs(logits(exact, slot) - logits(rounded, slot)).mean() for slot in (-1, 3)]
    assert min(changes) > 5 * max(errors)
    assert errors[1] < 2 * errors[0]


def test_factors_that_a_dtype_is_too_narrow_for_are_refused_by_name(tmp_path: Path) -> None:
    factors = np.ones((1, 16), np.float32), np.full((16, 1), 1e5, np.float32)
    adapter = make_weights(1, 1.0, [LowRankChange(1, "o_proj", *factors)], b"")
    backend = load(directory(tmp_path), "float16")
    with pytest.raises(ModelError, match="o_proj in layer 1 has values that are too large for torch"):
        backend.prepare_adapter(adapter)
    load(directory(tmp_path), "bfloat16").prepare_adapter(adapter)


def test_on_cuda_the_memory_that_is_offered_to_adapters_is_left_out_of_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, page, room = load(directory(tmp_path)), 16, 40 << 30
    monkeypatch.setattr(backend.model.kernels, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room, 80 << 30))
    monkeypatch.setattr("executor_service.backends.torch_backend.backend.step_bytes", lambda *_: 0)
    monkeypatch.setattr(backend, "page_bytes", lambda size: 1 << 20)
    before = backend.default_pages(page, 8, 64)
    backend.offer_adapters(8, 5 << 30)
    assert before - backend.default_pages(page, 8, 64) == 5 << 10
