"""Hostile step traffic: every answer is a named error, a bystander's tokens don't change, nothing leaks."""

from __future__ import annotations

import time

import grpc
import pytest
from paceline.channel import Link, open_channel
from paceline.executor.v1 import executor_pb2 as pb
from paceline.executor.v1 import executor_pb2_grpc as rpc

from tests.fuzz.executor_traffic import Hostile
from tests.support.processes import ServiceProcess
from tests.support.untyped import raw

PROMPT = list(range(1, 40))


def canary(stub: rpc.ExecutorServiceStub, new: int) -> tuple[pb.OpenSessionResponse, list[int]]:
    """Greedy tokens of PROMPT in a session of its own, one Decode at a time."""
    session = stub.OpenSession(pb.OpenSessionRequest(label="canary", lease_ms=600_000))
    header = pb.StepHeader(session_id=session.session_id)
    opening = pb.Opening(cache_id=1, tokens=PROMPT)
    result = stub.Prefill(pb.PrefillRequest(step=pb.Step(header=header, openings=[opening]))).result
    tokens = list(result.rows.tokens)
    for _ in range(new - 1):
        tokens.append(decode(stub, session.session_id, len(PROMPT) + len(tokens) - 1))
    return session, tokens


def decode(stub: rpc.ExecutorServiceStub, session_id: int, kv_length: int) -> int:
    rows = pb.Rows(cache_ids=[1], kv_lengths=[kv_length])
    step = pb.Step(header=pb.StepHeader(session_id=session_id), rows=rows)
    return int(stub.Decode(pb.DecodeRequest(step=step)).result.rows.tokens[0])


def all_pages_back(stub: rpc.ExecutorServiceStub) -> bool:
    """Waits for the leases of sessions that nobody closed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        cache = stub.GetStatus(pb.GetStatusRequest()).cache
        assert cache.free_pages + cache.cached_pages + cache.owned_pages == cache.total_pages
        if cache.owned_pages == 0:
            return True
        time.sleep(0.2)
    return False


def test_hostile_steps_harm_nobody(executor: ServiceProcess, count: int) -> None:
    check_traffic(executor, count)


def check_traffic(executor: ServiceProcess, count: int, *, adapters: bool = False) -> None:
    """Hostile steps, with adapters among them or not, harm nobody."""
    with open_channel(executor.address, Link.PRIVATE) as channel:
        stub = rpc.ExecutorServiceStub(channel)
        vocab_size = stub.GetInfo(pb.GetInfoRequest()).model.vocab_size
        session, expected = canary(stub, 60)
        stub.CloseSession(pb.CloseSessionRequest(session_id=session.session_id))
        session, tokens = canary(stub, 10)
        hostile = Hostile(stub, vocab_size, count, adapters=adapters)
        for _ in range(50):
            hostile.run(count // 50)
            tokens.append(decode(stub, session.session_id, len(PROMPT) + len(tokens) - 1))
        hostile.close()
        stub.CloseSession(pb.CloseSessionRequest(session_id=session.session_id))
        print(dict(hostile.codes))
        assert tokens == expected
        assert executor.running
        assert (
            not {"UNKNOWN", "INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"}
            & hostile.codes.keys()
        )
        assert hostile.codes["OK"] > count / 20, "the traffic never got past the first checks"
        assert all_pages_back(stub)


def test_bytes_that_are_no_message_are_refused(executor: ServiceProcess) -> None:
    with open_channel(executor.address, Link.PRIVATE) as channel:
        send = raw(channel).unary_unary("/paceline.executor.v1.ExecutorService/UnifiedDecode")
        for junk in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", bytes(range(256)) * 40):
            with pytest.raises(grpc.RpcError) as refused:
                send(junk, timeout=10)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert rpc.ExecutorServiceStub(channel).GetStatus(pb.GetStatusRequest()).epoch
