"""`AdapterAdmin`: loads and unloads adapters on all executors, while streams run."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from paceline import errors
from service_kit.logs import Log

from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.errors import RETRY_AFTER_S, ErrorReason, ServiceError
from scheduler_service.link.adapters import RemoteAdapters, why_not_loaded
from scheduler_service.link.executor import ExecutorLink
from scheduler_service.link.pool import LinkPool
from scheduler_service.link.required_adapters import WantedAdapters
from scheduler_service.model import ServedAdapter

log = Log(__name__)

T = TypeVar("T")

_REASONS: Mapping[type[errors.PacelineError], ErrorReason] = {
    errors.InvalidRequest: ErrorReason.INVALID_REQUEST,
    errors.NotFound: ErrorReason.MODEL_NOT_FOUND,
    errors.DuplicateRequest: ErrorReason.ADAPTER_NAME,
    errors.QueueFull: ErrorReason.ADAPTER_MEMORY,
    errors.Unauthenticated: ErrorReason.PERMISSION,
    errors.Unsupported: ErrorReason.UNSUPPORTED,
}
"""Of an executor's refusals; all others mean that it does not answer."""


class AdapterAdmin:
    """A load or an unload goes on when its caller has left. Loads run one at a time."""

    def __init__(
        self, core: StepScheduler, pool: LinkPool, wanted: WantedAdapters, request_ended: asyncio.Event
    ) -> None:
        """`pool`: of the executors. `wanted`: gets what is loaded. `request_ended`: set whenever one has."""
        self._core, self._pool, self._wanted = core, pool, wanted
        self._request_ended = request_ended
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def load(self, name: str, path: str) -> ServedAdapter:
        """Load an adapter on all executors that are ready; the others get it when they are greeted.

        Requests may name it when this returns. Raises ServiceError, and then it is loaded nowhere where it
        was not before.
        """
        return await self._to_its_end(self._load(name, path))

    async def unload(self, name: str) -> bool:
        """Unload an adapter; returns whether there was one of this name.

        No further request may name it. It is unloaded from the executors when no live request uses it.
        """
        adapter = self._wanted.leave(name)
        if adapter is None:
            return False
        await self._to_its_end(self._unload(adapter))
        return True

    def close(self) -> None:
        """Cancel what is under way."""
        for task in self._tasks:
            task.cancel()

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # so that it counts as seen, if its caller has left

    async def _load(self, name: str, path: str) -> ServedAdapter:
        async with self._turn:
            self._check_not_leaving(name)
            new: list[ExecutorLink] = []  # executors that did not have this name
            try:
                adapter = await self._load_everywhere(name, path, new)
            except BaseException:
                await self._unload_from(new, name)
                raise
            self._check_not_leaving(name)  # one that was loaded may have been unloaded meanwhile
            self._wanted.add(adapter)
        log.info("adapter served", adapter=name, fingerprint=adapter.fingerprint.hex())
        return adapter

    def _check_not_leaving(self, name: str) -> None:
        if self._wanted.is_leaving(name):
            raise ServiceError(
                ErrorReason.ADAPTER_NAME,
                f"name: {name} is being unloaded, and live requests may still use it",
            )

    async def _load_everywhere(self, name: str, path: str, new: list[ExecutorLink]) -> ServedAdapter:
        """Load it on each executor that is ready at the end. `new`: gets those that did not have the name."""
        found: dict[ExecutorLink, ServedAdapter] = {}
        while links := [link for link in self._pool.links if link.ready and link not in found]:
            outcomes = await asyncio.gather(
                *(self._load_on(link, name, path, new) for link in links), return_exceptions=True
            )
            for link, outcome in zip(links, outcomes, strict=True):
                if isinstance(outcome, ServedAdapter):
                    found[link] = outcome
                elif not isinstance(outcome, errors.PacelineError):
                    raise outcome
                elif link.ready:  # else it gets the adapter when it is back
                    raise _refusal(outcome, link.address)
        if not found:
            raise ServiceError(ErrorReason.NOT_READY, "no executor is ready", retry_after_s=RETRY_AFTER_S)
        adapter, *others = found.values()
        if any(other.fingerprint != adapter.fingerprint for other in others):
            seen = ", ".join(f"{link.address}: {one.fingerprint.hex()[:12]}" for link, one in found.items())
            raise ServiceError(
                ErrorReason.ADAPTERS_DIFFER,
                f"path: {path} holds different adapters on the executors ({seen})",
            )
        known = self._wanted.find(name)
        if known is not None and known.fingerprint != adapter.fingerprint:
            raise ServiceError(
                ErrorReason.ADAPTER_NAME, f"name: {name} is loaded with other content; unload it first"
            )
        return known or adapter

    async def _load_on(
        self, link: ExecutorLink, name: str, path: str, new: list[ExecutorLink]
    ) -> ServedAdapter:
        adapters = _adapters_of(link)
        was_there = name in await adapters.listed()
        adapter = await adapters.load(name, path)
        if not was_there:
            new.append(link)
        return adapter

    async def _unload(self, adapter: ServedAdapter) -> None:
        while not self._wanted.is_served(adapter.fingerprint) and self._core.uses_adapter(
            adapter.fingerprint
        ):
            self._request_ended.clear()
            await self._request_ended.wait()
        async with self._turn:
            await self._unload_from([link for link in self._pool.links if link.ready], adapter.name)
            self._wanted.forget(adapter.name)
        log.info("adapter unloaded", adapter=adapter.name, fingerprint=adapter.fingerprint.hex())

    async def _unload_from(self, links: list[ExecutorLink], name: str) -> None:
        """Unload the name from these executors; one that does not answer keeps it until its next start."""
        for link in links:
            try:
                await _adapters_of(link).unload(name)
            except errors.PacelineError as error:
                log.warning("adapter not unloaded", adapter=name, detail=why_not_loaded(error, link.address))


def _adapters_of(link: ExecutorLink) -> RemoteAdapters:
    """Raises Unavailable if the link is not ready."""
    if (adapters := link.adapters) is None:
        raise errors.Unavailable(link.detail)
    return adapters


def _refusal(error: errors.PacelineError, address: str) -> ServiceError:
    reason = _REASONS.get(type(error), ErrorReason.NOT_READY)
    retry_after_s = RETRY_AFTER_S if reason is ErrorReason.NOT_READY else None
    return ServiceError(reason, why_not_loaded(error, address), retry_after_s=retry_after_s)
