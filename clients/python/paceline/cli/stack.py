"""Executors and scheduler as supervised processes: what `serve`, `demo` and `bench` run on."""

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
_BOUND = "--exit-with-stdin"  # a stack does not outlive its parent
_POLL_S = 0.1
_CALL_TIMEOUT_S = 5.0
_PATIENCE_S = 20.0

Loading = Callable[[str, float], None]
"""Called with (what is being loaded, fraction done in 0..1)."""


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """One executor to start; `options` go to it as they are."""

    backend: str
    model: Path | None = None
    options: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What people call it."""
        return self.model.stem if self.model else self.backend

    def command(self, port: int, port_file: Path) -> list[str]:
        """Its command line."""
        model = ["--model", str(self.model)] if self.model else []
        where = ["--host", _LOOPBACK, "--port", str(port), "--port-file", str(port_file), _BOUND]
        return command("executor_service", "--backend", self.backend, *model, *where, *self.options)


@dataclass(frozen=True, slots=True)
class StackConfig:
    """What to start. `executor_options` and `scheduler_options` go to the services as they are."""

    backend: str
    model: Path | None = None
    draft: ExecutorConfig | None = None  # its model drafts for the other's
    host: str = _LOOPBACK
    port: int = 0  # of the scheduler; 0: any free one
    executor_port: int = 0
    executor_options: tuple[str, ...] = ()
    scheduler_options: tuple[str, ...] = ()
    scheduler_security: Security = PLAINTEXT  # to reach our own scheduler
    executor_security: Security = PLAINTEXT  # and executor

    @property
    def executor(self) -> ExecutorConfig:
        """The executor that serves."""
        return ExecutorConfig(self.backend, self.model, self.executor_options)

    def scheduler_command(self, port: int, port_file: Path, executor: str, draft: str) -> list[str]:
        """The scheduler's command line; `draft` is empty, or the draft executor's address."""
        executors = ["--executor", executor, *(["--draft-executor", draft] if draft else [])]
        where = ["--host", self.host, "--port", str(port), "--port-file", str(port_file), _BOUND]
        return command("scheduler_service", *executors, *where, *self.scheduler_options)


@dataclass(frozen=True, slots=True)
class Stack:
    """Two running services, and the draft executor if there is to be one."""

    config: StackConfig
    executor: Child
    scheduler: Child
    draft: Child | None = None

    @property
    def children(self) -> list[Child]:
        """All of them, in the order in which they stop: the scheduler needs the others until then."""
        return [self.scheduler, *([self.draft] if self.draft else []), self.executor]

    @property
    def address(self) -> str:
        """Where clients on this machine reach the scheduler."""
        host = _LOOPBACK if self.config.host in ("0.0.0.0", "::", "") else self.config.host
        return f"[{host}]:{self.scheduler.port}" if ":" in host else f"{host}:{self.scheduler.port}"

    @property
    def executor_address(self) -> str:
        """Where the scheduler reaches the executor."""
        return _address(self.executor)

    async def supervise(self) -> None:
        """Start a process again whenever it dies; returns after `stop`."""
        async with asyncio.TaskGroup() as group:
            for child in self.children:
                group.create_task(child.keep_running())

    async def stop(self) -> None:
        """Let streams end, then stop all."""
        for child in self.children:
            await child.stop()

    def kill(self) -> None:
        """End all at once."""
        for child in self.children:
            child.kill()


@asynccontextmanager
async def starting(config: StackConfig, say: Say, loading: Loading) -> AsyncIterator[Stack]:
    """A stack that serves; its processes are gone at the end of the block. Raises ChildFailed."""
    async with AsyncExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))

        def executor_child(name: str, what: ExecutorConfig) -> Child:
            return Child(name, lambda port: what.command(port, scratch / name), scratch / name, say)

        executor = executor_child("executor", config.executor)
        draft = executor_child("draft", config.draft) if config.draft else None
        scheduler = Child(
            "scheduler",
            lambda port: config.scheduler_command(
                port, scratch / "scheduler", _address(executor), _address(draft) if draft else ""
            ),
            scratch / "scheduler",
            say,
            env={"PACELINE_SCHEDULER_AUTH_TOKEN": token}
            if (token := config.scheduler_security.token)
            else {},
        )
        stack = Stack(config, executor, scheduler, draft)
        cleanup.push_async_callback(stack.stop)
        try:
            await executor.start(config.executor_port)
            if draft is not None:
                await draft.start(0)
            await scheduler.start(config.port)
            for child in (executor, draft):
                if child is not None:
                    await _or_death(_loaded(child, config.executor_security, loading), *stack.children)
            await _or_death(_serving(stack), *stack.children)
            yield stack
        except BaseException:
            stack.kill()
            raise


def _address(executor: Child) -> str:
    """Where the scheduler reaches it."""
    return f"{_LOOPBACK}:{executor.port}"


async def _loaded(executor: Child, security: Security, loading: Loading) -> None:
    """Wait until it has its model."""
    async with aio.ExecutorClient(_address(executor), security=security) as client:
        while True:
            with suppress(errors.RetryLater, errors.DeadlineExceeded):
                status = await client.get_status(timeout_s=_CALL_TIMEOUT_S)
                if status.state == executor_pb2.EXECUTOR_STATE_SERVING:
                    return
                loading(status.loading or "starting", status.load_fraction)
            await asyncio.sleep(_POLL_S)


async def _serving(stack: Stack) -> None:
    """Wait until the scheduler takes requests, and has its draft executor if there is one."""
    began = time.monotonic()
    async with aio.Client(stack.address, security=stack.config.scheduler_security) as client:
        while True:
            try:
                status = await client.status(timeout_s=_CALL_TIMEOUT_S)
                if status.state == "serving":
                    executors = await client.executors(timeout_s=_CALL_TIMEOUT_S)
                    if all(one.connected for one in executors):
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
