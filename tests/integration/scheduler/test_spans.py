"""Spans of requests, from the SDK to steps, as an OTLP receiver gets them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from paceline import Finished, aio, errors, stop_tracing_calls, trace_calls
from service_kit.otlp import SpanSender

from tests.support.checkout import environment
from tests.support.otlp_receiver import Receiver, SeenSpan, otlp_receiver
from tests.support.ports import kept_port
from tests.support.processes import ServiceProcess
from tests.support.stack import Stack, eventually, oracle_stack

pytestmark = pytest.mark.long

REQUESTS, CONTINUED = 200, 40
WAITS = ("queue", "preempted", "failover")
MS = 1e-3


@contextmanager
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Spans of this process's clients, and of services that are started in the block."""
    with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{receiver.address}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        sender = SpanSender("application")
        trace_calls(sender.provider)
        try:
            yield receiver
        finally:
            stop_tracing_calls()
            sender.close()


def by_trace(spans: Sequence[SeenSpan]) -> dict[str, list[SeenSpan]]:
    traces = defaultdict(list)
    for span in spans:
        traces[span.trace].append(span)
    return traces


def server_of(trace: Sequence[SeenSpan]) -> SeenSpan:
    """The only one; its parent is the client's span."""
    [server] = [span for span in trace if span.kind == "SERVER"]
    [client] = calls(trace)
    assert server.parent == client.id
    assert client.began - MS <= server.began
    return server


def stays_of(trace: Sequence[SeenSpan], server: SeenSpan) -> list[SeenSpan]:
    """The children, which follow one another; those that wait have reasons for all of their time."""
    stays = sorted((one for one in trace if one.parent == server.id), key=lambda one: (one.began, one.ended))
    for one, later in pairwise(stays):
        assert later.began == pytest.approx(one.ended, abs=1e-6), stays
    for one in stays:
        assert (one.name in WAITS) or "paceline.wait.reason" not in one.attributes
        if one.name in WAITS:
            assert one.waited == pytest.approx(one.seconds, abs=MS), one
    return stays


class Load:
    """Requests, and what their clients were told."""

    def __init__(self, client: aio.Client) -> None:
        self.client = client
        self.ends: dict[str, Finished | errors.PacelineError] = {}
        self.running = asyncio.Event()

    async def one(self, number: int) -> None:
        request_id = f"r{number}"
        tokens = 100_000 if number % 20 == 7 else 24  # too many: refused
        stream = self.client.generate(
            f"Prompt {number} secret-{number}",
            max_tokens=tokens,
            seed=number,
            ignore_eos=True,
            request_id=request_id,
        )
        try:
            async for event in stream:
                if number == 30:
                    self.running.set()
                if number % 20 == 3 and request_id not in self.ends:
                    await self.client.abort([request_id])
                if isinstance(event, Finished):
                    self.ends[request_id] = event
        except errors.PacelineError as error:
            self.ends[request_id] = error


async def test_each_request_has_one_trace_from_the_sdk_to_its_stays_with_sums_that_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with received(monkeypatch) as receiver:
        executor = ["--step-ms", "2", "--pages", "96", "--page-size", "4", "--otel"]
        scheduler = [
            "--otel",
            "--otel-step-share",
            "0.5",
            "--max-running",
            "24",
        ]
        with oracle_stack(tmp_path, executor=executor, executors=2, scheduler=scheduler) as stack:
            async with stack.client() as client:
                load = Load(client)
                tasks = [asyncio.create_task(load.one(number)) for number in range(REQUESTS)]
                await load.running.wait()
                await lose_the_active_one(stack)
                await asyncio.gather(*tasks)
            spans = receiver.wait(lambda seen: len(calls(seen)) == sum(map(is_request, seen)) == REQUESTS)
            assert stack.scheduler.terminate() == 0
            spans = receiver.wait(lambda seen: len(seen) >= len(spans))
    assert not [one for one in spans if "secret" in str(one) or "Prompt" in str(one)]
    seen = judge(load, spans)
    assert seen >= {"queue", "prefill", "decode", "preempted", "failover", "ABORTED", "INVALID_REQUEST"}
    judge_steps(spans)


def calls(spans: Sequence[SeenSpan]) -> list[SeenSpan]:
    """Those of this process's client."""
    return [one for one in spans if one.service == "application"]


def is_gateway(span: SeenSpan) -> bool:
    return span.service == "paceline-gateway"


def is_request(span: SeenSpan) -> bool:
    return span.kind == "SERVER" and span.service == "paceline-scheduler"


async def lose_the_active_one(stack: Stack) -> None:
    async with stack.client() as client:
        [active] = [one.address for one in await client.executors() if one.active]
    stack.executor(active).kill()


def judge(load: Load, spans: Sequence[SeenSpan]) -> set[str]:
    """Every request's trace; returns the stages and the reasons of failures that were seen."""
    traces = by_trace([one for one in spans if one.name != "step"])
    assert len(traces) == REQUESTS
    seen = set()
    for trace in traces.values():
        server = server_of(trace)
        stays = stays_of(trace, server)
        seen |= {one.name for one in stays} | {str(server.attributes.get("error.type"))}
        if not stays:  # it was refused
            assert server.attributes["rpc.response.status_code"] in ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
            continue
        assert server.began - MS <= stays[0].began
        assert stays[-1].ended <= server.ended + MS
        end = load.ends[server.attributes["gen_ai.request.id"]]
        if isinstance(end, errors.PacelineError):
            assert end.reason == server.attributes["error.type"]
            continue
        judge_usage(end, server, stays)
    return seen


def judge_usage(end: Finished, server: SeenSpan, stays: Sequence[SeenSpan]) -> None:
    """The spans say what the client was told."""
    usage, first = end.usage, stays[0]
    assert first.name == "queue"
    assert first.seconds == pytest.approx(usage.queue_ms * MS, abs=MS)
    assert sums(stays[:1]) == pytest.approx({k: 1e-6 * us for k, us in usage.queue_waits.items()}, abs=MS)
    assert sums(stays[1:]) == pytest.approx({k: 1e-6 * us for k, us in usage.preempted_waits.items()}, abs=MS)
    total = stays[-1].ended - first.began
    assert total == pytest.approx(usage.total_ms * MS, abs=MS)
    assert server.attributes["gen_ai.usage.output_tokens"] == usage.completion_tokens


def sums(stays: Sequence[SeenSpan]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for one in stays:
        reasons = one.attributes.get("paceline.wait.reasons", ())
        for reason, seconds in zip(reasons, one.attributes.get("paceline.wait.seconds", ()), strict=True):
            found[reason] += seconds
    return found


def judge_steps(spans: Sequence[SeenSpan]) -> None:
    """Steps are linked to the requests that they compute, and the executor's spans are their children."""
    steps = {one.id: one for one in spans if one.name == "step" and one.kind == "CLIENT"}
    servers = {(one.trace, one.id) for one in spans if is_request(one)}
    computed = [one for one in spans if one.name == "step" and one.kind == "SERVER"]
    assert computed
    assert {one.parent for one in computed} <= steps.keys()
    links = {link for one in steps.values() for link in one.links}
    assert links
    assert links <= servers


async def test_streams_that_are_continued_on_another_scheduler_are_one_trace_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--otel", "--drain-timeout-s", "0")
    with (
        received(monkeypatch) as receiver,
        oracle_stack(tmp_path, executor=["--step-ms", "5"], scheduler=flags) as stack,
    ):
        first = stack.scheduler
        try:
            stack.start_scheduler(*flags)
            both = {one.address: one for one in (first, stack.scheduler.wait_serving())}
            async with aio.Client(list(both), directory="off") as client:
                streams = [
                    client.generate(f"x{n}", max_tokens=300, ignore_eos=True) for n in range(CONTINUED)
                ]
                await asyncio.gather(*(anext(stream) for stream in streams))
                await asyncio.to_thread(first.terminate)
                await asyncio.gather(*(stream.collect() for stream in streams))
            moved = sum(stream.resumptions for stream in streams)
            assert 0 < moved < CONTINUED
            requests = CONTINUED + moved
            spans = receiver.wait(
                lambda seen: len(calls(seen)) == CONTINUED and sum(map(is_request, seen)) == requests
            )
        finally:
            first.kill()
    traces = by_trace([one for one in spans if one.name != "step"])
    assert len(traces) == CONTINUED
    for trace in traces.values():
        [call] = calls(trace)
        servers = sorted(filter(is_request, trace), key=lambda one: one.began)
        assert [one.attributes.get("error.type") for one in servers] in ([None], ["SHUTTING_DOWN", None])
        for server in servers:
            assert server.parent == call.id
            stays = stays_of(trace, server)
            assert [one.name for one in stays] == ["queue", "prefill", "decode"]
            assert server.began - MS <= stays[0].began
            assert stays[-1].ended <= server.ended + MS
        assert "error.type" not in call.attributes
        assert call.attributes["gen_ai.usage.output_tokens"] == 300


async def test_a_call_that_is_refused_before_it_is_read_has_a_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = ("--otel", "--otel-step-share", "0", "--max-running", "1", "--max-queued-requests", "1")
    with received(monkeypatch) as receiver, oracle_stack(tmp_path, scheduler=scheduler) as stack:
        async with stack.client() as client:
            running = client.generate("x", max_tokens=5000, ignore_eos=True)
            await anext(running)  # before, it has the queue's only place
            waiting = client.generate("x", max_tokens=5000, ignore_eos=True)

            async def full() -> bool:
                return (await client.status()).waiting == 1

            await eventually(full, "nothing waits")
            with pytest.raises(errors.RetryLater):
                await client.complete("one too many")
            waiting.close()
            running.close()
        spans = receiver.wait(lambda seen: len(calls(seen)) == sum(map(is_request, seen)) == 3)
    ends = {server_of(trace).attributes.get("error.type"): trace for trace in by_trace(spans).values()}
    assert ends.keys() == {"QUEUE_FULL", "CLIENT_LEFT"}
    refused = ends["QUEUE_FULL"]
    assert {one.attributes["error.type"] for one in refused} == {"QUEUE_FULL"}
    assert len(refused) == 2


async def test_the_doors_spans_are_between_its_callers_and_the_schedulers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, parent = "ab" * 16, "cd" * 8
    with received(monkeypatch) as receiver, oracle_stack(tmp_path, scheduler=["--otel"]) as stack:
        flags = ["--scheduler", stack.scheduler.address, "--otel"]
        door = ServiceProcess("paceline_openai", flags, tmp_path / "door")
        try:
            body = json.dumps({"model": "", "prompt": "secret", "max_tokens": 4}).encode()
            headers = {"content-type": "application/json", "traceparent": f"00-{trace}-{parent}-01"}
            url = f"http://{door.address}/v1/completions"
            with await asyncio.to_thread(urlopen, Request(url, body, headers)) as answer:
                assert answer.status == 200
            spans = receiver.wait(
                lambda seen: any(map(is_gateway, seen)) and any(map(is_request, seen)),
            )
        finally:
            door.kill()
    assert "secret" not in str(spans)
    [call] = filter(is_gateway, spans)
    [server] = [one for one in spans if is_request(one)]
    assert (call.trace, call.parent, call.name) == (trace, parent, "text_completion")
    assert (server.trace, server.parent) == (trace, call.id)


async def test_a_receiver_that_is_down_costs_nothing_and_its_losses_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{kept_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    metrics = kept_port()
    scheduler = ["--otel", "--metrics-port", str(metrics)]
    with oracle_stack(tmp_path, executor=["--otel"], scheduler=scheduler) as stack:
        async with stack.client() as client:
            await asyncio.gather(*[client.complete(f"p{number}", max_tokens=4) for number in range(20)])

            async def lost() -> bool:
                url = f"http://127.0.0.1:{metrics}/metrics"
                with await asyncio.to_thread(urlopen, url) as page:
                    counts = [
                        line for line in page.read().decode().splitlines() if "spans_lost_total " in line
                    ]
                return float(counts[-1].split()[1]) >= 20

            await eventually(lost, "no span was counted as lost")
            await client.complete("after", max_tokens=4)
        flags = ["--scheduler", stack.scheduler.address, "--otel"]
        door = ServiceProcess("paceline_openai", flags, tmp_path / "door")
        try:
            headers = {"content-type": "application/json"}
            body = json.dumps({"model": "", "prompt": "x", "max_tokens": 4}).encode()
            with await asyncio.to_thread(
                urlopen, Request(f"http://{door.address}/v1/completions", body, headers)
            ):
                pass

            async def lost_here() -> bool:
                with await asyncio.to_thread(urlopen, f"http://{door.address}/metrics") as page:
                    return "paceline_gateway_spans_lost_total 1.0" in page.read().decode()

            await eventually(lost_here, "the door counted no lost span")
        finally:
            door.kill()
        assert stack.scheduler.terminate() == 0


async def test_a_disabled_opentelemetry_records_nothing_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with received(monkeypatch) as receiver:
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        scheduler = ["--otel", "--otel-step-share", "1"]
        with oracle_stack(tmp_path, executor=["--otel"], scheduler=scheduler) as stack:
            async with stack.client() as client:
                assert (await client.complete("x", max_tokens=4, timeout_s=30)).token_ids
            assert stack.scheduler.terminate() == 0
        assert {span.service for span in receiver.spans} <= {"application"}


def test_opentelemetry_is_imported_only_where_it_is_on() -> None:
    code = """
import sys, paceline, paceline.aio, paceline.client
import scheduler_service.server, executor_service.server, paceline_openai.__main__
sys.exit(sum(name.startswith("opentelemetry") for name in sys.modules))
"""
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)
