"""Loading an adapter: off the device's thread, one at a time, given up when nobody waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_service.adapters.peft_directory import LoadStopped, read_adapter
from executor_service.backends.base import ModelError
from executor_service.config import ExecutorConfig
from executor_service.contract.plan import Reason, RequestRefused
from executor_service.runtime import adapter_loader as loading
from executor_service.runtime.adapter_loader import AdapterLoader
from executor_service.runtime.runtime import Runtime
from tests.support.adapter_files import QUERIES_AND_VALUES, factors, write_adapter


def config(directory: Path, **settings: Any) -> ExecutorConfig:
    return ExecutorConfig.model_validate(
        {"backend": "oracle", "pages": 16, "adapter_dir": directory, **settings}
    )


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    for seed, name in enumerate("abc"):
        write_adapter(tmp_path / name, seed=seed)
    runtime = Runtime.from_config(config(tmp_path, max_adapters=2))
    await runtime.load()
    yield runtime
    runtime.close()


@pytest.fixture
def loader(runtime: Runtime) -> AdapterLoader:
    assert runtime.loaded.adapters is not None
    return runtime.loaded.adapters


class Reader:
    """Reads when it is let, and notes on which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[str] = []
        self.threads: set[str] = set()
        self.let, self.reading, self.second = threading.Event(), threading.Event(), threading.Event()
        monkeypatch.setattr(loading, "read_adapter", self)

    def __call__(self, root: Path, path: str, *rest: Any) -> Any:
        stop: Callable[[], bool] = rest[-1]
        self.began.append(path)
        self.threads.add(threading.current_thread().name)
        (self.second if self.reading.is_set() else self.reading).set()
        while not self.let.wait(0.001):
            if stop():
                raise LoadStopped
        return read_adapter(root, path, *rest)


async def test_steps_are_computed_while_an_adapter_is_read(
    runtime: Runtime, loader: AdapterLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(monkeypatch)
    load = asyncio.create_task(loader.load("one", "a"))
    await asyncio.to_thread(reader.reading.wait)
    assert await runtime.worker.submit(lambda: threading.current_thread().name) == "device"
    assert not loader.store.registry.names
    reader.let.set()
    adapter = await load
    assert reader.threads.isdisjoint({"device", threading.current_thread().name})
    assert loader.store.registry.names == {"one": adapter}


async def test_adapters_are_read_one_at_a_time(
    loader: AdapterLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(monkeypatch)
    loads = [asyncio.create_task(loader.load(name, name)) for name in "ab"]
    await asyncio.to_thread(reader.reading.wait)
    assert reader.began == ["a"]
    reader.let.set()
    await asyncio.gather(*loads)
    assert reader.began == ["a", "b"]


async def test_a_load_that_nobody_waits_for_is_given_up_and_the_next_one_goes_on(
    loader: AdapterLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(monkeypatch)
    abandoned = asyncio.create_task(loader.load("a", "a"))
    await asyncio.to_thread(reader.reading.wait)
    following = asyncio.create_task(loader.load("b", "b"))
    abandoned.cancel()
    with pytest.raises(asyncio.CancelledError):
        await abandoned
    # The second begins once the first has ended, which it only does when it is told to stop.
    await asyncio.to_thread(reader.second.wait)
    reader.let.set()
    await following
    assert reader.began == ["a", "b"]
    assert list(loader.store.registry.names) == ["b"]


async def test_only_so_many_loads_may_wait(loader: AdapterLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(monkeypatch)
    monkeypatch.setattr(loading, "_MAX_WAITING", 2)
    loads = [asyncio.create_task(loader.load(name, name)) for name in "ab"]
    await asyncio.to_thread(reader.reading.wait)
    with pytest.raises(RequestRefused) as caught:
        await loader.load("c", "c")
    assert caught.value.refusal.reason is Reason.QUEUE
    reader.let.set()
    await asyncio.gather(*loads)


async def refused(loader: AdapterLoader, name: str, path: str) -> tuple[Reason, str]:
    with pytest.raises(RequestRefused) as caught:
        await loader.load(name, path)
    return caught.value.refusal.reason, caught.value.refusal.message


async def test_what_cannot_be_loaded_says_why_and_leaves_nothing(
    loader: AdapterLoader, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "dora", use_dora=True)
    assert await refused(loader, "x", "../a") == (
        Reason.INVALID,
        "path: must be relative to the adapter directory, without empty parts, '.' and '..'",
    )
    assert await refused(loader, "x", "none") == (
        Reason.ADAPTER,
        "path: no directory 'none' below the adapter directory",
    )
    assert await refused(loader, "x", "dora") == (
        Reason.ADAPTER_INVALID,
        "dora: adapter_config.json: use_dora: DoRA is not supported",
    )
    assert not loader.store.registry.adapters
    await loader.load("a", "a")
    assert (await refused(loader, "a", "b"))[0] is Reason.ADAPTER_NAME
    await loader.load("b", "b")
    assert (await refused(loader, "c", "c"))[0] is Reason.ADAPTER_MEMORY  # max_adapters
    assert await loader.unload("a")
    assert not await loader.unload("a")
    await loader.load("c", "c")


async def test_adapters_of_other_shapes_are_refused_where_the_model_has_shapes(tmp_path: Path) -> None:
    write_adapter(tmp_path / "good")
    write_adapter(tmp_path / "bad", factors(dict.fromkeys(QUERIES_AND_VALUES, (64, 64))))
    runtime = Runtime.from_config(config(tmp_path, backend="paged-attention"))
    await runtime.load()
    assert runtime.loaded.adapters is not None
    await runtime.loaded.adapters.load("good", "good")
    assert "an adapter of another model" in (await refused(runtime.loaded.adapters, "bad", "bad"))[1]
    runtime.close()


async def test_a_backend_without_adapters_does_not_start_with_a_directory_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime.from_config(config(tmp_path))
    runtime.backend.info = replace(runtime.backend.info, adapters=None)
    with pytest.raises(ModelError, match="has no adapters; leave out --adapter-dir"):
        runtime._load()


async def test_the_backend_knows_the_slots_and_the_memory_of_adapters_before_it_counts_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, tuple[int, ...]]] = []
    for directory in (tmp_path, None):
        settings = config(tmp_path, pages=None, adapter_slots=3, adapter_memory=1 << 20)
        runtime = Runtime.from_config(settings.model_copy(update={"adapter_dir": directory}))
        for name in ("offer_adapters", "default_pages"):

            def called(*numbers: int, name: str = name) -> int:
                calls.append((name, numbers))
                return 16

            monkeypatch.setattr(runtime.backend, name, called)
        await runtime.load()
        runtime.close()
    asked = "default_pages", calls[1][1]
    assert calls == [("offer_adapters", (3, 1 << 20)), asked, asked]
