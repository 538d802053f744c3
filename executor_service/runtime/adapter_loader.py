"""`AdapterLoader`: reads adapters beside the device and the event loop, and has the engine take them over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from service_kit.logs import Log

from executor_service.adapters.inside import NoSuchAdapter, PathRefused
from executor_service.adapters.peft_directory import AdapterBounds, LoadStopped, read_adapter
from executor_service.adapters.registry import LoadedAdapter
from executor_service.adapters.store import AdapterStore
from executor_service.adapters.weights import AdapterTarget
from executor_service.backends.base import AdapterBackend
from executor_service.contract.limits import Limits
from executor_service.contract.model_error import ModelError
from executor_service.contract.plan import Reason, RequestRefused
from executor_service.steps.worker import DeviceWorker

log = Log(__name__)

_MAX_WAITING = 64  # loads of all clients together; one of them reads


class AdapterLoader:
    """One for each loaded model. All methods: the event loop's thread."""

    def __init__(
        self,
        root: Path,
        backend: AdapterBackend,
        model: bytes,
        target: AdapterTarget,
        limits: Limits,
        worker: DeviceWorker,
        store: AdapterStore,
    ) -> None:
        """`root`: the adapter directory; `model`: its fingerprint; `target`: what its adapters may change."""
        self._root, self._backend, self._model, self._target = root, backend, model, target
        self._bounds = AdapterBounds(limits.max_adapter_rank, limits.max_adapter_bytes)
        self._worker, self.store = worker, store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter")
        self._turn = asyncio.Lock()  # held from the first byte read until the engine has the adapter
        self._waiting = 0

    async def load(self, name: str, path: str) -> LoadedAdapter:
        """Load the adapter in directory `path` under a name; one at a time. Raises RequestRefused.

        Cancelled, the reading stops soon; an adapter that was read is loaded all the same.
        """
        if self._waiting >= _MAX_WAITING:
            raise RequestRefused(Reason.QUEUE, f"{_MAX_WAITING} adapters are being loaded; wait")
        stopped = threading.Event()
        task = asyncio.create_task(self._load(name, path, stopped.is_set))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            stopped.set()
            task.add_done_callback(_look_away)
            raise

    async def unload(self, name: str) -> bool:
        """Unload a name after the queued steps; returns whether it was loaded."""
        return await self._worker.submit(partial(self.store.remove, name), kept=True)

    def close(self) -> None:
        """End the thread; what it reads is not wanted any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _load(self, name: str, path: str, stop: Callable[[], bool]) -> LoadedAdapter:
        """Read an adapter when its turn comes, and have the engine take it over."""
        self._waiting += 1
        try:
            async with self._turn:
                loop = asyncio.get_running_loop()
                read = await loop.run_in_executor(self._thread, self._read, name, path, stop)
                adapter = await self._worker.submit(partial(self.store.add, name, read), kept=True)
        finally:
            self._waiting -= 1
        log.info("adapter loaded", adapter=name, fingerprint=adapter.fingerprint.hex(), bytes=adapter.bytes)
        return adapter

    def _read(self, name: str, path: str, stop: Callable[[], bool]) -> LoadedAdapter:
        """Read, check and prepare an adapter; the loader's own thread."""
        admit = partial(self.store.registry.check_room, name)
        try:
            weights = read_adapter(self._root, path, self._target, self._model, self._bounds, admit, stop)
            prepared = self._backend.prepare_adapter(weights)
        except PathRefused as error:
            raise RequestRefused(Reason.INVALID, f"path: {error}") from None
        except NoSuchAdapter:
            raise RequestRefused(
                Reason.ADAPTER, f"path: no directory {path!r} below the adapter directory"
            ) from None
        except ModelError as error:
            raise RequestRefused(Reason.ADAPTER_INVALID, f"{path}: {error}") from None
        held = self._target.held_bytes(weights.rank, weights.keys, weights.bytes)
        return LoadedAdapter(weights, prepared, held)


def _look_away(task: asyncio.Task[LoadedAdapter]) -> None:
    """Take the outcome of a load that nobody waits for any more."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, LoadStopped | RequestRefused):
        log.error("an adapter could not be loaded", error)
