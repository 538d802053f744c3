"""A scheduler and its executors as real processes, with the oracle as the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline import aio, types
from paceline.executor.v1 import executor_pb2

from tests.support.ports import kept_port
from tests.support.processes import ServiceProcess

ORACLE = ("--backend", "oracle", "--pages", "2048", "--log-level", "info")
HEAL_S = 5.0
"""No stream may hang longer once an executor is back."""


class Stack:
    """Executors on ports that they keep across restarts, and one scheduler in front of them."""

    def __init__(self, directory: Path, executor_module: str = "executor_service") -> None:
        self._directory, self._executor_module = directory, executor_module
        self._executors: dict[str, tuple[tuple[str, ...], ServiceProcess]] = {}
        self._starts = 0
        self.drafts: list[str] = []  # addresses of executors that draft
        self.scheduler: ServiceProcess

    def start_executor(self, *arguments: str, port: int = 0, wait: bool = True) -> str:
        """Start one, and unless told otherwise wait until it serves; returns its address."""
        self._starts += 1
        flags = (*ORACLE, *arguments, "--port", str(port or kept_port()))
        directory = self._directory / f"executor{self._starts}"
        process = ServiceProcess(self._executor_module, list(flags), directory)
        try:
            self._executors[process.address] = (arguments, process)
            if wait:
                process.wait_serving()
        except BaseException:
            process.kill()
            raise
        return process.address

    def start_scheduler(self, *arguments: str, executors: Sequence[str] | None = None) -> None:
        """Start it in front of these executors, or of all; those in `drafts` draft."""
        serving = executors or [address for address in self._executors if address not in self.drafts]
        flags = [flag for address in serving for flag in ("--executor", address)]
        flags += [flag for address in self.drafts for flag in ("--draft-executor", address)]
        self._starts += 1
        directory = self._directory / f"scheduler{self._starts}"
        self.scheduler = ServiceProcess("scheduler_service", [*flags, *arguments], directory)

    def executor(self, address: str) -> ServiceProcess:
        """The process that is, or was, at this address."""
        return self._executors[address][1]

    def restart_executor(self, address: str, *, wait: bool = True) -> None:
        """Kill what is left of it and start it again on its port."""
        arguments, process = self._executors[address]
        process.kill()
        self.start_executor(*arguments, port=int(address.rpartition(":")[2]), wait=wait)

    def change_executor(self, address: str, *arguments: str) -> None:
        """Start it again with other arguments, now and whenever it is restarted."""
        self._executors[address] = (arguments, self._executors[address][1])
        self.restart_executor(address)

    @property
    def addresses(self) -> list[str]:
        """Of the executors."""
        return list(self._executors)

    def client(self) -> aio.Client:
        """A client of the scheduler."""
        return aio.Client(self.scheduler.address)

    async def cache(self, address: str) -> executor_pb2.CacheStatus:
        """The executor's ledger."""
        async with aio.ExecutorClient(address) as client:
            return (await client.get_status(timeout_s=5)).cache

    async def all_pages_back(self, address: str) -> None:
        """Wait until no sequence owns a page of this executor; fails after a few seconds."""

        async def free() -> bool:
            cache = await self.cache(address)
            return cache.owned_pages == 0 and cache.free_pages + cache.cached_pages == cache.total_pages

        await eventually(free, "pages are still owned")

    def kill(self) -> None:
        """End everything."""
        if hasattr(self, "scheduler"):
            self.scheduler.kill()
        for _, process in self._executors.values():
            process.kill()


async def eventually(
    condition: Callable[[], Awaitable[bool]], complaint: str, timeout_s: float = 120.0
) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, complaint
        await asyncio.sleep(0.02)


@contextmanager
def oracle_stack(
    directory: Path,
    *,
    executor: Sequence[str] = (),
    scheduler: Sequence[str] = (),
    executors: int = 1,
    draft: Sequence[str] | None = None,
    executor_module: str = "executor_service",
) -> Iterator[Stack]:
    """A serving stack of one scheduler and some oracle executors, and one that drafts if `draft` is given."""
    stack = Stack(directory, executor_module)
    try:
        for _ in range(executors):
            stack.start_executor(*executor)
        if draft is not None:
            stack.drafts.append(stack.start_executor(*draft))
        stack.start_scheduler(*scheduler)
        stack.scheduler.wait_serving()
        yield stack
    finally:
        stack.kill()


def ids_of(completion: types.Completion) -> list[int]:
    """Its token ids, after checking that it ended."""
    assert completion.finished is not None
    return list(completion.token_ids)
