"""Executor and scheduler as two supervised processes: what `serve` and `demo` run on."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline import aio, errors
from paceline.channel import PLAINTEXT, Security
from paceline.cli.services import command
from paceline.cli.supervisor import Child, ChildFailed, Say
from paceline.executor.v1 import executor_pb2

_LOOPBACK = "127.0.0.1"
_POLL_S = 0.1
_CALL_TIMEOUT_S = 5.0
_PATIENCE_S = 20.0

Loading = Callable[[str, float], None]
"""Called with (what is being loaded, fraction done in 0..1)."""


@dataclass(frozen=True, slots=True)
class StackConfig:
    """What to start. `executor_options` and `scheduler_options` go to the services as they are."""

    backend: str
    model: Path | None = None
    host: str = _LOOPBACK
    port: int = 0  # of the scheduler; 0: any free one
    executor_port: int = 0
    executor_options: tuple[str, ...] = ()
    scheduler_options: tuple[str, ...] = ()
    scheduler_security: Security = PLAINTEXT  # to reach our own scheduler
    executor_security: Security = PLAINTEXT  # and executor

    def executor_command(self, port: int, port_file: Path) -> list[str]:
        """The executor's command line."""
        model = ["--model", str(self.model)] if self.model else []
        where = ["--host", _LOOPBACK, "--port", str(port), "--port-file", str(port_file)]
        return command("executor_service", "--backend", self.backend, *model, *where, *self.executor_options)

    def scheduler_command(self, port: int, port_file: Path, executor: str) -> list[str]:
        """The scheduler's command line."""
        where = ["--host", self.host, "--port", str(port), "--port-file", str(port_file)]
        return command("scheduler_service", "--executor", executor, *where, *self.scheduler_options)


@dataclass(frozen=True, slots=True)
class Stack:
    """Two running services."""

    config: StackConfig
    executor: Child
    scheduler: Child

    @property
    def address(self) -> str:
        """Where clients on this machine reach the scheduler."""
        host = _LOOPBACK if self.config.host in ("0.0.0.0", "::", "") else self.config.host
        return f"[{host}]:{self.scheduler.port}" if ":" in host else f"{host}:{self.scheduler.port}"

    @property
    def executor_address(self) -> str:
        """Where the scheduler reaches the executor."""
        return f"{_LOOPBACK}:{self.executor.port}"

    async def supervise(self) -> None:
        """Start either process again whenever it dies; returns after `stop`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.executor.keep_running())
            group.create_task(self.scheduler.keep_running())

    async def stop(self) -> None:
        """Let streams end, then stop both: the scheduler first, for it needs the executor until then."""
        await self.scheduler.stop()
        await self.executor.stop()

    def kill(self) -> None:
        """End both at once."""
        self.scheduler.kill()
        self.executor.kill()


@asynccontextmanager
async def starting(config: StackConfig, say: Say, loading: Loading) -> AsyncIterator[Stack]:
    """A stack that serves; both processes are gone at the end of the block. Raises ChildFailed."""
    async with AsyncExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
        executor = Child(
            "executor",
            lambda port: config.executor_command(port, scratch / "executor"),
            scratch / "executor",
            say,
        )
        scheduler = Child(
            "scheduler",
            lambda port: config.scheduler_command(
                port, scratch / "scheduler", f"{_LOOPBACK}:{executor.port}"
            ),
            scratch / "scheduler",
            say,
            env={"PACELINE_SCHEDULER_AUTH_TOKEN": token}
            if (token := config.scheduler_security.token)
            else {},
        )
        stack = Stack(config, executor, scheduler)
        cleanup.push_async_callback(stack.stop)
        try:
            await executor.start(config.executor_port)
            await scheduler.start(config.port)
            await _or_death(_loaded(stack, loading), executor, scheduler)
            await _or_death(_serving(stack), executor, scheduler)
            yield stack
        except BaseException:
            stack.kill()
            raise


async def _loaded(stack: Stack, loading: Loading) -> None:
    """Wait until the executor has its model."""
    async with aio.ExecutorClient(stack.executor_address, security=stack.config.executor_security) as client:
        while True:
            with suppress(errors.RetryLater, errors.DeadlineExceeded):
                status = await client.get_status(timeout_s=_CALL_TIMEOUT_S)
                if status.state == executor_pb2.EXECUTOR_STATE_SERVING:
                    return
                loading(status.loading or "starting", status.load_fraction)
            await asyncio.sleep(_POLL_S)


async def _serving(stack: Stack) -> None:
    """Wait until the scheduler takes requests."""
    began = time.monotonic()
    async with aio.Client(stack.address, security=stack.config.scheduler_security) as client:
        while True:
            try:
                if (await client.status(timeout_s=_CALL_TIMEOUT_S)).state == "serving":
                    return
            except (errors.RetryLater, errors.DeadlineExceeded) as error:
                if time.monotonic() - began > _PATIENCE_S:  # it listens, and yet nobody gets through
                    raise ChildFailed(f"can't reach the scheduler at {stack.address}: {error}") from None
            await asyncio.sleep(_POLL_S)


async def _or_death(wait: Coroutine[object, object, None], *children: Child) -> None:
    """Wait for something, unless a child dies first: that is raised as ChildFailed."""
    waiting = asyncio.ensure_future(wait)
    deaths = [asyncio.ensure_future(child.until_exit()) for child in children]
    try:
        await asyncio.wait([waiting, *deaths], return_when=asyncio.FIRST_COMPLETED)
        for task in (*deaths, waiting):
            if task.done():
                await task
    finally:
        for task in (waiting, *deaths):
            task.cancel()
        await asyncio.gather(waiting, *deaths, return_exceptions=True)
