"""Executors and a scheduler as supervised processes, for `serve`, `demo` and `bench`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from service_kit.clock import RunningClock
from service_kit.model_name import model_name

from paceline import aio, errors
from paceline.channel import Security
from paceline.cli.gateway_launch import GatewayLaunch
from paceline.cli.gateway_probe import is_ready
from paceline.cli.scratch import ChildFiles, scratch_directory
from paceline.cli.services import command
from paceline.cli.stack_secrets import StackSecrets
from paceline.cli.supervisor import Child, ChildFailed, Say
from paceline.cli.watch import watch_socket
from paceline.executor.v1 import executor_pb2

_LOOPBACK = "127.0.0.1"
_SECRETS_FLAG = "--secrets-stdin"  # the service also ends when standard input, and so the parent, ends
_POLL_S = 0.1
_CALL_TIMEOUT_S = 5.0
_SERVING_TIMEOUT_S = 60.0

Loading = Callable[[str, float], None]
"""Called with (description of what is being loaded, fraction done in 0..1)."""


@dataclass(frozen=True, slots=True)
class ExecutorLaunch:
    """How to start one executor; `options` are further flags of its command line."""

    backend: str
    model: Path | None = None
    options: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name to show: the model's, else the backend's."""
        return model_name(self.model) if self.model else self.backend

    @property
    def settings(self) -> list[str]:
        """What of the executor's command line does not depend on where it runs."""
        model = ["--model", str(self.model)] if self.model else []
        return ["--backend", self.backend, *model, *self.options]

    def command(self, port: int, files: ChildFiles) -> list[str]:
        """The executor's command line."""
        where = ["--host", _LOOPBACK, "--port", str(port), *files.flags, _SECRETS_FLAG]
        return command("executor_service", *where, *self.settings)


@dataclass(frozen=True, slots=True)
class StackConfig:
    """The services to start. `executor_options` and `scheduler_options` are further flags of theirs.

    `name` is what clients call the model; "": the name of its files.
    """

    backend: str
    model: Path | None = None
    name: str = ""
    draft: ExecutorLaunch | None = None  # the draft executor, if there is to be one
    host: str = _LOOPBACK  # of the scheduler; executors listen on loopback
    port: int = 0  # of the scheduler; 0: any free one
    executor_port: int = 0
    executor_options: tuple[str, ...] = ()
    scheduler_options: tuple[str, ...] = ()
    client_token: str = field(default="", repr=False)  # clients must send it; empty: they need no token
    gateway: GatewayLaunch | None = None  # the OpenAI gateway, if there is to be one

    @property
    def demands_token(self) -> bool:
        """Whether clients must send one."""
        return bool(self.client_token) or demands_token(self.scheduler_options)

    @property
    def executor(self) -> ExecutorLaunch:
        """The executor of the served model."""
        return ExecutorLaunch(self.backend, self.model, self.executor_options)

    def scheduler_command(self, port: int, files: ChildFiles, executor: str, draft: str) -> list[str]:
        """The scheduler's command line; `draft` is empty, or the draft executor's address."""
        executors = ["--executor", executor, *(["--draft-executor", draft] if draft else [])]
        name = [f"--model-name={self.name}"] if self.name else []
        where = ["--host", self.host, "--port", str(port), *files.flags, _SECRETS_FLAG]
        return command("scheduler_service", *executors, *where, *name, *self.scheduler_options)


def demands_token(scheduler_options: Sequence[str]) -> bool:
    """Whether a scheduler with these flags demands a token of its callers."""
    return any(one.startswith(("--tokens-file", "--auth-token-file")) for one in scheduler_options)


@dataclass(slots=True)
class Stack:
    """A running executor and scheduler, and a draft executor and a gateway if they are configured.

    `socket` is the scheduler's address for calls of this process, which work whatever TLS its port has.
    """

    config: StackConfig
    secrets: StackSecrets
    socket: str
    executor: Child
    scheduler: Child
    draft: Child | None = None
    gateways: list[Child] = field(default_factory=list)  # started last, once the others serve

    @property
    def children(self) -> list[Child]:
        """All processes, in the order in which they stop: each before those that it uses."""
        found = (*self.gateways, self.scheduler, self.draft, self.executor)
        return [child for child in found if child is not None]

    @property
    def address(self) -> str:
        """The scheduler's address for clients on this machine."""
        host = self.config.host.strip("[]")
        host = _LOOPBACK if host in ("0.0.0.0", "::", "") else host
        return f"[{host}]:{self.scheduler.port}" if ":" in host else f"{host}:{self.scheduler.port}"

    @property
    def executor_address(self) -> str:
        """The executor's address for clients on this machine that have its token."""
        return f"{_LOOPBACK}:{self.executor.port}"

    @property
    def executor_socket(self) -> str:
        """The executor's address for calls of this process, which work whatever TLS its port has."""
        return _socket("executor", Path(self.socket.removeprefix("unix:")).parent)

    @property
    def client_security(self) -> Security:
        """A client's token for the scheduler; TLS set up in `scheduler_options` is not included."""
        return Security(token=self.secrets.client)

    @property
    def admin_security(self) -> Security:
        """The token for this process's calls to the scheduler, on `socket`."""
        return Security(token=self.secrets.admin)

    @property
    def executor_security(self) -> Security:
        """The token for this process's calls to the executors."""
        return Security(token=self.secrets.executor)

    async def supervise(self) -> None:
        """Restart each process whenever it ends or freezes; returns after `stop`.

        Raises ChildFailed when one can't be kept running.
        """
        await run_all(child.keep_running() for child in self.children)

    async def stop(self) -> None:
        """Stop the processes one after another. The scheduler lets running streams end first."""
        for child in self.children:
            await child.stop()

    def kill(self) -> None:
        """Kill all processes at once."""
        for child in self.children:
            child.kill()


@asynccontextmanager
async def starting(config: StackConfig, say: Say, loading: Loading) -> AsyncIterator[Stack]:
    """A context manager: start a stack, yield it when it serves, stop it at the end of the block.

    Raises ChildFailed if a process ends before the stack serves.
    """
    async with AsyncExitStack() as cleanup:
        scratch = cleanup.enter_context(scratch_directory())
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
        # Side by side: each process ends at once if its settings are wrong, and the executor still imports
        # torch when the others have checked theirs.
        starts = [executor.start(config.executor_port), scheduler.start(config.port)]
        if draft is not None:
            starts.append(draft.start(0))
        try:
            await run_all(starts)
            for name in ("executor", *(["draft"] if draft else [])):
                loaded = _loaded(_socket(name, scratch), stack.executor_security, loading)
                await while_running(loaded, *stack.children)
            await while_running(_serving(stack), *stack.children)
            if config.gateway is not None:
                sockets, children = [stack.socket], stack.children
                await start_gateway(config.gateway, sockets, stack.gateways, scratch, say, children)
            yield stack
        except BaseException:
            stack.kill()
            raise


def _socket(name: str, directory: Path) -> str:
    """The address at which this process and the stack's other services reach a service.

    They do not use its port: while the service restarts, another process on this machine could bind the port
    and would be sent the token.
    """
    return f"unix:{ChildFiles.of(name, directory).socket}"


async def _loaded(socket: str, security: Security, loading: Loading) -> None:
    """Wait until the executor has loaded its model; passes its progress to `loading`."""
    async with aio.ExecutorClient(socket, security=security) as client:
        while True:
            with suppress(errors.RetryLater, errors.DeadlineExceeded):
                status = await client.get_status(timeout_s=_CALL_TIMEOUT_S)
                if status.state == executor_pb2.EXECUTOR_STATE_SERVING:
                    return
                if status.state != executor_pb2.EXECUTOR_STATE_FAILED:  # it says why in its log, and ends
                    loading(status.loading or "starting", status.load_fraction)
            await asyncio.sleep(_POLL_S)


async def _serving(stack: Stack) -> None:
    """Wait until the scheduler serves and is connected to all executors.

    Raises ChildFailed after _SERVING_TIMEOUT_S.
    """
    clock = RunningClock(time.monotonic)
    reason = "it does not answer"
    async with aio.Client(stack.socket, security=stack.admin_security, directory="off") as client:
        while clock() < _SERVING_TIMEOUT_S:
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
    raise ChildFailed(f"the scheduler does not serve after {_SERVING_TIMEOUT_S:g} s: {reason}")


async def start_gateway(
    launch: GatewayLaunch,
    schedulers: Sequence[str],
    gateways: list[Child],
    directory: Path,
    say: Say,
    others: Sequence[Child],
) -> None:
    """Start a gateway, add its processes to `gateways`, and wait until it takes requests.

    Its processes call the schedulers' Unix sockets: where these demand tokens, their callers need them.
    Raises ChildFailed if one of them or of `others` ends.
    """
    port = launch.port
    for child in launch.children(directory, say, schedulers):
        gateways.append(child)
        await child.start(port)
        port = child.port
        serving = _gateway_serving(directory / f"{child.name}.socket")
        await while_running(serving, *gateways, *others)


async def _gateway_serving(socket: Path) -> None:
    """Wait until a gateway's process takes requests. Raises ChildFailed after _SERVING_TIMEOUT_S."""
    clock = RunningClock(time.monotonic)
    while clock() < _SERVING_TIMEOUT_S:
        if await is_ready(socket):
            return
        await asyncio.sleep(_POLL_S)
    raise ChildFailed(f"the gateway does not serve after {_SERVING_TIMEOUT_S:g} s")


async def run_all(tasks: Iterable[Coroutine[object, object, None]]) -> None:
    """Await all. Raises the first ChildFailed or OSError, and cancels the others then."""
    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(task)
    except BaseExceptionGroup as group:
        failed, other = group.split((ChildFailed, OSError))
        if failed is None or other is not None:
            raise
        raise failed.exceptions[0] from None


async def while_running(wait: Coroutine[object, object, None], *children: Child) -> None:
    """Await `wait`. Raises ChildFailed if a child ends first."""
    waiting = asyncio.ensure_future(wait)
    exits = [asyncio.ensure_future(child.until_exit()) for child in children]
    try:
        await asyncio.wait([waiting, *exits], return_when=asyncio.FIRST_COMPLETED)
        for task in (*exits, waiting):
            if task.done():
                await task
    finally:
        for task in (waiting, *exits):
            task.cancel()
        await asyncio.gather(waiting, *exits, return_exceptions=True)
