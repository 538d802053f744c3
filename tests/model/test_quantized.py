"""Models whose linear layers have weights and inputs of 8 bits, as on CUDA: near fp32, and no experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from tests.bench.perplexity import CudaInt8
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.tiny import save

PAGE = 16
TOKENS = np.random.default_rng(4).integers(3, 211, 60).tolist()


def load(backend: TorchBackend) -> TorchBackend:
    backend.load(lambda what, done: None)
    return backend


def logits(backend: TorchBackend) -> np.ndarray:
    """Of TOKENS fed in two chunks and decoded at their end."""
    backend.allocate(20, PAGE)
    driver, outs = Driver(pages_from(1), PAGE), []
    for first, end in ((0, 40), (40, 59), (59, 60)):
        row = driver.feed(TOKENS[first:end], outputs=end - first)
        outs.append(logits_of(backend.forward([row])[0]))
    return np.concatenate(outs)


@pytest.mark.parametrize("family", ["llama-untied-bias", "llama-heads"])
def test_logits_come_close_to_those_of_fp32(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    exact, wide, int8, fp8 = (
        load(backend)
        for backend in (
            *(
                TorchBackend(TorchConfig(tmp_path, dtype=dtype, threads=1))
                for dtype in ("float32", "bfloat16")
            ),
            CudaInt8(TorchConfig(tmp_path, dtype="int8", threads=1)),
            TorchBackend(TorchConfig(tmp_path, dtype="fp8", threads=1)),
        )
    )
    expected = logits(exact)
    for backend, most in ((int8, 0.02), (fp8, 0.12)):
        error = np.abs(logits(backend) - expected).mean() / expected.std()
        assert 0.003 < error < most
        assert backend.info.kv_bytes_per_token == wide.info.kv_bytes_per_token
        assert backend.memory_bytes()["weights"] < 0.8 * wide.memory_bytes()["weights"]
    assert (int8.info.dtype, fp8.info.dtype) == ("int8", "fp8")
    assert len({backend.info.fingerprint for backend in (exact, wide, int8, fp8)}) == 4
    for backend in (exact, wide, int8, fp8):
        backend.close()


def test_mixtures_of_experts_are_refused(tmp_path: Path) -> None:
    save("qwen3-moe", tmp_path)
    for backend in (
        CudaInt8(TorchConfig(tmp_path, dtype="int8", threads=1)),
        TorchBackend(TorchConfig(tmp_path, dtype="fp8", threads=1)),
    ):
        with pytest.raises(ModelError, match="is not for mixtures of experts on this device"):
            load(backend)
