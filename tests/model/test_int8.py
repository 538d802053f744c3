"""The int8 mode: the same model but for rounding, bitwise the same in any company, under its own name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.random_adapters import random_adapter
from tests.model.tiny import save

PAGE = 16
TOKENS = np.random.default_rng(4).integers(3, 211, 90).tolist()


def load(path: Path, dtype: str) -> TorchBackend:
    backend = TorchBackend(TorchConfig(path, dtype=dtype, threads=2))
    backend.load(lambda what, done: None)
    return backend


@pytest.fixture(
    scope="module", params=["llama-untied-bias", "gemma3", "olmo2", "qwen3-moe", "hunyuan_v1_dense"]
)
def backends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TorchBackend, TorchBackend]]:
    path = tmp_path_factory.mktemp("int8")
    save(request.param, path)
    pair = load(path, "float32"), load(path, "int8")
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
    assert 0 < np.abs(rounded - exact).mean() < 0.03 * exact.std()  # twice as far as with bf16


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
            adapter = random_adapter(backends[0], slot, 8)
            backend.load_adapter(slot, backend.prepare_adapter(adapter))
    exact, rounded = (logits(backend, [90], slot=1) for backend in backends)
    assert np.abs(exact - logits(backends[0], [90])).max() > 0.1
    assert 0 < np.abs(rounded - exact).mean() < 0.03 * exact.std()  # twice as far as with bf16
    assert np.array_equal(rounded, logits(backends[1], [90], company=7, slot=1))
    assert np.array_equal(rounded, logits(backends[1], [1, 1, 30, 17, 40, 1], company=3, slot=1))


def test_it_says_what_it_is(backends: tuple[TorchBackend, TorchBackend]) -> None:
    exact, rounded = backends
    assert rounded.info.dtype == "int8"
    assert rounded.info.fingerprint != exact.info.fingerprint
    assert 2 * rounded.info.kv_bytes_per_token == exact.info.kv_bytes_per_token  # pages hold fp16
    assert rounded.memory_bytes()["weights"] < 0.5 * exact.memory_bytes()["weights"]


@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_a_page_takes_the_memory_that_it_is_said_to_take(
    page_size: int, backends: tuple[TorchBackend, TorchBackend]
) -> None:
    for backend in backends:
        backend.allocate(5, page_size)
        assert backend.memory_bytes()["kv"] == 5 * backend.page_bytes(page_size)


def test_other_devices_do_not_have_it(tmp_path: Path) -> None:
    save("llama", tmp_path)
    with pytest.raises(ModelError, match="dtype int8 runs on cpu and cuda only, not on 'meta'"):
        TorchBackend(TorchConfig(tmp_path, device="meta", dtype="int8")).load(lambda what, done: None)
