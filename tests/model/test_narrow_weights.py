"""A checkpoint in 16 bits takes 16 bits of memory on CPU, and gives the logits of its numbers in fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.random_adapters import random_adapter
from tests.model.tiny import save

PAGE = 16
TOKENS = np.random.default_rng(4).integers(3, 211, 40).tolist()


def logits(backend: TorchBackend) -> np.ndarray:
    """Of a row with an adapter and one without."""
    adapter = random_adapter(backend, 1, 8) if backend.info.adapters else None
    if adapter is not None:
        backend.load_adapter(0, backend.prepare_adapter(adapter))
    backend.allocate(16, PAGE)
    pages = pages_from(1)
    rows = [
        replace(Driver(pages, PAGE).feed(TOKENS, outputs=40), slot=slot)
        for slot in (-1, 0 if adapter else -1)
    ]
    return np.concatenate([logits_of(out) for out in backend.forward(rows)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "llama-untied-bias", "qwen3-moe"])
def test_it_computes_in_fp32_and_takes_half_the_memory(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save(name, tmp_path)
    file, results, sizes = tmp_path / "model.safetensors", [], []
    tensors = {key: tensor.to(dtype) for key, tensor in load_file(file).items()}
    for stored in (tensors, {key: tensor.float() for key, tensor in tensors.items()}):
        save_file(stored, file)
        backend = TorchBackend(TorchConfig(tmp_path, threads=1))
        backend.load(lambda what, done: None)
        results.append(logits(backend))
        sizes.append(backend.memory_bytes()["weights"])
        backend.close()
    assert np.array_equal(results[0], results[1])
    assert 2 * sizes[0] == sizes[1]
