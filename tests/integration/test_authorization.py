"""Every method of both services without a token, with a wrong one, and with another caller's; real processes.

The methods come from the descriptors, so that a new one that no test knows fails.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from paceline.channel import Link, open_channel
from paceline.executor.v1 import executor_pb2, executor_pb2_grpc
from paceline.scheduler.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from service_kit.identity import token_hash

from tests.support.checkout import ROOT
from tests.support.processes import ServiceProcess
from tests.support.stack import Stack, eventually
from tests.support.untyped import raw

METHODS: list[MethodDescriptor] = [
    method
    for module in (executor_pb2, scheduler_pb2, admin_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
EXECUTOR = [method for method in METHODS if method.containing_service.name == "ExecutorService"]
OPERATORS = [method for method in METHODS if method.containing_service.name == "AdminService"]
FOREIGN = ("grpc.health.v1.Health/List", "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
OF_ANY_CALLER = {"GetInfo", "GetTokenizer", "Forward", "CheckGrammar", "ListAdapters"}  # they use no session
OF_ADMINISTRATORS = {"Warmup", "Drain", "LoadAdapter", "UnloadAdapter"}
TIMEOUT_S = 60.0


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


ALICE, BOB, ADMIN = bearer("alice's"), bearer("bob's"), bearer("admin's")


@dataclass(frozen=True)
class ClosedServices:
    """Both services behind one tokens file, and their channels."""

    tokens: Path
    stack: Stack
    executor: grpc.Channel
    scheduler: grpc.Channel

    def channel(self, method: str) -> grpc.Channel:
        return self.executor if "ExecutorService" in method else self.scheduler


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClosedServices]:
    directory = tmp_path_factory.mktemp("services")
    tokens, secret = directory / "tokens.yaml", directory / "token"
    entries = {"alice": "alice's", "bob": "bob's", "admin": "admin's", "scheduler": "scheduler's"}
    tokens.write_text(
        "".join(
            f"- {{name: {name}, sha256: {token_hash(token)}, max_priority: 3, "
            f"admin: {str(name == 'admin').lower()}}}\n"
            for name, token in entries.items()
        )
    )
    secret.write_text("scheduler's")
    stack = Stack(directory)
    flags = ("--tokens-file", str(tokens), "--reflection")
    try:
        address = stack.start_executor(*flags)
        stack.start_scheduler(*flags, "--executor-token-file", str(secret))
        stack.scheduler.wait_serving()
        with (
            open_channel(address, Link.PRIVATE) as executor,
            open_channel(stack.scheduler.address, Link.PUBLIC) as scheduler,
        ):
            yield ClosedServices(tokens, stack, executor, scheduler)
    finally:
        stack.kill()


def path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


@pytest.mark.parametrize("metadata", [(), bearer("wrong"), bearer("")], ids=["none", "wrong", "empty"])
def test_no_method_serves_a_caller_without_a_valid_token(services: ClosedServices, metadata: Any) -> None:
    for name in (*map(path, METHODS), *(f"/{name}" for name in FOREIGN), "/no.such/Method"):
        for channel in (services.executor, services.scheduler):  # neither has the other's methods
            with pytest.raises(grpc.RpcError) as caught:
                raw(channel).unary_unary(name)(b"", metadata=metadata, timeout=TIMEOUT_S)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, name


def test_health_checks_need_no_token(services: ClosedServices) -> None:
    for channel in (services.executor, services.scheduler):
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def step(header: executor_pb2.StepHeader, method: str) -> executor_pb2.Step:
    """A step that each token RPC takes."""
    if "Prefill" in method:
        opening = executor_pb2.Opening(cache_id=99, tokens=[1, 2], prompt_length=2)
        return executor_pb2.Step(header=header, openings=[opening])
    rows = executor_pb2.Rows(cache_ids=[7], kv_lengths=[3])
    if method == "ForwardVerify":
        rows.draft_counts.append(1)
        rows.drafts.append(1)
    return executor_pb2.Step(header=header, rows=rows)


def naming(method: MethodDescriptor, session_id: int) -> Any:
    """A good request of the method that names this session; None if no request of it names one."""
    request: Any = message_factory.GetMessageClass(method.input_type)()
    fields = set(request.DESCRIPTOR.fields_by_name)
    header = executor_pb2.StepHeader(session_id=session_id)
    if "session_id" in fields:
        request.session_id = session_id
    elif "replaces" in fields:
        request.replaces = session_id
    elif "step" in fields:
        request.step.CopyFrom(step(header, method.name))
    elif "header" in fields:
        request.header.CopyFrom(header)
        if "truncate" in fields:
            request.truncate.cache_id = 7
        if "release" in fields:
            request.release.cache_ids.append(7)
        if "fork" in fields:
            request.fork.source_id, request.fork.cache_id = 7, 8
    else:
        return None
    return request


@pytest.mark.parametrize("method", EXECUTOR, ids=[method.name for method in EXECUTOR])
def test_no_method_of_the_executor_touches_another_callers_session(
    services: ClosedServices, method: MethodDescriptor
) -> None:
    stub = executor_pb2_grpc.ExecutorServiceStub(services.executor)
    session = stub.OpenSession(executor_pb2.OpenSessionRequest(), metadata=ALICE).session_id
    header = executor_pb2.StepHeader(session_id=session)
    opening = executor_pb2.Opening(cache_id=7, tokens=[1, 2, 3], prompt_length=3)
    opened = stub.Prefill(
        executor_pb2.PrefillRequest(step=executor_pb2.Step(header=header, openings=[opening])), metadata=ALICE
    )
    request = naming(method, session)
    if request is None:
        allowed = method.name in OF_ANY_CALLER
        assert allowed or method.name in OF_ADMINISTRATORS, f"{method.name}: whose is it?"
        if not allowed:
            code = refusal(services, method, message_factory.GetMessageClass(method.input_type)())
            assert code is grpc.StatusCode.PERMISSION_DENIED
    elif method.name == "OpenSession":
        assert stub.OpenSession(request, metadata=BOB).session_id != session
    elif method.name == "CloseSession":
        assert stub.CloseSession(request, metadata=BOB).released == 0
    elif method.name == "StreamUnifiedDecode":
        (answer,) = stub.StreamUnifiedDecode(iter([request]), metadata=BOB, timeout=TIMEOUT_S)
        assert answer.error.code == grpc.StatusCode.NOT_FOUND.value[0]
    else:
        assert refusal(services, method, request) is grpc.StatusCode.NOT_FOUND
    rows = executor_pb2.Rows(cache_ids=[7], kv_lengths=[opened.result.rows.kv_lengths[0]])
    again = executor_pb2.Step(header=header, rows=rows)
    stub.Decode(executor_pb2.DecodeRequest(step=again), metadata=ALICE)  # it is as it was


def refusal(services: ClosedServices, method: MethodDescriptor, request: Any) -> grpc.StatusCode:
    """How Bob's call ends."""
    with pytest.raises(grpc.RpcError) as caught:
        services.executor.unary_unary(path(method))(
            request.SerializeToString(), metadata=BOB, timeout=TIMEOUT_S
        )
    code: grpc.StatusCode = caught.value.code()
    return code


def test_another_callers_requests_can_not_be_aborted_and_two_may_use_one_id(services: ClosedServices) -> None:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(services.scheduler)
    operator = admin_pb2_grpc.AdminServiceStub(services.scheduler)

    def begin(who: Any) -> Any:
        request = scheduler_pb2.GenerateRequest(request_id="mine", text="x", priority=3)
        request.stop.max_tokens, request.stop.ignore_eos = 20_000, True
        stream = stub.Generate(request, metadata=who, timeout=TIMEOUT_S)
        assert next(stream).started.request_id == "mine"
        return stream

    def ends(stream: Any) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            for _ in stream:
                pass
        assert caught.value.code() is grpc.StatusCode.ABORTED

    streams = {"alice": begin(ALICE), "bob": begin(BOB), "admin": begin(ADMIN)}
    aborting = scheduler_pb2.AbortRequest(request_ids=["mine"])
    assert stub.Abort(aborting, metadata=bearer("scheduler's")).unknown == ["mine"]
    with pytest.raises(grpc.RpcError, match=r"request_ids\[1\]"):  # and the first one goes on
        stub.Abort(scheduler_pb2.AbortRequest(request_ids=["mine", 129 * "x"]), metadata=BOB)
    assert stub.Abort(aborting, metadata=BOB).aborted == ["mine"]
    ends(streams["bob"])
    assert stub.Abort(aborting, metadata=ADMIN).aborted == ["mine"]
    ends(streams["admin"])
    next(streams["alice"])
    request = admin_pb2.AbortRequestsRequest(identity="bob", request_ids=["mine"])
    assert operator.AbortRequests(request, metadata=ADMIN).unknown == ["mine"]
    request.identity = ""
    assert operator.AbortRequests(request, metadata=ADMIN).aborted == ["mine"]
    ends(streams["alice"])


@pytest.mark.parametrize("method", OPERATORS, ids=[method.name for method in OPERATORS])
def test_admin_methods_are_for_administrators(services: ClosedServices, method: MethodDescriptor) -> None:
    request = message_factory.GetMessageClass(method.input_type)().SerializeToString()
    for who in (ALICE, BOB):
        with pytest.raises(grpc.RpcError) as caught:
            raw(services.scheduler).unary_unary(path(method))(request, metadata=who, timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    try:
        raw(services.scheduler).unary_unary(path(method))(request, metadata=ADMIN, timeout=TIMEOUT_S)
        code = grpc.StatusCode.OK
    except grpc.RpcError as error:
        code = error.code()
    # An empty request may be wrong, or ask for what is not offered.
    allowed = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
    assert code in allowed


def test_a_priority_above_the_callers_is_refused_by_name_and_limit(services: ClosedServices) -> None:
    request = scheduler_pb2.GenerateRequest(text="x", priority=4)
    with pytest.raises(grpc.RpcError) as caught:
        next(scheduler_pb2_grpc.SchedulerServiceStub(services.scheduler).Generate(request, metadata=BOB))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "priority: bob may ask for at most 3, not 4"


async def test_an_entry_removed_from_the_tokens_file_is_refused_without_a_restart(
    services: ClosedServices,
) -> None:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(services.scheduler)
    carol = bearer("carol-")
    before = services.tokens.read_text()

    def change(text: str) -> None:
        draft = services.tokens.with_suffix(".new")
        draft.write_text(text)
        draft.replace(services.tokens)

    async def code() -> grpc.StatusCode:
        try:
            stub.GetStatus(scheduler_pb2.GetStatusRequest(), metadata=carol, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def known() -> bool:
        return await code() is grpc.StatusCode.OK

    async def unknown() -> bool:
        return await code() is grpc.StatusCode.UNAUTHENTICATED

    assert await unknown()
    change(before + f"- {{name: carol, sha256: {token_hash('carol-')}}}\n")
    await eventually(known, "the new entry is not known")
    change(before)
    await eventually(unknown, "the entry that is gone is still known")


def test_a_closed_terminal_drains(tmp_path: Path) -> None:
    process = ServiceProcess("executor_service", ["--backend", "oracle", "--log-level", "info"], tmp_path)
    try:
        process.wait_serving()
        process.signal(signal.SIGHUP)
        assert process.wait() == 0
        assert "draining" in process.log
    finally:
        process.kill()


@pytest.mark.parametrize("module", ["executor_service", "scheduler_service"])
def test_a_service_reads_secrets_from_standard_input_and_ends_with_it(module: str) -> None:
    of_executor = module == "executor_service"
    flags = ["--backend", "oracle"] if of_executor else ["--executor", "127.0.0.1:9"]
    get_status = next(
        path(one) for one in METHODS if one.name == "GetStatus" and (one in EXECUTOR) == of_executor
    )
    name = "auth_token" if of_executor else "client_token"
    with subprocess.Popen(
        [sys.executable, "-m", module, *flags, "--port=0", "--secrets-stdin"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            process.stdin.write(b'{"%s": "s3cret"}\n' % name.encode())
            process.stdin.flush()
            while b"listening" not in (line := process.stderr.readline()):
                assert line, "it ended"
            with open_channel(f"127.0.0.1:{json.loads(line)['port']}", Link.PRIVATE) as channel:
                with pytest.raises(grpc.RpcError) as caught:
                    raw(channel).unary_unary(get_status)(b"", timeout=TIMEOUT_S)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                raw(channel).unary_unary(get_status)(b"", metadata=bearer("s3cret"), timeout=TIMEOUT_S)
            process.stdin.close()
            rest = process.stderr.read()
            assert process.wait(TIMEOUT_S) == 0
            assert b"s3cret" not in rest
        finally:
            process.kill()
