"""`paceline doctor` tells apart what can be wrong, on real processes."""

from __future__ import annotations

import http.server
import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import paceline
import pytest
import trustme
from paceline import channel
from paceline.channel import Link, Security
from paceline.cli.diagnosis import ADVICE, Verdict, diagnose
from paceline.executor.v1 import executor_pb2, executor_pb2_grpc
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc

from tests.support.processes import ServiceProcess
from tests.support.serve import run
from tests.support.stack import oracle_stack

TIMEOUT_S = 60.0
SHORT_S = 0.5  # for what never answers


def verdict(address: str, security: Security | None = None, timeout_s: float = TIMEOUT_S) -> Verdict:
    return diagnose(address, security or Security(), timeout_s).verdict


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a scheduler that demands nothing, and serves."""
    with oracle_stack(tmp_path_factory.mktemp("open")) as stack:
        yield stack.scheduler.address


@contextmanager
def scheduler(directory: Path, *arguments: str) -> Iterator[ServiceProcess]:
    """One without an executor."""
    process = ServiceProcess("scheduler_service", ["--executor", "127.0.0.1:1", *arguments], directory)
    try:
        assert process.port
        yield process
    finally:
        process.kill()


class Authority:
    """Certificates, in files."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory, self._authority = directory, trustme.CA()
        self.file = directory / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.file))

    def issue(self, name: str, *, ends: datetime | None = None) -> tuple[Path, Path]:
        issued = self._authority.issue_cert(name, not_after=ends)
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(str(certificate))
        issued.private_key_pem.write_to_path(str(key))
        return certificate, key

    def server(self, name: str, *, ends: datetime | None = None) -> list[str]:
        certificate, key = self.issue(name, ends=ends)
        return ["--tls-cert", str(certificate), "--tls-key", str(key)]


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def test_an_answered_request_is_exit_status_0(address: str) -> None:
    result = run("doctor", address, "--json", "--timeout-s", "60")
    found = json.loads(result.stdout)
    assert (result.returncode, found["verdict"], found["answered"]) == (0, "OK", True)
    assert "oracle answered" in found["detail"]


def test_a_port_without_a_listener_is_three_lines_and_exit_status_1() -> None:
    result = run("doctor", "127.0.0.1:1")
    assert result.returncode == 1
    said, advice, found = result.stdout.splitlines()
    assert said.startswith("nobody listens: ")
    assert "paceline serve" in advice
    assert "paceline ps" in found


def test_every_verdict_has_its_advice() -> None:
    assert set(ADVICE) == set(Verdict)


def test_a_token_is_missing_or_wrong_or_right(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame")
    with scheduler(tmp_path, "--auth-token-file", str(tmp_path / "token")) as process:
        assert verdict(process.address) is Verdict.TOKEN_MISSING
        assert verdict(process.address, Security(token="wrong")) is Verdict.TOKEN_WRONG
        assert verdict(process.address, Security(token="sesame")) is Verdict.NO_EXECUTOR


def test_plaintext_to_tls_and_an_unknown_authority(tmp_path: Path, ours: Authority) -> None:
    with scheduler(tmp_path, *ours.server("127.0.0.1")) as process:
        assert verdict(process.address) is Verdict.NEEDS_TLS
        others = Authority(tmp_path / "others")
        assert verdict(process.address, Security(others.file)) is Verdict.UNKNOWN_AUTHORITY
        assert verdict(process.address, Security(ours.file)) is Verdict.NO_EXECUTOR


def test_tls_to_plaintext(address: str, ours: Authority) -> None:
    assert verdict(address, Security(ours.file)) is Verdict.NO_TLS


def test_a_certificate_for_another_name(tmp_path: Path, ours: Authority) -> None:
    with scheduler(tmp_path, *ours.server("elsewhere.example")) as process:
        assert verdict(process.address, Security(ours.file)) is Verdict.OTHER_NAME
        named = Security(ours.file, server_name="elsewhere.example")
        assert verdict(process.address, named) is Verdict.NO_EXECUTOR


def test_a_certificate_that_has_ended(tmp_path: Path, ours: Authority) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=2)
    with scheduler(tmp_path, *ours.server("127.0.0.1", ends=long_ago)) as process:
        assert verdict(process.address, Security(ours.file)) is Verdict.EXPIRED


def test_a_client_certificate_is_missing_or_of_others_or_good(tmp_path: Path, ours: Authority) -> None:
    demand = ["--tls-client-ca", str(ours.file)]
    with scheduler(tmp_path, *ours.server("127.0.0.1"), *demand) as process:
        assert verdict(process.address, Security(ours.file)) is Verdict.CLIENT_CERTIFICATE
        strange = Authority(tmp_path / "others").issue("client")
        assert verdict(process.address, Security(ours.file, *strange)) is Verdict.CLIENT_CERTIFICATE
        assert verdict(process.address, Security(ours.file, *ours.issue("client"))) is Verdict.NO_EXECUTOR


def test_a_stopped_process_is_frozen(tmp_path: Path) -> None:
    with scheduler(tmp_path) as process:
        address = process.address
        process.signal(signal.SIGSTOP)
        assert verdict(address, timeout_s=SHORT_S) is Verdict.FROZEN


def test_a_port_whose_listener_never_accepts_is_frozen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        assert verdict(f"127.0.0.1:{deaf.getsockname()[1]}", timeout_s=SHORT_S) is Verdict.FROZEN


def test_a_scheduler_that_waits_for_its_executor_says_why(tmp_path: Path) -> None:
    with scheduler(tmp_path) as process:
        found = diagnose(process.address, Security(), TIMEOUT_S)
        assert found.verdict is Verdict.NO_EXECUTOR
        assert found.detail.startswith("127.0.0.1:1: ")


def test_a_draining_scheduler_drains(tmp_path: Path) -> None:
    with (
        oracle_stack(tmp_path, executor=["--step-ms", "5"]) as stack,
        paceline.Client(stack.scheduler.address) as client,
    ):
        stream = client.generate("long", max_tokens=20_000, ignore_eos=True)
        next(stream)
        stack.scheduler.signal(signal.SIGTERM)
        found = _once(lambda: verdict(stack.scheduler.address), Verdict.OK)
        assert found is Verdict.DRAINING
        stream.close()


def test_a_drained_executor_drains_its_scheduler(tmp_path: Path) -> None:
    with oracle_stack(tmp_path) as stack:
        with grpc.insecure_channel(stack.addresses[0]) as channel:
            drain = executor_pb2_grpc.ExecutorServiceStub(channel).Drain
            drain(executor_pb2.DrainRequest(), timeout=TIMEOUT_S)
        address = stack.scheduler.address
        with paceline.Client(address) as client:
            _once(lambda: client.status().state, "serving")  # until it has noticed
        assert verdict(address) is Verdict.DRAINING


def test_an_executor_and_a_scheduler_are_told_apart(tmp_path: Path) -> None:
    process = ServiceProcess("executor_service", ["--backend", "oracle"], tmp_path).wait_serving()
    try:
        found = diagnose(process.address, Security(), TIMEOUT_S)
        assert (found.verdict, found.detail.endswith("serving")) == (Verdict.EXECUTOR, True)
        with grpc.insecure_channel(process.address) as channel:
            stub = executor_pb2_grpc.ExecutorServiceStub(channel)
            stub.Drain(executor_pb2.DrainRequest(), timeout=TIMEOUT_S)
        assert "draining" in diagnose(process.address, Security(), TIMEOUT_S).detail
    finally:
        process.kill()


def test_a_port_that_has_all_the_connections_it_takes_closes_further_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "MAX_CONNECTIONS", 1)
    server = grpc.server(futures.ThreadPoolExecutor(1), options=channel.server_options(Link.PUBLIC))
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(Scripted(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with paceline.Client(address) as first:
            first.status(timeout_s=TIMEOUT_S)
            assert verdict(address) is Verdict.CLOSES
    finally:
        server.stop(None)


def test_a_web_server_does_not_speak_grpc() -> None:
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            assert verdict(f"127.0.0.1:{server.server_port}", timeout_s=5) is Verdict.NOT_GRPC
        finally:
            server.shutdown()


class Scripted(scheduler_pb2_grpc.SchedulerServiceServicer):
    """A scheduler of another version: it has no Generate of ours."""

    def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:  # noqa: N802
        return pb.GetStatusResponse(state=pb.SCHEDULER_STATE_SERVING)

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:  # noqa: N802
        return pb.GetModelInfoResponse(name="later", version="9.0.0")


class Hanging(Scripted):
    """One whose handlers never return."""

    def __init__(self) -> None:
        self.leave = threading.Event()

    def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:  # noqa: N802
        self.leave.wait()
        return super().GetStatus(request, context)


@contextmanager
def grpc_server(servicer: scheduler_pb2_grpc.SchedulerServiceServicer | None) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    if servicer is not None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_another_version_is_named_when_it_does_not_answer() -> None:
    with grpc_server(Scripted()) as address:
        found = diagnose(address, Security(), TIMEOUT_S)
    assert found.verdict is Verdict.VERSION
    assert "9.0.0" in found.note


def test_another_grpc_service_is_not_paceline() -> None:
    with grpc_server(None) as address:
        assert verdict(address) is Verdict.NOT_PACELINE


def test_a_service_whose_handlers_hang_is_frozen() -> None:
    hanging = Hanging()
    with grpc_server(hanging) as address:
        try:
            assert verdict(address, timeout_s=SHORT_S) is Verdict.FROZEN
        finally:
            hanging.leave.set()


def test_a_full_queue_is_busy(tmp_path: Path) -> None:
    limits = ["--max-running", "1", "--max-queued-requests", "1"]
    with (
        oracle_stack(tmp_path, executor=["--step-ms", "5"], scheduler=limits) as stack,
        paceline.Client(stack.scheduler.address) as client,
    ):
        running = client.generate("long", max_tokens=20_000, ignore_eos=True)
        next(running)
        waiting = client.generate("next", max_tokens=20_000, ignore_eos=True)
        _once(lambda: client.status(timeout_s=60).waiting, 0)
        assert verdict(stack.scheduler.address) is Verdict.BUSY
        waiting.close()
        running.close()


def _once(look: Any, not_yet: object) -> Any:
    """What is seen as soon as it is something else."""
    while (seen := look()) == not_yet:
        pass
    return seen
