"""Executors and scheduler as supervised processes: what `serve`, `demo` and `bench` run on."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline import aio, errors
from paceline.channel import Security
from paceline.cli.services import command
from paceline.cli.stack_secrets import StackSecrets
from paceline.cli.supervisor import Child, ChildFailed, Say
from paceline.cli.watch import watch_socket
from paceline.executor.v1 import executor_pb2
from paceline.service.clock import RunningClock

_LOOPBACK = "127.0.0.1"
_BOUND = "--secrets-stdin"  # its end is the parent's end: a stack does not outlive it
_POLL_S = 0.1
_CALL_TIMEOUT_S = 5.0
_PATIENCE_S = 60.0
_SOCKET_BYTES = 80  # what a socket's path may take, below the system's 108

Loading = Callable[[str, float], None]
"""Called with (what is being loaded, fraction done in 0..1)."""


@dataclass(frozen=True, slots=True)
class ChildFiles:
    """Where one service says its port, and where it answers its parent."""

    port: Path
    socket: Path

    @classmethod
    def of(cls, name: str, directory: Path) -> ChildFiles:
        """In a directory that nobody else can open."""
        return cls(directory / name, directory / f"{name}.socket")

    @property
    def flags(self) -> list[str]:
        """For the service."""
        return ["--port-file", str(self.port), "--local-socket", str(self.socket)]


@dataclass(frozen=True, slots=True)
class ExecutorLaunch:
    """One executor to start; `options` go to it as they are."""

    backend: str
    model: Path | None = None
    options: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What people call it."""
        return self.model.stem if self.model else self.backend

    def command(self, port: int, files: ChildFiles) -> list[str]:
        """Its command line."""
        model = ["--model", str(self.model)] if self.model else []
        where = ["--host", _LOOPBACK, "--port", str(port), *files.flags, _BOUND]
        return command("executor_service", "--backend", self.backend, *model, *where, *self.options)


@dataclass(frozen=True, slots=True)
class StackConfig:
    """What to start. `executor_options` and `scheduler_options` go to the services as they are."""

    backend: str
    model: Path | None = None
    draft: ExecutorLaunch | None = None  # its model drafts for the other's
    host: str = _LOOPBACK
    port: int = 0  # of the scheduler; 0: any free one
    executor_port: int = 0
    executor_options: tuple[str, ...] = ()
    scheduler_options: tuple[str, ...] = ()
    client_token: str = field(default="", repr=False)  # that clients must send; empty: they need none

    @property
    def executor(self) -> ExecutorLaunch:
        """The executor that serves."""
        return ExecutorLaunch(self.backend, self.model, self.executor_options)

    def scheduler_command(self, port: int, files: ChildFiles, executor: str, draft: str) -> list[str]:
        """The scheduler's command line; `draft` is empty, or the draft executor's address."""
        executors = ["--executor", executor, *(["--draft-executor", draft] if draft else [])]
        where = ["--host", self.host, "--port", str(port), *files.flags, _BOUND]
        return command("scheduler_service", *executors, *where, *self.scheduler_options)


@dataclass(frozen=True, slots=True)
class Stack:
    """Two running services, and the draft executor if there is to be one.

    The scheduler answers us on `socket`, whatever its port asks of clients.
    """

    config: StackConfig
    secrets: StackSecrets
    socket: str
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
        host = self.config.host.strip("[]")
        host = _LOOPBACK if host in ("0.0.0.0", "::", "") else host
        return f"[{host}]:{self.scheduler.port}" if ":" in host else f"{host}:{self.scheduler.port}"

    @property
    def executor_address(self) -> str:
        """Where others on this machine reach the executor, with its token."""
        return f"{_LOOPBACK}:{self.executor.port}"

    @property
    def client_security(self) -> Security:
        """What a client needs, of a scheduler whose options ask for no more."""
        return Security(token=self.secrets.client)

    @property
    def admin_security(self) -> Security:
        """For our own calls to `socket`."""
        return Security(token=self.secrets.admin)

    @property
    def executor_security(self) -> Security:
        """For our own calls to the executors."""
        return Security(token=self.secrets.executor)

    async def supervise(self) -> None:
        """Start a process again whenever it dies or freezes; returns after `stop`.

        Raises ChildFailed when one can't be kept running.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for child in self.children:
                    group.create_task(child.keep_running())
        except BaseExceptionGroup as group:
            failed, other = group.split(ChildFailed)
            if failed is None or other is not None:
                raise
            raise failed.exceptions[0] from None

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
        scratch = Path(cleanup.enter_context(_directory()))
        secrets = StackSecrets(config.client_token)

        def child(name: str, command: Callable[[int, ChildFiles], list[str]], line: bytes) -> Child:
            files = ChildFiles.of(name, scratch)
            watch = watch_socket(files.socket)
            return Child(name, lambda port: command(port, files), files.port, say, secrets=line, watch=watch)

        executor = child("executor", config.executor.command, secrets.executor_line())
        draft = child("draft", config.draft.command, secrets.executor_line()) if config.draft else None

        def scheduler_command(port: int, files: ChildFiles) -> list[str]:
            drafts = _socket("draft", scratch) if draft else ""
            return config.scheduler_command(port, files, _socket("executor", scratch), drafts)

        scheduler = child("scheduler", scheduler_command, secrets.scheduler_line())
        socket = _socket("scheduler", scratch)
        stack = Stack(config, secrets, socket, executor, scheduler, draft)
        cleanup.push_async_callback(stack.stop)
        try:
            await executor.start(config.executor_port)
            if draft is not None:
                await draft.start(0)
            await scheduler.start(config.port)
            for name in ("executor", *(["draft"] if draft else [])):
                loaded = _loaded(_socket(name, scratch), stack.executor_security, loading)
                await _or_death(loaded, *stack.children)
            await _or_death(_serving(stack), *stack.children)
            yield stack
        except BaseException:
            stack.kill()
            raise


def _socket(name: str, directory: Path) -> str:
    """Where a service is reached by its parent and its siblings.

    Not by its port: while a service is started again anybody on this machine could take that, and would be
    sent the token.
    """
    return f"unix:{ChildFiles.of(name, directory).socket}"


def _directory() -> tempfile.TemporaryDirectory[str]:
    """A new directory that only we can open, with a name short enough for sockets in it."""
    roomy = len(os.fsencode(tempfile.gettempdir())) < _SOCKET_BYTES
    return tempfile.TemporaryDirectory(prefix="paceline-", dir=None if roomy else "/tmp")


async def _loaded(socket: str, security: Security, loading: Loading) -> None:
    """Wait until the executor has its model."""
    async with aio.ExecutorClient(socket, security=security) as client:
        while True:
            with suppress(errors.RetryLater, errors.DeadlineExceeded):
                status = await client.get_status(timeout_s=_CALL_TIMEOUT_S)
                if status.state == executor_pb2.EXECUTOR_STATE_SERVING:
                    return
                loading(status.loading or "starting", status.load_fraction)
            await asyncio.sleep(_POLL_S)


async def _serving(stack: Stack) -> None:
    """Wait until the scheduler takes requests, and has its draft executor if there is one."""
    clock = RunningClock(time.monotonic)
    reason = "it does not answer"
    async with aio.Client(stack.socket, security=stack.admin_security) as client:
        while clock() < _PATIENCE_S:
            try:
                status = await client.status(timeout_s=_CALL_TIMEOUT_S)
                executors = await client.executors(timeout_s=_CALL_TIMEOUT_S)
                missing = [one for one in executors if not one.connected]
                if status.state == "serving" and not missing:
                    return
                reason = "; ".join(
                    f"it can't use the executor at {one.address}: {one.detail}" for one in missing
                )
            except (errors.RetryLater, errors.DeadlineExceeded) as error:
                reason = str(error)
            await asyncio.sleep(_POLL_S)
    raise ChildFailed(f"the scheduler does not serve after {_PATIENCE_S:g} s: {reason}")


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
