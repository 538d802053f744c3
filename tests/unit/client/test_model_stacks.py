"""Models at one address, without processes: what the supervisor and its router know of each other."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from paceline.cli.several_models.plan import ModelLaunch, ModelsConfig
from paceline.cli.several_models.stacks import ModelStacks, named_lines
from paceline.cli.stack import StackConfig
from paceline.cli.supervisor import ChildFailed
from paceline_router.models import ModelState, ModelUse, RoutedModel, RoutedModels
from paceline_router.supervisor_connection import SupervisorConnection

LIMIT_S = 30.0
"""For what must happen; a test that passes never waits for it."""


def test_the_models_are_known_once_the_router_has_read_their_newest_line(tmp_path: Path) -> None:
    async def follow() -> None:
        stacks = ModelStacks(ModelsConfig((), "127.0.0.1", 0), {}, tmp_path, lambda *_: None, lambda *_: None)
        listener = await asyncio.start_unix_server(stacks.connected, stacks.socket)
        reader, writer = await asyncio.open_unix_connection(stacks.socket)
        known = asyncio.create_task(stacks.known())
        assert RoutedModels.of(await reader.readline()).version == 1
        assert not known.done()
        writer.write(ModelUse(read=1).line())
        await known
        writer.close()
        listener.close()

    asyncio.run(follow())


async def told(_models: RoutedModels) -> None:
    pass


def test_what_calls_wait_for_is_said_again_after_the_supervisors_socket_was_lost(tmp_path: Path) -> None:
    async def follow() -> None:
        here = tmp_path / "s"
        connections: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        listener = await asyncio.start_unix_server(lambda *both: connections.put_nowait(both), here)
        supervisor = SupervisorConnection(here, told)
        following = asyncio.create_task(supervisor.run())

        async def connected(version: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await connections.get()
            writer.write(RoutedModels([RoutedModel("x", ModelState.AVAILABLE)], version).line())
            assert ModelUse.of(await reader.readline()).read == version
            return reader, writer

        reader, writer = await connected(1)
        writer.close()
        await writer.wait_closed()
        waiting = asyncio.create_task(supervisor.served("x"))  # nobody hears it
        reader, writer = await connections.get()
        writer.write(RoutedModels([RoutedModel("x", ModelState.AVAILABLE)], 2).line())
        assert ModelUse.of(await reader.readline()).wanted == ("x",)
        writer.write(RoutedModels([RoutedModel("x", ModelState.SERVING, "socket")], 3).line())
        assert (await waiting).socket == "socket"
        assert ModelUse.of(await reader.readline()) == ModelUse(read=3)
        following.cancel()
        writer.close()
        listener.close()

    asyncio.run(follow())


def launch(name: str, *, on_demand: bool = False) -> ModelLaunch:
    return ModelLaunch(name, StackConfig(backend="oracle"), on_demand)


async def test_a_model_for_which_the_system_has_no_processes_left_has_failed_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none_left(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio.get_running_loop(), "subprocess_exec", none_left)
    config = ModelsConfig((launch("x"),), "127.0.0.1", 0)
    stacks = ModelStacks(config, {}, tmp_path, lambda *_: None, lambda *_: None)
    stacks.load("x")
    await stacks.ended()
    [model] = stacks.models
    assert (model.state, model.may_load) == (ModelState.FAILED, False)
    assert "Resource temporarily unavailable" in model.detail


class FakeStack:
    """It is stopped when somebody says so."""

    def __init__(self) -> None:
        self.socket, self.stopped = "unix:s", asyncio.Event()

    async def supervise(self) -> None:
        await self.stopped.wait()

    async def stop(self) -> None:
        self.stopped.set()


async def test_a_model_that_was_put_away_and_is_loaded_again_is_not_put_away_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def starting(*_: object) -> AsyncIterator[FakeStack]:
        yield FakeStack()

    monkeypatch.setattr("paceline.cli.several_models.stacks.starting", starting)
    config = ModelsConfig((launch("x", on_demand=True),), "127.0.0.1", 0)
    stacks = ModelStacks(config, {}, tmp_path, lambda *_: None, lambda *_: None)
    listener = await asyncio.start_unix_server(stacks.connected, stacks.socket)
    reader, writer = await asyncio.open_unix_connection(stacks.socket)
    arranging = asyncio.create_task(stacks.arrange())

    async def told(state: ModelState) -> int:
        while True:
            [model] = (models := RoutedModels.of(await reader.readline()))
            if model.state is state:
                return models.version

    async with asyncio.timeout(LIMIT_S):
        writer.write(ModelUse(await told(ModelState.AVAILABLE), wanted=("x",)).line())
        writer.write(ModelUse(await told(ModelState.SERVING), unwanted=("x",)).line())
        writer.write(ModelUse(await told(ModelState.DRAINING), unwanted=("x",), wanted=("x",)).line())
        # It was loaded again before the router has heard that it was put away.
        writer.write(ModelUse(await told(ModelState.SERVING)).line())
        await stacks.known()
        assert [one.state for one in stacks.models] == [ModelState.SERVING]
    arranging.cancel()
    writer.close()
    listener.close()


async def test_a_model_that_stays_and_could_not_be_loaded_serves_later_without_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems, started = ["no memory", "no memory"], asyncio.Event()

    @asynccontextmanager
    async def starting(*_: object) -> AsyncIterator[FakeStack]:
        if problems:
            raise ChildFailed(problems.pop())
        started.set()
        yield FakeStack()

    monkeypatch.setattr("paceline.cli.several_models.stacks.starting", starting)
    monkeypatch.setattr("paceline.cli.several_models.memory.FIRST_RETRY_S", 0.01)
    stacks = ModelStacks(
        ModelsConfig((launch("x"),), "127.0.0.1", 0), {}, tmp_path, lambda *_: None, lambda *_: None
    )
    arranging = asyncio.create_task(stacks.arrange())
    stacks.load("x")
    async with asyncio.timeout(LIMIT_S):
        await started.wait()
        await stacks.settled(["x"])
    assert (stacks.models["x"].state, stacks.models["x"].loads) == (ModelState.SERVING, 3)
    arranging.cancel()
    await stacks.stop()


def test_a_model_that_can_not_fit_beside_those_that_stay_is_refused_by_its_name() -> None:
    models = launch("stays"), launch("small", on_demand=True), launch("large", on_demand=True)
    config = ModelsConfig(models, "127.0.0.1", 0, memory=1 << 30)
    config.check_fits({"stays": 400 << 20, "small": 400 << 20})
    with pytest.raises(
        ChildFailed, match=r"model large needs 0\.63 GB, and of --memory 1\.07 GB it can have"
    ):
        config.check_fits({"stays": 400 << 20, "small": 400 << 20, "large": 600 << 20})
    ModelsConfig(models, "127.0.0.1", 0).check_fits({"large": 1 << 60})  # without a bound


def test_lines_of_a_models_processes_have_its_name() -> None:
    lines: list[str] = []
    say = named_lines('a"b', lambda _, line: lines.append(line))
    say("scheduler", '{"message": "x"}')
    say("scheduler", "x")
    assert json.loads(lines[0]) == {"model": 'a"b', "message": "x"}
    assert lines[1] == '[a"b] x'
