"""Blocks of GGUF files as they are: the same model but for rounding, bitwise the same in any company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend import config
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.factory import torch_backend, torch_config
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, plain
from executor_service.backends.torch_backend.files.tensor_shapes import expected_shapes
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from executor_service.backends.torch_backend.parallel.cut import Cut, CutCheckpoint
from executor_service.backends.torch_backend.settings import TorchSettings
from tests.model.architectures import config_of
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.gguf_models import convert
from tests.model.random_adapters import random_adapter
from tests.model.tiny import save_random

PAGE = 16
TOKENS = np.random.default_rng(4).integers(3, 90, 90).tolist()
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
_TYPE = gguf.GGMLQuantizationType
DEFAULT = (_TYPE.Q4_1, _TYPE.Q8_0)  # of the default model
OTHERS = [(one, one) for one in (_TYPE.Q4_0, _TYPE.Q5_0, _TYPE.Q5_1, _TYPE.Q8_0)]
Kinds = tuple[gguf.GGMLQuantizationType, gguf.GGMLQuantizationType]
Case = tuple[str, dict[str, Any], Kinds]
LIKE_DEFAULT: list[Case] = [
    ("mistral", {"sliding_window": None}, DEFAULT),  # rows of q and k are stored in another order
    ("phi3", {}, DEFAULT),  # q, k and v are stored in one
    ("mixtral", {}, DEFAULT),
    ("gpt_oss", {"head_dim": 16, "layer_types": None}, DEFAULT),  # experts have biases
    ("glm4_moe", {"moe_intermediate_size": 64}, DEFAULT),  # and one that all tokens have
    ("glm", {}, DEFAULT),
]
CASES: list[Any] = [
    *LIKE_DEFAULT,
    *[pytest.param(("mistral", {"sliding_window": None}, kinds), marks=pytest.mark.slow) for kinds in OTHERS],
]


def written(architecture: str, changes: dict[str, Any], kinds: Kinds, path: Path) -> Path:
    save_random(config_of(architecture, "plain", **WIDE | changes), path / "model")
    return convert(path / "model", path / "model.gguf", *kinds)


def load(path: Path, dtype: str) -> TorchBackend:
    backend = TorchBackend(TorchConfig(path, dtype=dtype, threads=2))
    backend.load(lambda what, done: None)
    return backend


@pytest.fixture(scope="module", params=CASES, ids=str)
def backends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TorchBackend, TorchBackend]]:
    architecture, changes, kinds = request.param
    path = written(architecture, changes, kinds, tmp_path_factory.mktemp("blocks"))
    pair = load(path, "float32"), load(path, "blocks")
    yield pair
    for backend in pair:
        backend.close()


def logits(backend: TorchBackend, chunks: list[int], company: int = 0, slot: int = -1) -> np.ndarray:
    """Of TOKENS fed in chunks, beside some other rows, half of which have another adapter."""
    backend.allocate(80, PAGE)
    pages = pages_from(1)
    driver, first, outs = Driver(pages, PAGE), 0, []
    for count in chunks:
        others = [
            replace(Driver(pages, PAGE).feed(TOKENS[i : i + 3]), slot=-1 if slot < 0 else i % 2 - 1)
            for i in range(company)
        ]
        row = replace(driver.feed(TOKENS[first : first + count], outputs=count), slot=slot)
        outs.append(logits_of(backend.forward([*others, row])[-1]))
        first += count
    return np.concatenate(outs)


def test_logits_come_close_to_those_of_fp32(backends: tuple[TorchBackend, TorchBackend]) -> None:
    exact, rounded = (logits(backend, [90]) for backend in backends)
    # Not the mean: where two experts are about equal, rounding may choose the other.
    assert 0 < np.median(np.abs(rounded - exact)) < 0.03 * exact.std()


def test_a_row_is_bitwise_the_same_in_any_batch_and_any_chunks(
    backends: tuple[TorchBackend, TorchBackend],
) -> None:
    alone = logits(backends[1], [90])
    assert np.array_equal(alone, logits(backends[1], [90], company=7))
    assert np.array_equal(alone, logits(backends[1], [1, 1, 30, 17, 40, 1], company=3))


def test_rows_with_adapters_come_close_to_fp32_and_stay_apart(
    backends: tuple[TorchBackend, TorchBackend],
) -> None:
    for backend in backends:
        for slot in range(2):
            backend.load_adapter(slot, backend.prepare_adapter(random_adapter(backends[0], slot, 8)))
    exact, rounded = (logits(backend, [90], slot=1) for backend in backends)
    assert np.abs(exact - logits(backends[0], [90])).max() > 0.1
    assert 0 < np.median(np.abs(rounded - exact)) < 0.03 * exact.std()
    assert np.array_equal(rounded, logits(backends[1], [90], company=7, slot=1))
    assert np.array_equal(rounded, logits(backends[1], [1, 1, 30, 17, 40, 1], company=3, slot=1))


def test_it_says_what_it_is(backends: tuple[TorchBackend, TorchBackend]) -> None:
    exact, rounded = backends
    assert rounded.info.dtype == "blocks"
    assert "blocks" in exact.info.supported_dtypes
    assert rounded.info.fingerprint != exact.info.fingerprint
    assert 2 * rounded.info.kv_bytes_per_token == exact.info.kv_bytes_per_token  # pages hold fp16
    assert rounded.memory_bytes()["weights"] < 0.5 * exact.memory_bytes()["weights"]


@pytest.mark.parametrize(("architecture", "changes", "kinds"), LIKE_DEFAULT)
def test_a_rank_reads_its_part_of_the_blocks(
    architecture: str, changes: dict[str, Any], kinds: Kinds, tmp_path: Path
) -> None:
    path = written(architecture, changes, kinds, tmp_path)
    whole, checkpoint = open_checkpoint(path), open_checkpoint(path, blocks=True)
    for ranks in (1, 2):
        for rank in range(ranks):
            cut = Cut(checkpoint.spec, rank, ranks)
            part = CutCheckpoint(checkpoint, cut)
            for key, shape in expected_shapes(checkpoint.spec):
                if len(shape) == 2:
                    weight = part.read_weight(key)
                    assert isinstance(weight, ScaledNumbers) or key.endswith("mlp.gate.weight")
                    assert torch.equal(plain(weight), whole.read(key, cut.part(key)))
    whole.close()
    checkpoint.close()


@pytest.mark.slow
def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    path = written(*LIKE_DEFAULT[0], tmp_path)
    alone = load(path, "blocks")
    expected = logits(alone, [90])
    alone.close()
    settings = TorchSettings(model=path, device="cpu", dtype="blocks", threads=1, tensor_parallel=2)
    flags = [
        "--backend",
        "torch",
        "--model",
        str(path),
        "--device",
        "cpu",
        "--dtype",
        "blocks",
        "--threads",
        "1",
    ]
    backend = torch_backend(settings, [*flags, "--tensor-parallel", "2"])
    try:
        backend.load(lambda what, done: None)
        backend.allocate(16, PAGE)
        row = Driver(pages_from(1), PAGE).feed(TOKENS, outputs=len(TOKENS))
        assert np.abs(logits_of(backend.forward([row])[0]) - expected).mean() < 0.03 * expected.std()
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("written", "device", "expected"),
    [
        (b"GGUF", "cpu", "blocks"),
        (b"else", "cpu", "float32"),
        (b"", "cpu", "float32"),
        (b"GGUF", "meta", "float32"),
    ],
)
def test_it_is_the_default_for_gguf_files_on_cpu(
    written: bytes, device: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(written)
    (tmp_path / "directory").mkdir()
    for dtype, taken in (("auto", expected), ("float32", "float32"), ("int8", "int8")):
        assert torch_config(TorchSettings(model=path, device=device, dtype=dtype)).dtype == taken  # type: ignore[arg-type]
    assert torch_config(TorchSettings(model=tmp_path / "directory", device=device)).dtype == "float32"


def test_other_devices_do_not_have_it(tmp_path: Path) -> None:
    path = written(*LIKE_DEFAULT[0], tmp_path)
    with pytest.raises(ModelError, match="dtype blocks is for cpu and cuda; the device is 'meta'"):
        TorchBackend(TorchConfig(path, device="meta", dtype="blocks")).load(lambda what, done: None)


def test_another_version_of_the_arithmetic_is_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(*LIKE_DEFAULT[0], tmp_path)
    found = []
    for version in (1, 2):
        monkeypatch.setitem(config._VERSIONS, "blocks", version)
        pair = [load(path, dtype) for dtype in ("blocks", "float32")]
        found.append([backend.info.fingerprint for backend in pair])
        for backend in pair:
            backend.close()
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]
