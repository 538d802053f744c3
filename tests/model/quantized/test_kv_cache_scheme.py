"""Scales of keys and values in a checkpoint are left, with a word in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from tests.model.quantized import test_compressed_tensors, test_fp8
from tests.model.quantized.written import (
    Quantize,
    Tensors,
    assert_equal,
    change_quantization,
    change_tensors,
    our_logits,
    refused,
    write,
)

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
LAYOUT, QUANTIZE, ARGUMENTS = test_compressed_tensors.CASES["fp8 per row"]
CHECKPOINTS: dict[str, tuple[Quantize, dict[str, Any], Any]] = {
    "compressed-tensors": (QUANTIZE, test_compressed_tensors.config(LAYOUT, ARGUMENTS), SCHEME),
    "fp8": (test_fp8.whole, test_fp8.CONFIG | {"activation_scheme": "static"}, "static"),
}


def with_8_bits(path: Path) -> np.ndarray:
    backend = TorchBackend(TorchConfig(path, kv_dtype="int8", threads=1))
    backend.load(lambda what, done: None)
    try:
        return our_logits(backend)
    finally:
        backend.close()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_its_scales_are_left_and_the_log_says_so(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantize, config, scheme = CHECKPOINTS[name]
    theirs = write("llama", tmp_path, quantize, config)
    before = with_8_bits(tmp_path)

    def add_scales(tensors: Tensors) -> None:
        for layer in range(3):
            prefix = f"model.layers.{layer}.self_attn."
            for scale in ("k_scale", "v_scale", "k_proj.output_scale"):
                tensors[prefix + scale] = torch.tensor(0.05)

    change_tensors(tmp_path, add_scales)
    refused(tmp_path, "_scale", "no use for it")
    assert not caplog.records
    change_quantization(tmp_path, kv_cache_scheme=scheme)
    assert_equal(tmp_path, theirs)
    assert np.array_equal(with_8_bits(tmp_path), before)
    assert all("kv_cache_scheme: its scales" in record.message for record in caplog.records)
    assert caplog.records
