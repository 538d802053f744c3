"""What is kept in 8 bits and what is dequantized; on two ranks, with adapters, and by the other dtypes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from executor_service.backends.base import Backend
from executor_service.backends.factory import make_backend
from executor_service.backends.torch_backend.files.scaled_numbers import plain
from executor_service.backends.torch_backend.files.tensor_shapes import expected_shapes
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from executor_service.backends.torch_backend.parallel.cut import Cut, CutCheckpoint
from executor_service.config import ExecutorConfig
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.quantized import test_awq, test_compressed_tensors, test_fp8, test_gptq
from tests.model.quantized.written import (
    PAGE,
    TOKENS,
    TOLERANCE,
    Quantize,
    loaded,
    our_logits,
    their_logits,
    write,
)
from tests.model.random_adapters import random_adapter

WORD = "no kernel multiplies"
COMPRESSED = test_compressed_tensors.CASES
FORMATS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "fp8": (test_fp8.in_blocks(32, 24), test_fp8.CONFIG | test_fp8.BLOCKS),
    "fp8 per tensor": (test_fp8.whole, test_fp8.CONFIG),
    "gptq": (test_gptq.gptq(), test_gptq.CONFIG),
    "gptq with act-order": (test_gptq.gptq(ordered=True), test_gptq.CONFIG | {"desc_act": True}),
    "awq": (test_awq.gemm(), test_awq.CONFIG),
    **{
        name: (COMPRESSED[name][1], test_compressed_tensors.config(COMPRESSED[name][0], COMPRESSED[name][2]))
        for name in ("W8A8", "W8A16", "fp8 per row")
    },
}


def written(name: str, path: Path) -> PreTrainedModel:
    quantize, config = FORMATS[name]
    return write("llama-untied-bias", path, quantize, config)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_of_8_bits_stay_small_on_cpu_and_the_log_tells_of_others(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = written(name, tmp_path)
    backend = loaded(tmp_path)
    sizes = {key: parameter.numel() for key, parameter in theirs.named_parameters()}
    quantized = sum(size for key, size in sizes.items() if key.endswith("_proj.weight"))
    plain_bytes = 4 * sum(
        size for key, size in sizes.items() if key.endswith(("tokens.weight", "head.weight"))
    )
    each = (backend.memory_bytes()["weights"] - plain_bytes) / quantized
    backend.close()
    if name == "gptq with act-order":
        assert WORD in caplog.text
        assert each >= 4
    else:
        assert WORD not in caplog.text
        # Scales in fp32 of groups of 8 take half a byte for each number, and headers take some.
        assert each < (2.2 if name in ("gptq", "awq") else 1.7)


@pytest.mark.parametrize("name", ["W8A8", "fp8 per row", "gptq"])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_other_dtypes_read_them_too(
    name: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = written(name, tmp_path)
    backend = loaded(tmp_path, dtype)
    assert (WORD in caplog.text) == ((dtype, name) != ("int8", "W8A8"))
    exact, ours = their_logits(theirs), our_logits(backend)
    backend.close()
    assert np.abs(ours - exact).mean() < 0.03 * exact.std()


@pytest.mark.parametrize("name", ["fp8", "W8A16", "gptq with act-order"])
def test_adapters_are_added_to_them(name: str, tmp_path: Path) -> None:
    dense, results = tmp_path / "dense", []
    written(name, tmp_path).save_pretrained(dense)
    for path in (tmp_path, dense):
        backend = loaded(path)
        backend.load_adapter(0, backend.prepare_adapter(random_adapter(backend, 1, 8)))
        backend.allocate(16, PAGE)
        row = replace(Driver(pages_from(1), PAGE).feed(TOKENS, outputs=len(TOKENS)), slot=0)
        results.append(logits_of(backend.forward([row])[0]))
        assert np.abs(results[-1] - our_logits(backend)).max() > 0.1
        backend.close()
    assert np.abs(results[0] - results[1]).max() < TOLERANCE


@pytest.mark.parametrize("name", FORMATS)
def test_a_rank_reads_its_part_of_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    weights = written(name, tmp_path).state_dict()
    checkpoint = open_checkpoint(tmp_path)
    for rank in range(2):
        cut = Cut(checkpoint.spec, rank, 2)
        part = CutCheckpoint(checkpoint, cut)
        for key, shape in expected_shapes(checkpoint.spec):
            if len(shape) == 2:
                expected = weights[key][cut.part(key) or ()]
                torch.testing.assert_close(plain(part.read_weight(key)), expected, rtol=1e-6, atol=0)
    checkpoint.close()


def backend_of(path: Path, ranks: int) -> Backend:
    config = ExecutorConfig(model=path, device="cpu", threads=1, tensor_parallel=ranks)  # type: ignore[call-arg]
    return make_backend(config.backend_settings, config.follower_flags)


@pytest.mark.long
def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    """Blocks of 24 columns do not end where a rank's part does, so some parts are dequantized."""
    theirs = written("fp8", tmp_path)
    backend = backend_of(tmp_path, 2)
    try:
        backend.load(lambda what, done: None)
        backend.allocate(16, PAGE)
        row = Driver(pages_from(1), PAGE).feed(TOKENS, outputs=len(TOKENS))
        assert np.abs(logits_of(backend.forward([row])[0]) - their_logits(theirs)).max() < TOLERANCE
    finally:
        backend.close()
