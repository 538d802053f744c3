"""Several models under one roof: a stack for each, and a router whose one address leads to all of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline_router.models import RoofModel, RoofModels, RoofState

from paceline.cli.gateway_launch import GatewayLaunch
from paceline.cli.scratch import scratch_directory
from paceline.cli.services import command
from paceline.cli.stack import (
    ChildFiles,
    Loading,
    Stack,
    StackConfig,
    run_all,
    start_gateway,
    starting,
    while_running,
)
from paceline.cli.stack_secrets import StackSecrets
from paceline.cli.supervisor import Child, ChildFailed, Say
from paceline.cli.watch import watch_socket

_ROUTER = "paceline_router"


@dataclass(frozen=True, slots=True)
class ModelLaunch:
    """A model to serve under a name, by a stack of its own on free ports of loopback."""

    name: str
    stack: StackConfig
    on_demand: bool = False  # loaded when it is asked for, not at the start
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RoofConfig:
    """The models, and the address that leads to all. `router_options` are further flags of the router."""

    models: tuple[ModelLaunch, ...]
    host: str
    port: int
    router_options: tuple[str, ...] = ()
    client_token: str = field(default="", repr=False)
    gateway: GatewayLaunch | None = None


class ModelRoof:
    """The running models. One whose stack can't be kept running has failed, and the others go on."""

    def __init__(self, config: RoofConfig, directory: Path, say: Say, loading: Loading) -> None:
        self.config = config
        self._say, self._loading = say, loading
        self._launches = {one.name: one for one in config.models}
        self._models = {
            name: RoofModel(name, RoofState.AVAILABLE, adapters=one.adapters)
            for name, one in self._launches.items()
        }
        self._change = asyncio.Event()  # replaced at each change
        self._version, self._known_version = 1, 0  # of the models: here, and as the router has read them
        self._known = asyncio.Event()  # replaced whenever the router has read
        self._stacks: dict[str, Stack] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._stopping = False
        files = ChildFiles.of("router", directory)
        self.socket, self.router_socket = directory / "roof.socket", f"unix:{files.socket}"

        def router_command(port: int) -> list[str]:
            where = ["--host", config.host, "--port", str(port), *files.flags, "--secrets-stdin"]
            return command(_ROUTER, *where, "--roof", str(self.socket), *config.router_options)

        self.router = Child(
            "router",
            router_command,
            files.port,
            say,
            secrets=StackSecrets(config.client_token).router_line(),
            watch=watch_socket(files.socket),
        )
        self.gateways: list[Child] = []

    @property
    def models(self) -> RoofModels:
        """The models as they are now."""
        return RoofModels(self._models.values())

    def load(self, name: str) -> None:
        """Begin to load a model, unless it is loading or loaded, or the roof ends."""
        if self._models[name].state in (RoofState.AVAILABLE, RoofState.FAILED) and not self._stopping:
            self._tell(name, RoofState.LOADING)
            self._keeping[name] = asyncio.create_task(self._keep(self._launches[name]), name=f"model {name}")

    async def unload(self, name: str) -> None:
        """Let a model's requests end, and put it away."""
        if self._models[name].state is RoofState.SERVING:
            self._tell(name, RoofState.DRAINING)
            await self._stacks[name].stop()

    async def settled(self) -> None:
        """Wait until no model is loading."""
        while any(one.state is RoofState.LOADING for one in self._models.values()):
            await self._change.wait()

    async def known(self) -> None:
        """Wait until the router knows the models as they are now."""
        while self._known_version < self._version:
            await self._known.wait()

    async def supervise(self) -> None:
        """Keep the router and the gateway running until cancelled. Raises ChildFailed to give up."""
        await run_all(child.keep_running() for child in (self.router, *self.gateways))

    async def stop(self) -> None:
        """Stop all processes: those that take calls first, which let them end."""
        self._stopping = True
        for child in (*self.gateways, self.router):
            await child.stop()
        for name in self._keeping.keys() - self._stacks.keys():
            self._keeping[name].cancel()  # it is still loading, and kills what it has started
        await asyncio.gather(*(stack.stop() for stack in list(self._stacks.values())))
        await self.ended()

    async def ended(self) -> None:
        """Wait until no model has processes."""
        await asyncio.gather(*self._keeping.values(), return_exceptions=True)

    def kill(self) -> None:
        """Kill all processes at once."""
        self._stopping = True
        for child in (*self.gateways, self.router):
            child.kill()
        for stack in self._stacks.values():
            stack.kill()
        for task in self._keeping.values():
            task.cancel()  # one that is still starting kills what it has started

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Tell a router the models, and every change; do what it wishes."""
        versions: list[int] = []  # of the lines that were told
        wishing = asyncio.create_task(self._take_wishes(reader, versions))
        try:
            while not wishing.done():
                change = asyncio.create_task(self._change.wait())
                versions.append(self._version)
                writer.write(self.models.line())
                await writer.drain()
                await asyncio.wait({change, wishing}, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
        except OSError:
            pass  # the router has ended
        finally:
            wishing.cancel()
            writer.close()

    async def _take_wishes(self, reader: asyncio.StreamReader, versions: Sequence[int]) -> None:
        wishes: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            wish = json.loads(line)
            if "read" in wish:  # so many lines
                self._known_version = versions[wish["read"] - 1]
                self._known.set()
                self._known = asyncio.Event()
                continue
            if wish["model"] not in self._models:
                continue
            if wish["wish"] == "load":
                self.load(wish["model"])
            else:
                wishes.add(task := asyncio.create_task(self.unload(wish["model"])))
                task.add_done_callback(wishes.discard)

    async def _keep(self, launch: ModelLaunch) -> None:
        """Start a model's stack and keep it running until it is stopped. What fails is told, and said."""
        name, state, detail = launch.name, RoofState.AVAILABLE, ""
        try:
            async with starting(launch.stack, _named(name, self._say), self._loading) as stack:
                self._stacks[name] = stack
                if not self._stopping:
                    self._tell(name, RoofState.SERVING, socket=stack.socket.removeprefix("unix:"))
                    await stack.supervise()
        except (ChildFailed, OSError) as error:
            state, detail = RoofState.FAILED, str(error)
            self._say("roof", f"model {name} has failed, and the others go on: {error}")
        finally:
            self._stacks.pop(name, None)
            self._tell(name, state, detail=detail[:500])

    def _tell(self, name: str, state: RoofState, socket: str = "", detail: str = "") -> None:
        self._models[name] = replace(self._models[name], state=state, socket=socket, detail=detail)
        self._version += 1
        self._change.set()
        self._change = asyncio.Event()


def _named(name: str, say: Say) -> Say:
    """Says lines of a model's children with its name."""
    return lambda child, line: say(child, f"[{name}] {line}")


@asynccontextmanager
async def roofing(config: RoofConfig, say: Say, loading: Loading) -> AsyncIterator[ModelRoof]:
    """A context manager: start the router and the models to keep, yield the roof when these serve, stop all.

    Raises ChildFailed if the router does not start, or none of these models.
    """
    async with AsyncExitStack() as cleanup:
        directory = cleanup.enter_context(scratch_directory())
        roof = ModelRoof(config, directory, say, loading)
        listener = await asyncio.start_unix_server(roof.connected, roof.socket)
        cleanup.callback(listener.close)
        cleanup.push_async_callback(roof.stop)
        try:
            await roof.router.start(config.port)
            kept = [one.name for one in config.models if not one.on_demand]
            for name in kept:
                roof.load(name)
            await roof.settled()
            await while_running(roof.known(), roof.router)
            failed = [one for one in roof.models if one.state is RoofState.FAILED]
            if failed and len(failed) == len(kept):
                raise ChildFailed(f"no model could be started; {failed[0].name}: {failed[0].detail}")
            if config.gateway is not None:
                sockets = [roof.router_socket]
                await start_gateway(config.gateway, sockets, roof.gateways, directory, say, [roof.router])
            yield roof
        except BaseException:
            roof.kill()
            await roof.ended()
            raise
