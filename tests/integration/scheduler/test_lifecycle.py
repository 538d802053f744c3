"""A scheduler at its limits, without executors, behind TLS and tokens, and at its end."""

from __future__ import annotations

import asyncio
import re
import signal
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from paceline import aio, errors
from paceline.channel import Security

from tests.support.processes import ServiceProcess
from tests.support.stack import Stack, eventually, oracle_stack

pytestmark = pytest.mark.long

PROMPT = "Once upon a time"
TLS = Path(__file__).parents[2] / "support" / "tls"
LONG = {"max_tokens": 20_000, "ignore_eos": True}


async def health(address: str) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest())).status


async def begun(client: aio.Client, **options: object) -> aio.Generation:
    generation = client.generate(PROMPT, **(LONG | options))  # type: ignore[arg-type]
    await anext(generation)
    return generation


async def one_waits(client: aio.Client) -> None:
    async def waits() -> bool:
        return (await client.status()).waiting == 1

    await eventually(waits, "no request is queued")


async def test_a_full_queue_refuses_with_a_retry_time_and_continues_after_a_cancel(tmp_path: Path) -> None:
    flags = ["--max-running", "1", "--max-queued-requests", "1"]
    with oracle_stack(tmp_path, executor=["--step-ms", "2"], scheduler=flags) as stack:
        async with stack.client() as client:
            running = await begun(client)
            queued = client.generate(PROMPT, max_tokens=3, ignore_eos=True)
            await one_waits(client)
            with pytest.raises(errors.QueueFull) as caught:
                await client.completions(PROMPT, max_tokens=1)
            assert caught.value.reason == "QUEUE_FULL"
            assert caught.value.retry_after_s is not None
            running.close()
            (completion,) = await queued.collect()
            assert len(completion.token_ids) == 3
            assert (await client.status()).refused == 1


async def test_a_request_that_can_never_fit_is_refused_and_blocks_no_other(tmp_path: Path) -> None:
    with oracle_stack(tmp_path, executor=["--pages", "8"]) as stack:  # 128 tokens
        async with stack.client() as client:
            for options in ({"max_tokens": 200}, {"prompt": "x" * 200}):
                with pytest.raises(errors.InvalidRequest):
                    await client.completions(**({"prompt": PROMPT} | options))
            (completion,) = await client.completions(PROMPT, max_tokens=5, ignore_eos=True)
            assert len(completion.token_ids) == 5


async def test_without_an_executor_requests_are_refused_with_the_executors_address(tmp_path: Path) -> None:
    scheduler = ServiceProcess("scheduler_service", ["--executor", "127.0.0.1:9"], tmp_path)
    try:
        async with aio.Client(scheduler.address, failover_timeout_s=0) as client:
            status = await client.status(timeout_s=5)
            (executor,) = await client.executors(timeout_s=5)
            assert (status.state, executor.connected) == ("loading", False)
            with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:9") as caught:
                await client.completions(PROMPT)
            assert caught.value.retry_after_s is not None
            with pytest.raises(errors.Unavailable):
                await client.model_info()
        assert await health(scheduler.address) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert scheduler.terminate() == 0
    finally:
        scheduler.kill()


async def test_the_first_signal_lets_streams_end_and_refuses_new_requests(tmp_path: Path) -> None:
    with oracle_stack(tmp_path, executor=["--step-ms", "5"]) as stack:
        async with stack.client() as client:
            running = client.generate(PROMPT, max_tokens=600, ignore_eos=True)
            await anext(running)
            stack.scheduler.signal(signal.SIGTERM)

            async def draining() -> bool:
                return (await client.status()).state == "draining"

            await eventually(draining, "it does not drain")
            with pytest.raises(errors.Unavailable) as caught:
                await client.completions(PROMPT, max_tokens=1)
            assert caught.value.retry_after_s is not None
            assert await health(stack.scheduler.address) == health_pb2.HealthCheckResponse.NOT_SERVING
            (completion,) = await running.collect()
            assert completion.finished is not None
        assert await asyncio.to_thread(stack.scheduler.wait, 10) == 0
        await stack.all_pages_back(stack.addresses[0])


@pytest.mark.parametrize("how", ["second signal", "drain timeout"])
async def test_streams_that_do_not_end_are_cancelled(tmp_path: Path, how: str) -> None:
    flags = ["--max-running", "1", *([] if how == "second signal" else ["--drain-timeout-s", "0.2"])]
    with oracle_stack(tmp_path, executor=["--step-ms", "2"], scheduler=flags) as stack:
        async with aio.Client(stack.scheduler.address, failover_timeout_s=0) as client:
            running = await begun(client)
            waiting = client.generate(PROMPT, max_tokens=1)
            await one_waits(client)
            stack.scheduler.signal(signal.SIGTERM)
            if how == "second signal":

                async def draining() -> bool:
                    return (await client.status()).state == "draining"

                await eventually(draining, "it does not drain")
                stack.scheduler.signal(signal.SIGTERM)
            with pytest.raises(errors.StreamLost, match="shutting down") as caught:
                await running.collect()
            assert caught.value.reason == "SHUTTING_DOWN"
            with pytest.raises(errors.Unavailable):  # it had no tokens: send it elsewhere
                await waiting.collect()
        assert await asyncio.to_thread(stack.scheduler.wait, 10) == 0
        await stack.all_pages_back(stack.addresses[0])


async def test_metrics_show_what_happened(tmp_path: Path) -> None:
    with oracle_stack(tmp_path, scheduler=["--metrics-port", "0", "--log-format", "json"]) as stack:
        async with stack.client() as client:
            await client.completions(PROMPT, max_tokens=7, ignore_eos=True)
            with pytest.raises(errors.InvalidRequest):
                await client.completions(PROMPT, max_tokens=10**6)
        port = re.findall(r'"metrics_port": (\d+)', stack.scheduler.log)[0]

        def scrape() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
                return str(reply.read(), "utf-8")

        async def counted() -> bool:
            return "paceline_scheduler_completion_tokens_total 7.0" in await asyncio.to_thread(scrape)

        await eventually(counted, "tokens are not counted")
        page = await asyncio.to_thread(scrape)
        assert "paceline_scheduler_first_token_seconds_count 1.0" in page
        assert "paceline_scheduler_inter_token_seconds_count 6.0" in page
        assert 'paceline_scheduler_rejections_total{reason="INVALID_REQUEST"} 1.0' in page


async def test_plaintext_beyond_loopback_is_refused_unless_asked_for(tmp_path: Path) -> None:
    scheduler = ServiceProcess("scheduler_service", ["--host", "0.0.0.0"], tmp_path)
    try:
        assert await asyncio.to_thread(scheduler.wait, 20) != 0
        assert "insecure" in scheduler.log
    finally:
        scheduler.kill()


async def test_a_token_is_demanded_from_all_but_health_checks(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("sesame\n")
    stack = Stack(tmp_path)
    try:
        address = stack.start_executor("--auth-token-file", str(secret))
        flags = ["--auth-token-file", str(secret), "--executor-token-file", str(secret)]
        stack.start_scheduler(*flags, executors=[address])
        stack.scheduler.wait_serving()
        for security in (Security(), Security(token="wrong")):
            async with aio.Client(stack.scheduler.address, security=security) as client:
                with pytest.raises(errors.Unauthenticated):
                    await client.completions(PROMPT, max_tokens=1)
                with pytest.raises(errors.Unauthenticated):
                    await client.generate(PROMPT, max_tokens=1).collect()
        async with aio.Client(stack.scheduler.address, security=Security(token="sesame")) as client:
            await client.completions(PROMPT, max_tokens=1)
    finally:
        stack.kill()


async def test_both_connections_run_over_mutual_tls_and_demand_a_certificate(tmp_path: Path) -> None:
    ca, server, client = (TLS / name for name in ("ca.pem", "server.pem", "client.pem"))
    flags = ["--tls-cert", str(server), "--tls-key", str(server.with_suffix(".key"))]
    flags += ["--tls-client-ca", str(ca)]
    own = ["--executor-tls-ca", str(ca), "--executor-tls-cert", str(client)]
    own += ["--executor-tls-key", str(client.with_suffix(".key"))]
    stack = Stack(tmp_path)
    try:
        address = stack.start_executor(*flags, wait=False)
        stack.start_scheduler(*flags, *own, executors=[address])
        friend = Security(ca_file=ca, cert_file=client, key_file=client.with_suffix(".key"))
        async with aio.Client(stack.scheduler.address, security=friend) as known:

            async def serving() -> bool:
                return (await known.status(timeout_s=5)).state == "serving"

            await eventually(serving, "the links do not come up", timeout_s=20)
            await known.completions(PROMPT, max_tokens=1)
        for security in (Security(ca_file=ca), Security()):
            async with aio.Client(stack.scheduler.address, security=security) as unknown:
                with pytest.raises(errors.Unavailable):
                    await unknown.status(timeout_s=5)
    finally:
        stack.kill()


async def test_with_only_a_draining_executor_new_requests_end_after_the_failover_timeout(
    tmp_path: Path,
) -> None:
    flags = ["--failover-timeout-s", "0.5", "--heartbeat-interval-s", "0.1"]
    with oracle_stack(tmp_path, executor=["--step-ms", "2"], scheduler=flags) as stack:
        (address,) = stack.addresses
        async with stack.client() as client, aio.ExecutorClient(address) as executor:
            running = await begun(client, max_tokens=500)
            draining = asyncio.create_task(executor.drain(wait_s=60))

            async def seen() -> bool:
                return (await client.status()).state == "no_executor"

            await eventually(seen, "the state does not become no_executor")
            assert await health(stack.scheduler.address) == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await client.executors())[0].detail == "draining"
            with pytest.raises(
                errors.Unavailable, match="no executor"
            ) as caught:  # what runs does not hide it
                await client.completions(PROMPT, max_tokens=1)
            assert caught.value.retry_after_s is not None
            (completion,) = await running.collect()  # what runs goes on
            assert completion.finished is not None
            assert await draining == 0
            with pytest.raises(errors.Unavailable, match="no executor"):
                await client.completions(PROMPT, max_tokens=1)
            waiting = asyncio.create_task(client.completions(PROMPT, max_tokens=1))
            stack.restart_executor(address)
            await asyncio.gather(waiting, return_exceptions=True)  # it may have come too late
            await client.completions(PROMPT, max_tokens=1)
            assert (await client.status()).state == "serving"


async def test_a_scheduler_without_an_executor_reports_its_state(tmp_path: Path) -> None:
    with oracle_stack(tmp_path) as stack:
        (address,) = stack.addresses
        async with stack.client() as client:
            assert (await client.status()).state == "serving"
            stack.executor(address).kill()

            async def seen() -> bool:
                return (await client.status()).state == "no_executor"

            await eventually(seen, "the state does not become no_executor")
            assert await health(stack.scheduler.address) == health_pb2.HealthCheckResponse.NOT_SERVING
