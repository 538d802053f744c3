"""Several models at one address: a stack for each, and a router whose one address leads to all of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from paceline_router.models import ModelState, ModelUse, RoutedModel, RoutedModels

from paceline.cli.scratch import ChildFiles, scratch_directory
from paceline.cli.services import command
from paceline.cli.several_models.memory import LoadableModel, moves
from paceline.cli.several_models.plan import ModelLaunch, ModelsConfig, planned
from paceline.cli.stack import (
    Loading,
    Stack,
    run_all,
    start_gateway,
    starting,
    while_running,
)
from paceline.cli.stack_secrets import StackSecrets
from paceline.cli.supervisor import Child, ChildFailed, Say
from paceline.cli.watch import or_stopped, watch_socket

_ROUTER = "paceline_router"
_WAITS = "others are put away for it first"


class ModelStacks:
    """The stacks of several models, and their router. `needs`: planned bytes by name, as far as known.

    A model whose stack can't be kept running has failed, and the others go on. What is loaded and put away is
    decided by `moves`, from the models' states and from what the router says of its calls.
    """

    def __init__(
        self, config: ModelsConfig, needs: Mapping[str, int], directory: Path, say: Say, loading: Loading
    ) -> None:
        self.config = config
        self._say, self._loading = say, loading
        self._launches = {one.name: one for one in config.models}
        self._loadable = {
            name: LoadableModel(not one.on_demand, one.keep_alive_s, needs.get(name))
            for name, one in self._launches.items()
        }
        self._models = {
            name: RoutedModel(
                name, ModelState.AVAILABLE, adapters=one.adapters, memory_bytes=needs.get(name, 0)
            )
            for name, one in self._launches.items()
        }
        self._clock = asyncio.get_running_loop().time
        self._version, self._since = 1, dict.fromkeys(self._launches, 1)  # of the models; of each's state
        self._use = ModelUse()  # as the router has said it last
        self._told, self._heard = asyncio.Event(), asyncio.Event()  # replaced at each change of either
        self._stir = asyncio.Event()  # one of them has changed
        self._listening: asyncio.Task[None] | None = None  # to the router that came last
        self._stacks: dict[str, Stack] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.arranging: asyncio.Task[None] | None = None
        files = ChildFiles.of("router", directory)
        self.socket, self.router_socket = directory / "supervisor.socket", f"unix:{files.socket}"

        def router_command(port: int) -> list[str]:
            where = ["--host", config.host, "--port", str(port), *files.flags, "--secrets-stdin"]
            return command(_ROUTER, *where, "--supervisor", str(self.socket), *config.router_options)

        self.router = Child(
            "router",
            router_command,
            files.port,
            say,
            secrets=StackSecrets(config.client_token).router_line(),
            watch=or_stopped(watch_socket(files.socket)),
            has_spare=True,
        )
        self.gateways: list[Child] = []

    @property
    def models(self) -> RoutedModels:
        """The models as they are now."""
        return RoutedModels(self._models.values(), self._version)

    def load(self, name: str) -> None:
        """Begin to load a model that has no processes, unless all processes are being stopped."""
        if not (self._models[name].is_held or self._stopping):
            self._loadable[name].load_at = self._clock()
            self._tell(name, ModelState.LOADING)
            self._keeping[name] = asyncio.create_task(self._keep(self._launches[name]), name=f"model {name}")

    def put_away(self, name: str) -> None:
        """Let a model's streams end while new calls wait, and then its processes."""
        self._tell(name, ModelState.DRAINING, socket=self._models[name].socket)
        self._leaving.add(
            task := asyncio.create_task(self._leave(name, self._stacks[name]), name=f"unload {name}")
        )
        task.add_done_callback(self._leaving.discard)

    async def settled(self, names: Collection[str]) -> None:
        """Wait until none of these models is loading."""
        while any(self._models[name].state is ModelState.LOADING for name in names):
            await self._told.wait()

    async def known(self) -> None:
        """Wait until the router knows the models as they are now."""
        while self._use.read < self._version:
            await self._heard.wait()

    async def arrange(self) -> None:
        """Load models and put them away as calls need it, until cancelled."""
        while True:
            self._stir.clear()
            again_at = self._move()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(again_at):
                    await self._stir.wait()

    async def supervise(self) -> None:
        """Keep the router and the gateway running until cancelled. Raises ChildFailed to give up."""
        await run_all([self._arranged(), *(child.keep_running() for child in (self.router, *self.gateways))])

    async def _arranged(self) -> None:
        """Wait for `arrange`; what it raises ends `supervise`."""
        if self.arranging is not None:
            await self.arranging

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
        """Tell a router the models, and every change; take in what it says of its calls."""
        listening = self._listening = asyncio.create_task(self._listen(reader))
        try:
            while not listening.done():
                change = asyncio.create_task(self._told.wait())
                writer.write(self.models.line())
                await writer.drain()
                await asyncio.wait({change, listening}, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
        except OSError:
            pass  # the router has ended
        finally:
            listening.cancel()
            writer.close()
            if self._listening is listening:  # no other router came meanwhile
                self._hear(ModelUse())  # until one says more, any model may be in use

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Take in what a router says of its calls, until the router ends."""
        while line := await reader.readline():
            self._hear(ModelUse.of(line))

    def _hear(self, use: ModelUse) -> None:
        """Take in which models calls use; those that have lost their last stream were used until now."""
        for name in {*self._use.busy} - {*use.busy}:
            self._loadable[name].used_at = self._clock()
        self._use = use
        self._heard.set()
        self._heard = asyncio.Event()
        self._stir.set()

    def _move(self) -> float | None:
        """Do what is to be done now; returns when to look again."""
        now, use = self._clock(), self._use
        for name in use.unwanted:
            if self._models[name].state is ModelState.SERVING and self._is_read(name):
                self.put_away(name)
        for name, loadable in self._loadable.items():
            model = self._models[name]
            if model.state is ModelState.FAILED and not model.may_load and loadable.retry_at <= now:
                self._tell(name, model.state, detail=model.detail)
            # What the router has not read yet it can't have said the calls of.
            loadable.busy = not self._is_read(name) or name in (*use.busy, *use.wanted)
        move = moves(self._loadable, use.wanted, self.config.room, now)
        for name in move.load:
            self.load(name)
        for name in move.put_away:
            self.put_away(name)
        for name, model in self._models.items():
            if (name == move.waits) != (model.detail == _WAITS) and not model.is_held:
                self._tell(name, ModelState.AVAILABLE, detail=_WAITS if name == move.waits else "")
        return move.again_at

    async def _leave(self, name: str, stack: Stack) -> None:
        """Stop a draining model's processes once no stream is left."""
        while not self._is_read(name) or name in self._use.busy:
            await self._heard.wait()
        await stack.stop()

    def _is_read(self, name: str) -> bool:
        """Whether the router knows the model's present state: what it says of its calls is of that."""
        return self._use.read >= self._since[name]

    async def _keep(self, launch: ModelLaunch) -> None:
        """Start a model's stack and keep it running until it is stopped. A failure is printed, too."""
        name, state, detail = launch.name, ModelState.AVAILABLE, ""
        try:
            if self.config.room is not None and self._loadable[name].need is None:
                await self._plan(launch)
                return  # it is wanted still
            say, loading = named_lines(name, self._say), named_stages(name, self._loading)
            async with starting(launch.stack, say, loading) as stack:
                self._stacks[name] = stack
                if not self._stopping:
                    self._loadable[name].serves(self._clock())
                    self._tell(name, ModelState.SERVING, socket=stack.socket.removeprefix("unix:"))
                    await stack.supervise()
        except Exception as error:  # the others go on, whatever it is
            state, detail = ModelState.FAILED, str(error)[:500]
            self._loadable[name].failed(self._clock())
            others = [one.name for one in self.config.models if one.name != name]
            going = "; the others go on" if any(one in self._stacks for one in others) else ""
            self._say("serve", f"model {name} has failed: {error}{going}")
        finally:
            self._stacks.pop(name, None)
            self._tell(name, state, detail=detail)

    async def _plan(self, launch: ModelLaunch) -> None:
        """Learn what a model needs. Raises ChildFailed if that can't be known, or is too much."""
        needs, problems = await planned([launch])
        if problems:
            raise ChildFailed(problems[launch.name])
        known = {name: one.need for name, one in self._loadable.items() if one.need is not None}
        self.config.check_fits(known | needs)
        self._loadable[launch.name].need = needs[launch.name]

    def _tell(self, name: str, state: ModelState, *, socket: str = "", detail: str = "") -> None:
        """Change a model's state, send it to the router, and have `arrange` look again."""
        loadable, before = self._loadable[name], self._models[name]
        loadable.state = state
        self._models[name] = replace(
            before,
            state=state,
            socket=socket,
            detail=detail,
            memory_bytes=loadable.need or 0,
            loads=before.loads + (state is ModelState.LOADING),
            may_load=loadable.retry_at <= self._clock(),
        )
        self._version += 1
        self._since[name] = self._version
        self._told.set()
        self._told = asyncio.Event()
        self._stir.set()


def named_lines(name: str, say: Say) -> Say:
    """Says lines of a model's children with its name: objects as a field, other lines in front."""

    def said(child: str, line: str) -> None:
        is_object = line.startswith("{") and line.endswith("}")
        say(child, f'{{"model": {json.dumps(name)}, {line[1:]}' if is_object else f"[{name}] {line}")

    return said


def named_stages(name: str, loading: Loading) -> Loading:
    """Reports the stages of a model's loading with its name."""
    return lambda stage, fraction: loading(f"{name}: {stage}", fraction)


@asynccontextmanager
async def starting_models(config: ModelsConfig, say: Say, loading: Loading) -> AsyncIterator[ModelStacks]:
    """A context manager: start the router and the models to keep, yield them when they serve, stop all.

    Raises ChildFailed if the router does not start, or none of these models.
    """
    needs, problems = await planned(config.models) if config.room is not None else ({}, {})
    config.check_fits(needs)
    for name, problem in problems.items():
        say("serve", f"model {name} can't be planned: {problem}")
    async with AsyncExitStack() as cleanup:
        directory = cleanup.enter_context(scratch_directory())
        stacks = ModelStacks(config, needs, directory, say, loading)
        listener = await asyncio.start_unix_server(stacks.connected, stacks.socket)
        cleanup.callback(listener.close)
        cleanup.push_async_callback(stacks.stop)
        try:
            await stacks.router.start(config.port)
            stacks.arranging = asyncio.create_task(stacks.arrange())
            cleanup.callback(stacks.arranging.cancel)
            kept = [one.name for one in config.models if not one.on_demand]
            for name in kept:
                stacks.load(name)
            await stacks.settled(kept)
            await while_running(stacks.known(), stacks.router)
            failed = [one for one in stacks.models if one.state is ModelState.FAILED]
            if failed and len(failed) == len(kept):
                raise ChildFailed(f"no model could be started; {failed[0].name}: {failed[0].detail}")
            if config.gateway is not None:
                sockets = [stacks.router_socket]
                await start_gateway(config.gateway, sockets, stacks.gateways, directory, say, [stacks.router])
            yield stacks
        except BaseException:
            stacks.kill()
            await stacks.ended()
            raise
