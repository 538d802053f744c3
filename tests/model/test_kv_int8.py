"""Pages of 8 bits: the same model but for rounding, bitwise the same in any company, under its own name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.kernel_choice import make_kernels
from executor_service.backends.torch_backend.ops.quantized import check_fp8
from tests.bench.perplexity import Fp8Pages
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.tiny import save

PAGE = 16
TOKENS = np.random.default_rng(4).integers(3, 211, 90).tolist()
CHUNKS = [1, 1, 30, 17, 40, 1]


def load(path: Path, dtype: str, kv_dtype: str) -> TorchBackend:
    backend = TorchBackend(TorchConfig(path, dtype=dtype, kv_dtype=kv_dtype, threads=2))
    backend.load(lambda what, done: None)
    return backend


@pytest.fixture(scope="module", params=product(["llama-untied-bias", "qwen3"], ["float32", "int8"]), ids=str)
def backends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TorchBackend, TorchBackend]]:
    """One without pages of 8 bits, one with them."""
    family, dtype = request.param
    path = tmp_path_factory.mktemp("kv")
    save(family, path)
    pair = load(path, dtype, "auto"), load(path, dtype, "int8")
    yield pair
    for backend in pair:
        backend.close()


def logits(backend: TorchBackend, chunks: list[int], company: int = 0, page_size: int = PAGE) -> np.ndarray:
    """Of TOKENS fed in chunks, beside some other rows."""
    backend.allocate(80, page_size)
    pages = pages_from(1)
    driver, first, outs = Driver(pages, page_size), 0, []
    for count in chunks:
        others = [Driver(pages, page_size).feed(TOKENS[i : i + 3]) for i in range(company)]
        row = driver.feed(TOKENS[first : first + count], outputs=count)
        outs.append(logits_of(backend.forward([*others, row])[-1]))
        first += count
    return np.concatenate(outs)


def test_logits_come_close_to_those_of_wider_pages(backends: tuple[TorchBackend, TorchBackend]) -> None:
    exact, rounded = (logits(backend, [90]) for backend in backends)
    assert 0 < np.abs(rounded - exact).mean() < 0.02 * exact.std()


def test_a_row_is_bitwise_the_same_in_any_batch_and_any_chunks(
    backends: tuple[TorchBackend, TorchBackend],
) -> None:
    alone = logits(backends[1], [90])
    assert np.array_equal(alone, logits(backends[1], [90], company=7))
    assert np.array_equal(alone, logits(backends[1], CHUNKS, company=3))


@pytest.mark.parametrize("page_size", [8, 16])
def test_a_forward_without_the_cache_gives_the_logits_of_one_with_it(
    page_size: int, backends: tuple[TorchBackend, TorchBackend]
) -> None:
    expected = logits(backends[1], CHUNKS, page_size=page_size)
    [output] = backends[1].forward_once([np.array(TOKENS, np.int32)], frozenset({"logits"}))
    assert output.logits is not None
    assert np.array_equal(output.logits, expected)


def test_forks_and_truncations_go_on_as_if_nothing_had_been(
    backends: tuple[TorchBackend, TorchBackend],
) -> None:
    backend = backends[1]
    expected = logits(backend, [90])
    backend.allocate(80, PAGE)
    driver = Driver(pages_from(1), PAGE)
    backend.forward([driver.feed(TOKENS[:70])])
    fork = driver.fork(backend, 55)  # within a page, which is copied
    backend.forward([driver.feed([5] * 20)])
    [forked] = backend.forward([fork.feed(TOKENS[55:], outputs=35)])
    driver.truncate(41)
    [truncated] = backend.forward([driver.feed(TOKENS[41:], outputs=49)])
    assert np.array_equal(logits_of(forked), expected[55:])
    assert np.array_equal(logits_of(truncated), expected[41:])


def test_it_says_what_it_is(backends: tuple[TorchBackend, TorchBackend]) -> None:
    wide, narrow = backends
    assert narrow.info.dtype == wide.info.dtype
    assert narrow.info.fingerprint != wide.info.fingerprint
    spec = narrow.model.spec
    vectors = 2 * spec.layers * spec.kv_heads
    itemsize = wide.model.kernels.cache_dtype.itemsize
    assert wide.info.kv_bytes_per_token == vectors * spec.head_dim * itemsize
    assert narrow.info.kv_bytes_per_token == vectors * (spec.head_dim + 2)  # a scale has 2 bytes
    assert narrow.memory_bytes()["weights"] == wide.memory_bytes()["weights"]


@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_a_page_takes_the_memory_that_it_is_said_to_take(
    page_size: int, backends: tuple[TorchBackend, TorchBackend]
) -> None:
    narrow = backends[1]
    narrow.allocate(5, page_size)
    assert narrow.memory_bytes()["kv"] == 5 * narrow.page_bytes(page_size)


def test_the_same_memory_holds_nearly_twice_the_pages_of_16_bits(
    backends: tuple[TorchBackend, TorchBackend],
) -> None:
    wide, narrow = backends
    size, bits = wide.model.spec.head_dim, 8 * wide.model.kernels.cache_dtype.itemsize
    expected = bits / 8 * size / (size + 2)  # but for padding
    found = narrow.default_pages(PAGE, 1, 1) / wide.default_pages(PAGE, 1, 1)
    assert found == pytest.approx(expected, rel=0.03)


def test_fp8_pages_are_for_devices_that_have_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in ("float32", "int8"):
        with pytest.raises(ModelError, match=f"kv-dtype fp8 is not for dtype {dtype} on cpu; int8 is"):
            make_kernels("cpu", dtype, "fp8", 1)
    assert make_kernels("cpu", "bfloat16", "fp8", 1).cache_dtype == torch.float8_e4m3fn
    capability = torch.cuda, "get_device_capability"
    device = torch.device("cuda:0")
    monkeypatch.setattr(*capability, lambda device: (8, 6))
    with pytest.raises(ModelError, match=r"kv-dtype fp8 needs .* 8\.9; 'cuda:0' has 8\.6"):
        check_fp8("kv-dtype fp8", device)
    monkeypatch.setattr(*capability, lambda device: (8, 9))
    check_fp8("kv-dtype fp8", device)
    with pytest.raises(ValueError, match="kv_dtype 'fp4' is none of auto, int8, fp8"):
        TorchConfig(Path(), kv_dtype="fp4")


def test_fp8_pages_come_close_to_fp32(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    exact, narrow = load(tmp_path, "float32", "auto"), Fp8Pages(TorchConfig(tmp_path, threads=1))
    narrow.load(lambda what, done: None)
    expected = logits(exact, [90])
    assert 0 < np.abs(logits(narrow, CHUNKS) - expected).mean() < 0.05 * expected.std()
    assert narrow.info.fingerprint != exact.info.fingerprint
    exact.close()
    narrow.close()
