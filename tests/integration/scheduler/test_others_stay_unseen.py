"""Nothing that a caller can ask for has another identity's request ids, texts, name or adapter."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from paceline import Security, aio
from paceline.cli.token import entry
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc

from tests.support.adapter_stack import adapter_stack
from tests.support.ports import kept_port
from tests.support.serve import run
from tests.support.stack import Stack, eventually

SECRETS = ("hidden-id", "hidden words", "hidden-name", "hidden-label", "c-hidden-adapter")
"""Of the other identity's requests: id, text, identity, label, adapter."""


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[tuple[Stack, int]]:
    """A stack in which `alice` and `hidden-name` both have a request that runs and one that waits."""
    tokens, port = tmp_path / "tokens.yaml", kept_port()
    admin = entry("operator", "operator", admin=True)
    tokens.write_text("\n".join((admin, *(entry(name, name) for name in ("alice", "hidden-name")), "")))
    scheduler = ("--tokens-file", str(tokens), "--max-running", "2", "--metrics-port", str(port))
    with adapter_stack(tmp_path, slots=2, executor=("--step-ms", "20"), scheduler=scheduler) as stack:
        async with aio.Client(stack.scheduler.address, security=Security(token="operator")) as operator:
            await operator.load_adapter("c-hidden-adapter", "c")
            calls = []
            for name in ("alice", "hidden-name"):
                client = operator.view(name)
                for number in range(2):
                    hidden = name != "alice"
                    options = {"model": "c-hidden-adapter"} if hidden else {}
                    call = client.complete(
                        f"{'hidden words' if hidden else 'hello'} {number}",
                        request_id=f"{'hidden-id' if hidden else 'mine'}-{number}",
                        labels={"job": "hidden-label" if hidden else "mine"},
                        max_tokens=2000,
                        ignore_eos=True,
                        **options,  # type: ignore[arg-type]
                    )
                    calls.append(asyncio.ensure_future(call))

            async def all_are_there() -> bool:
                status = await operator.status()
                return (status.running, status.waiting) == (2, 2)

            await eventually(all_are_there, "not two that run and two that wait")
            yield stack, port
            for one in calls:
                one.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


def leaked(told: str | bytes) -> list[str]:
    text = told.decode("latin-1") if isinstance(told, bytes) else told
    return [secret for secret in SECRETS if secret in text]


def scrape(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        found: bytes = answer.read()
        return found


async def test_why_steps_their_file_and_metrics_have_nothing_of_others(
    watched: tuple[Stack, int], tmp_path: Path
) -> None:
    stack, port = watched
    address = stack.scheduler.address
    metadata = (("authorization", "Bearer alice"),)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.SchedulerServiceStub(channel)
        told = {}
        for name, question in {
            "own": pb.WhyWaitingRequest(request_id="mine-1"),
            "others": pb.WhyWaitingRequest(request_id="hidden-id-1"),
            "slow": pb.WhyWaitingRequest(slow=True),
        }.items():
            told[name] = (await stub.WhyWaiting(question, metadata=metadata)).SerializeToString()
        steps = stub.WatchSteps(pb.WatchStepsRequest(last_us=60_000_000, max_steps=20), metadata=metadata)
        told["steps"] = b"".join([part.SerializeToString() async for part in steps])
        admin = (("authorization", "Bearer operator"),)
        everything = stub.WatchSteps(pb.WatchStepsRequest(last_us=60_000_000, max_steps=20), metadata=admin)
        log = b"".join([part.SerializeToString() async for part in everything])
        assert leaked(log) == ["hidden-id", "hidden-name"], "what others are not told is there"
    assert b"mine-1" in told["own"]
    assert not told["others"]
    assert b"mine-0" in told["steps"]
    for flags in ((), ("--perfetto",)):
        file = tmp_path / f"steps{len(flags)}"
        command = ("steps", "--address", address, "--last", "60", "--seconds", "0.5", "-o", str(file), *flags)
        done = await asyncio.to_thread(run, *command, PACELINE_TOKEN="alice")
        assert done.returncode == 0, done.stderr
        told[f"file {flags}"] = file.read_bytes()
    json.loads(told["file ('--perfetto',)"])
    for name, text in told.items():
        assert leaked(text) == [], name
    metrics = await asyncio.to_thread(scrape, port)
    # Its port is the operator's: it names identities and adapters, a bounded number, and no ids or texts.
    assert set(leaked(metrics)) <= {"hidden-name", "c-hidden-adapter"}
    assert b"mine-" not in metrics
