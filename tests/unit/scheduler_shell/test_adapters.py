"""Adapters are loaded on all executors or on none, on those that come later too, and unloaded when unused."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from paceline.channel import PLAINTEXT
from paceline.executor.v1 import executor_pb2
from paceline.scheduler.v1 import admin_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.identity import Identity

from scheduler_service.adapters import AdapterAdmin
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.evaluation import Evaluation, EvaluationInput
from scheduler_service.core.request import Request, SamplingSettings
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.step import Capacity
from scheduler_service.errors import ErrorReason
from scheduler_service.link.codec.handshake import decode_adapter
from scheduler_service.link.executor import ExecutorLink
from scheduler_service.link.pool import ExecutorPool
from scheduler_service.link.required_adapters import WantedAdapters
from scheduler_service.metrics.adapters import MAX_ADAPTERS, OTHER, AdapterMetrics
from scheduler_service.model import ServedAdapter
from scheduler_service.rpc.arriving import ArrivingCalls
from scheduler_service.rpc.codec.adapters import check_load, check_still_served, find_adapter
from scheduler_service.rpc.codec.embed import EmbedTask
from scheduler_service.rpc.codec.requests import check_request
from scheduler_service.rpc.codec.rerank import RerankTask
from scheduler_service.rpc.codec.score import ScoreTask
from scheduler_service.rpc.evaluations import Evaluations
from scheduler_service.text.job import TextLimits
from scheduler_service.text.pool import TextPool
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.fake_executor import FakeExecutor, serving
from tests.unit.scheduler_shell.models_made_here import DRAFTING, LIMITS, MODEL
from tests.unit.scheduler_shell.test_link import TIMING

SQL = ServedAdapter("sql", "tuned/sql", b"print of sql", 4, 100)
CAPACITY = Capacity(10, 16, 64, 10, 10, 100, max_adapter_slots=2)


class Fleet:
    """A pool of fake executors, and what loads adapters there."""

    def __init__(self, ports: list[int]) -> None:
        self._changed = asyncio.Event()
        self.wanted = WantedAdapters()
        self.pool = ExecutorPool(
            [f"127.0.0.1:{port}" for port in ports],
            PLAINTEXT,
            TIMING,
            LIMITS,
            TextPool(TextLimits()),
            self._changed.set,
            adapters=self.wanted,
        )
        self.core = StepScheduler(CoreConfig())
        self.core.executor_ready(CAPACITY, 0.0)
        self.request_ended = asyncio.Event()
        self.admin = AdapterAdmin(self.core, self.pool, self.wanted, self.request_ended)

    @property
    def links(self) -> list[ExecutorLink]:
        return list(self.pool.links)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition, which is looked at after each change of an executor's state."""
        async with asyncio.timeout(60):
            while not condition():
                await self._changed.wait()
                self._changed.clear()

    async def all_ready(self) -> None:
        await self.until(lambda: all(link.ready for link in self.links))


@asynccontextmanager
async def fleet(*fakes: FakeExecutor) -> AsyncIterator[Fleet]:
    """Executors that have the adapter `SQL` in their directories."""
    async with serving(fakes[0]) as first, serving(fakes[-1]) as last:
        ports = [first, last][: len(fakes)]
        made = Fleet(ports)
        task = asyncio.create_task(made.pool.run())
        try:
            yield made
        finally:
            made.admin.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def executor(**directory: bytes) -> FakeExecutor:
    fake = FakeExecutor()
    fake.capabilities.append(executor_pb2.CAPABILITY_ADAPTERS)
    fake.directory = directory or {SQL.path: SQL.fingerprint}
    return fake


async def test_an_adapter_is_loaded_everywhere_before_requests_may_name_it() -> None:
    one, two = executor(), executor()
    two.loading.clear()
    async with fleet(one, two) as served:
        await served.all_ready()
        loading = asyncio.create_task(served.admin.load("sql", "tuned/sql"))
        async with asyncio.timeout(60):
            await asyncio.gather(one.loaded.wait(), two.asked.wait())
        assert served.wanted.find("sql") is None
        two.loading.set()
        assert await loading == SQL == served.wanted.find("sql")
        assert one.adapters == two.adapters == {"sql": SQL.fingerprint}
        assert await served.admin.load("sql", "tuned/sql") == SQL
        assert served.wanted.loads == 1


async def test_executors_that_restart_or_come_later_have_the_adapters_before_they_are_used() -> None:
    fake = executor()
    async with fleet(fake) as served:
        await served.all_ready()
        await served.admin.load("sql", "tuned/sql")
        fake.adapters, fake.epoch = {}, 2  # another process
        await served.until(lambda: not served.links[0].ready)
        await served.all_ready()
        assert fake.adapters == {"sql": SQL.fingerprint}


async def test_an_executor_that_is_greeted_during_a_load_is_not_used_without_the_adapter() -> None:
    one, two = executor(), executor()
    one.loading.clear()
    two.state = executor_pb2.EXECUTOR_STATE_LOADING
    async with fleet(one, two) as served:
        await served.until(lambda: served.links[0].ready)
        loading = asyncio.create_task(served.admin.load("sql", "tuned/sql"))
        two.state = executor_pb2.EXECUTOR_STATE_SERVING
        await served.all_ready()
        one.loading.set()
        await loading
        assert two.adapters == {"sql": SQL.fingerprint}


async def test_an_executor_whose_session_is_being_opened_during_a_load_is_not_used_without_the_adapter() -> (
    None
):
    one, two = executor(), executor()
    two.sessions.clear()
    async with fleet(one, two) as served:
        await served.until(lambda: served.links[0].ready)
        async with asyncio.timeout(60):
            await two.greeted.wait()
        await served.admin.load("sql", "tuned/sql")
        assert not two.adapters
        two.sessions.set()
        await served.until(lambda: served.links[1].ready)
        assert two.adapters == {"sql": SQL.fingerprint}


async def test_different_adapters_under_one_path_are_refused_and_loaded_nowhere() -> None:
    one, two = executor(), executor(**{SQL.path: b"another"})
    async with fleet(one, two) as served:
        await served.all_ready()
        with raises(ErrorReason.ADAPTERS_DIFFER, match=f"tuned/sql holds different.*{b'another'.hex()[:12]}"):
            await served.admin.load("sql", "tuned/sql")
        assert not one.adapters
        assert not two.adapters
        assert not served.wanted.needed


async def test_an_adapter_that_one_executor_refuses_is_unloaded_from_the_others() -> None:
    one, two = executor(), executor(elsewhere=b"x")
    one.adapters["kept"] = b"before"
    async with fleet(one, two) as served:
        await served.all_ready()
        with raises(ErrorReason.MODEL_NOT_FOUND, match=r"no directory tuned/sql \(executor 127"):
            await served.admin.load("sql", "tuned/sql")
        assert one.adapters == {"kept": b"before"}
        assert served.wanted.find("sql") is None


async def test_a_name_of_other_content_is_refused_by_the_executor_s_words() -> None:
    fake = executor()
    fake.adapters["sql"] = b"another"
    async with fleet(fake) as served:
        await served.all_ready()
        with raises(ErrorReason.ADAPTER_NAME, match="name: sql is another one"):
            await served.admin.load("sql", "tuned/sql")
        assert fake.adapters == {"sql": b"another"}


async def test_without_an_executor_nothing_is_loaded() -> None:
    fake = executor()
    fake.state = executor_pb2.EXECUTOR_STATE_LOADING
    async with fleet(fake) as served:
        with raises(ErrorReason.NOT_READY, match="no executor is ready"):
            await served.admin.load("sql", "tuned/sql")


async def test_a_scheduler_that_is_no_administrator_of_its_executor_says_what_is_missing() -> None:
    fake = executor()
    fake.refuses_admin = True
    async with fleet(fake) as served:
        await served.all_ready()
        with raises(ErrorReason.PERMISSION, match=r"the scheduler's token must be .* \(admin: true in its"):
            await served.admin.load("sql", "tuned/sql")


async def test_a_standby_executor_with_another_adapter_of_the_name_is_refused_and_told() -> None:
    one, two = executor(), executor()
    two.state = executor_pb2.EXECUTOR_STATE_LOADING
    async with fleet(one, two) as served:
        await served.until(lambda: served.links[0].ready)
        await served.admin.load("sql", "tuned/sql")
        two.adapters["sql"] = b"another"
        two.state = executor_pb2.EXECUTOR_STATE_SERVING
        await served.until(lambda: "its adapter sql is another one" in served.links[1].detail)
        assert not served.links[1].ready
        two.adapters.clear()
        two.directory[SQL.path] = b"changed"
        await served.until(lambda: b"changed".hex()[:12] in served.links[1].detail)
        assert not two.adapters
        two.directory[SQL.path] = SQL.fingerprint
        await served.all_ready()


async def test_a_load_whose_caller_leaves_goes_on() -> None:
    fake = executor()
    fake.loading.clear()
    async with fleet(fake) as served:
        await served.all_ready()
        loading = asyncio.create_task(served.admin.load("sql", "tuned/sql"))
        async with asyncio.timeout(60):
            await fake.asked.wait()
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        fake.loading.set()
        async with served.admin._turn:  # after the load
            assert served.wanted.find("sql") == SQL


def core_request(adapter: bytes) -> Request:
    return Request("r", (1, 2), SamplingSettings(), max_tokens=2, adapter=adapter)


async def test_an_unloaded_adapter_stays_on_the_executors_until_its_live_requests_have_ended() -> None:
    fake = executor()
    async with fleet(fake) as served:
        await served.all_ready()
        await served.admin.load("sql", "tuned/sql")
        served.core.add(core_request(SQL.fingerprint), 0.0)
        unloading = asyncio.create_task(served.admin.unload("sql"))
        await asyncio.sleep(0)
        assert served.wanted.find("sql") is None
        with raises(ErrorReason.ADAPTER_NAME, match="is being unloaded, and live requests may still use it"):
            await served.admin.load("sql", "tuned/sql")
        fake.adapters, fake.epoch = {}, 2  # its requests may fail over meanwhile
        await served.until(lambda: not served.links[0].ready)
        await served.all_ready()
        assert fake.adapters
        assert not unloading.done()
        served.core.cancel("r", 0.0)
        served.request_ended.set()
        assert await unloading
        assert not fake.adapters
        assert not served.wanted.needed
        assert not await served.admin.unload("sql")


async def test_an_adapter_that_is_unloaded_while_it_is_loaded_once_more_is_unloaded() -> None:
    fake = executor()
    async with fleet(fake) as served:
        await served.all_ready()
        await served.admin.load("sql", "tuned/sql")
        fake.loading.clear()
        fake.asked.clear()
        loading = asyncio.create_task(served.admin.load("sql", "tuned/sql"))
        async with asyncio.timeout(60):
            await fake.asked.wait()
        unloading = asyncio.create_task(served.admin.unload("sql"))
        await asyncio.sleep(0)
        fake.loading.set()
        with raises(ErrorReason.ADAPTER_NAME, match="is being unloaded"):
            await loading
        assert await unloading
        assert not fake.adapters
        assert not served.wanted.needed


async def test_names_of_one_content_are_unloaded_one_by_one() -> None:
    fake = executor()
    async with fleet(fake) as served:
        await served.all_ready()
        await served.admin.load("sql", "tuned/sql")
        await served.admin.load("sql-2", "tuned/sql")
        served.core.add(core_request(SQL.fingerprint), 0.0)
        assert await served.admin.unload("sql")  # its requests have the other name's
        assert fake.adapters == {"sql-2": SQL.fingerprint}


async def test_what_somebody_else_has_unloaded_is_loaded_again() -> None:
    fake = executor()
    async with fleet(fake) as served:
        await served.all_ready()
        await served.admin.load("sql", "tuned/sql")
        fake.adapters.clear()
        link = served.links[0]
        link.restore_adapters()
        assert link._restoring is not None
        await link._restoring
        assert fake.adapters
        assert (link.ready, link.losses) == (True, 0)
        fake.adapters["sql"] = b"another"
        link.restore_adapters()
        await served.until(lambda: "its adapter sql is another one" in link.detail)
        assert served.links[0].losses == 1


def names(*adapters: ServedAdapter) -> WantedAdapters:
    wanted = WantedAdapters()
    for adapter in adapters:
        wanted.add(adapter)
    return wanted


def test_a_request_names_the_model_or_an_adapter() -> None:
    adapters = names(SQL)
    for name, adapter in (("", None), ("small", None), ("sql", SQL)):
        checked = check_request(pb.GenerateRequest(text="x", model=name), MODEL, DRAFTING, adapters)
        assert checked.adapter == adapter
        request = checked.to_core([1], Identity("a", "token"), arrival=0.0, deadline=None)
        assert request.adapter == (adapter.fingerprint if adapter else b"")


EVALUATIONS: tuple[tuple[Any, Any], ...] = (
    (ScoreTask, pb.ScoreRequest(inputs=[pb.ScoreInput(text="x")])),
    (EmbedTask, pb.EmbedRequest(inputs=[pb.EmbedInput(text="x")])),
    (RerankTask, pb.RerankRequest(query="x", documents=["x"])),
)
ABLE = replace(MODEL, can_score=True, embedding_size=8)


@pytest.mark.parametrize(("task", "message"), EVALUATIONS)
def test_an_evaluation_names_the_model_or_an_adapter(task: Any, message: Any) -> None:
    evaluation = Evaluation((EvaluationInput((1, 2), 1),))
    for name, adapter in (("", None), ("small", None), ("sql", SQL)):
        message.model = name
        call = task(message, ABLE, names(SQL)).call
        assert call.adapter == adapter
        request = call.to_core(evaluation, 0, Identity("a", "token"), arrival=0.0, deadline=None)
        assert request.adapter == (adapter.fingerprint if adapter else b"")
    message.model = "x"
    with raises(ErrorReason.MODEL_NOT_FOUND, match="'small' is; adapters: sql$"):
        task(message, ABLE, names(SQL))


async def test_an_evaluation_whose_adapter_is_unloaded_while_it_is_tokenized_is_not_found() -> None:
    adapters = names(SQL)

    class Text:
        async def encode_items(self, *_: object, **__: object) -> list[array[int]]:
            adapters.leave("sql")
            return [array("I", [1, 2])]

    async def refused(*_: object) -> None:
        pass

    service: Any = SimpleNamespace(
        served_for_request=lambda _: SimpleNamespace(model=ABLE, text=Text()),
        wanted=adapters,
        streams=SimpleNamespace(check=lambda *_: None),
        core=SimpleNamespace(max_request_tokens=64),
        settings=SimpleNamespace(core=CoreConfig()),
    )
    caller: Any = SimpleNamespace(identify=lambda _: Identity("a", "token"))
    context: Any = SimpleNamespace(time_remaining=lambda: None)
    message = pb.ScoreRequest(inputs=[pb.ScoreInput(text="x")], model="sql")
    with raises(ErrorReason.MODEL_NOT_FOUND):
        await Evaluations(service, caller, refused, ArrivingCalls()).answer(
            partial(ScoreTask, message), context
        )


def test_an_unknown_name_is_refused_with_the_names_that_there_are() -> None:
    with raises(ErrorReason.MODEL_NOT_FOUND, match="^model: 'x' is not served, 'small' is$"):
        find_adapter("x", MODEL, names())
    with raises(ErrorReason.MODEL_NOT_FOUND, match="'small' is; adapters: a, sql$"):
        find_adapter("x", MODEL, names(SQL, replace(SQL, name="a")))
    many = names(*(replace(SQL, name=f"a{number:03}") for number in range(1000)))
    with raises(ErrorReason.MODEL_NOT_FOUND, match=r"adapters: a000, .*, a015, \.\.\.$"):
        find_adapter("y" * 10_000, MODEL, many)


def test_an_adapter_that_was_unloaded_while_its_request_was_tokenized_is_not_found() -> None:
    adapters = names(SQL)
    check_still_served(SQL, MODEL, adapters)
    adapters.leave("sql")
    with raises(ErrorReason.MODEL_NOT_FOUND):
        check_still_served(SQL, MODEL, adapters)
    adapters.forget("sql")
    adapters.add(replace(SQL, fingerprint=b"other content"))
    with raises(ErrorReason.MODEL_NOT_FOUND, match="unloaded just now"):
        check_still_served(SQL, MODEL, adapters)


@pytest.mark.parametrize(("named", "sent"), [("sql", b""), ("sql", b"another"), ("", SQL.fingerprint)])
def test_output_of_another_adapter_is_not_continued(named: str, sent: bytes) -> None:
    message = pb.GenerateRequest(text="x", model=named, sampling=pb.SamplingParams(seed=1))
    message.continuation.model_fingerprint = MODEL.fingerprints.model
    message.continuation.sampler = MODEL.fingerprints.sampler
    message.continuation.adapter_fingerprint = sent
    with raises(ErrorReason.CONTINUATION, match=r"^continuation\.adapter_fingerprint: is another one here$"):
        check_request(message, MODEL, DRAFTING, names(SQL))
    message.continuation.adapter_fingerprint = SQL.fingerprint if named else b""
    assert check_request(message, MODEL, DRAFTING, names(SQL)).continuation is not None


HAS = replace(MODEL, has_adapters=True)


@pytest.mark.parametrize("name", ["", ".x", "-x", "a/b", "x" * 129, "ä", "a b", "small"])
def test_a_name_that_no_adapter_may_have_is_refused(name: str) -> None:
    with raises(ErrorReason.INVALID_REQUEST, match="^name: "):
        check_load(admin_pb2.LoadAdapterRequest(name=name), HAS)


def test_a_load_is_checked_before_executors_are_asked() -> None:
    assert check_load(admin_pb2.LoadAdapterRequest(name="a"), HAS) == ("a", "a")
    assert check_load(admin_pb2.LoadAdapterRequest(name="a", path="b/c"), HAS) == ("a", "b/c")
    with raises(ErrorReason.INVALID_REQUEST, match="^path: "):
        check_load(admin_pb2.LoadAdapterRequest(name="a", path="x" * 1025), HAS)
    with raises(ErrorReason.UNSUPPORTED, match="--adapter-dir"):
        check_load(admin_pb2.LoadAdapterRequest(name="a"), MODEL)


def test_metrics_have_a_bounded_number_of_adapters() -> None:
    metrics = AdapterMetrics()
    adapters = [replace(SQL, name=f"a{number:04}") for number in range(1000)]
    metrics.show(adapters, {one.name: 2 for one in adapters}, {}, 1000, 0)
    samples = [sample for family in metrics.collect() for sample in family.samples]
    named = [sample for sample in samples if sample.name.endswith("adapter_requests_total")]
    assert len(named) == MAX_ADAPTERS + 1
    assert named[-1].labels == {"adapter": OTHER}
    assert sum(sample.value for sample in named) == 2000


def test_an_adapter_has_the_name_that_was_asked_for_and_a_fingerprint() -> None:
    message = executor_pb2.Adapter(name="other", fingerprint=b"print", rank=4, bytes=9)
    assert decode_adapter(message, "sql", "p") == ServedAdapter("sql", "p", b"print", 4, 9)
    for wrong in (b"", b"x" * 65):
        with pytest.raises(ValueError, match="fingerprint"):
            decode_adapter(executor_pb2.Adapter(fingerprint=wrong), "sql", "p")
