"""The Unix socket that a service opens for who started it: the same service, whatever the port asks for."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import paceline
import pytest
from paceline import errors
from paceline.channel import Link, Security, open_channel
from paceline.executor.v1 import executor_pb2 as pb
from paceline.executor.v1 import executor_pb2_grpc as rpc

from tests.support.checkout import ROOT
from tests.support.processes import ServiceProcess

TLS = ROOT / "tests" / "support" / "tls"
PORT_WITH_TLS = [f"--tls-cert={TLS / 'server.pem'}", f"--tls-key={TLS / 'server.key'}"]
FOR_CERTIFIED = [*PORT_WITH_TLS, f"--tls-client-ca={TLS / 'ca.pem'}"]


@pytest.fixture
def socket_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="paceline-") as directory:  # paths of sockets are short
        yield Path(directory) / "socket"


@pytest.mark.parametrize("port", [[], PORT_WITH_TLS, FOR_CERTIFIED], ids=["plaintext", "TLS", "mTLS"])
def test_an_executor_answers_on_its_local_socket_without_tls(
    port: list[str], socket_path: Path, tmp_path: Path
) -> None:
    flags = ["--backend", "oracle", "--local-socket", str(socket_path), *port]
    process = ServiceProcess("executor_service", flags, tmp_path)
    try:
        assert process.port
        with open_channel(f"unix:{socket_path}", Link.PRIVATE, Security()) as channel:
            status = rpc.ExecutorServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=30)
        assert status.epoch
        assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
    finally:
        process.kill()


def test_a_scheduler_answers_on_its_local_socket_and_asks_for_the_token_there_too(
    socket_path: Path, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("sesame")
    flags = ["--local-socket", str(socket_path), "--auth-token-file", str(token), *FOR_CERTIFIED]
    process = ServiceProcess("scheduler_service", flags, tmp_path)
    try:
        assert process.port
        with paceline.Client(f"unix:{socket_path}", security=Security(token="sesame")) as client:
            assert client.status(timeout_s=30).state == "loading"
        with paceline.Client(f"unix:{socket_path}") as client, pytest.raises(errors.Unauthenticated):
            client.status(timeout_s=30)
    finally:
        process.kill()


def test_a_restarted_service_takes_over_the_socket_of_its_killed_process(
    socket_path: Path, tmp_path: Path
) -> None:
    flags = ["--backend", "oracle", "--local-socket", str(socket_path)]
    for life in ("first", "second"):
        process = ServiceProcess("executor_service", flags, tmp_path / life)
        try:
            assert process.port
            with open_channel(f"unix:{socket_path}", Link.PRIVATE, Security()) as channel:
                rpc.ExecutorServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=30)
        finally:
            process.kill()
        assert socket_path.exists()
