"""Probes need neither TLS nor a token, whatever the service's own port asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from paceline.channel import Link, open_channel
from service_kit.probes import LIVENESS

from tests.support.checkout import ROOT
from tests.support.ports import kept_port
from tests.support.processes import ServiceProcess

TLS = ROOT / "tests" / "support" / "tls"
STATUS = health_pb2.HealthCheckResponse


def check(port: int, service: str) -> Any:
    with open_channel(f"127.0.0.1:{port}", Link.PUBLIC) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=60, wait_for_ready=True).status


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("scheduler_service", ["--executor", "127.0.0.1:1"]),  # where nobody listens
        ("executor_service", ["--backend", "oracle"]),
    ],
)
def test_probes_need_no_token_and_no_certificate(module: str, options: list[str], tmp_path: Path) -> None:
    token, port = tmp_path / "token", kept_port()
    token.write_text("sesame")
    secured = [
        f"--tls-cert={TLS / 'server.pem'}",
        f"--tls-key={TLS / 'server.key'}",
        f"--tls-client-ca={TLS / 'ca.pem'}",
        f"--auth-token-file={token}",
    ]
    process = ServiceProcess(module, [*secured, *options, f"--health-port={port}"], tmp_path)
    try:
        assert check(port, LIVENESS) == STATUS.SERVING
        if module == "scheduler_service":
            assert check(port, "") == STATUS.NOT_SERVING
            assert check(port, "paceline.scheduler.v1.SchedulerService") == STATUS.NOT_SERVING
        else:
            while check(port, "") != STATUS.SERVING:
                assert process.running, process.log
    finally:
        process.kill()
