"""The gateway's port is closed unless asked for, and opens no way round the credentials of callers."""

from __future__ import annotations

import ast
import io
import socket
from pathlib import Path
from typing import Any

import pytest
from paceline.cli import gateway_process
from paceline.cli.gateway_launch import GatewayLaunch, gateway_launch
from service_kit.settings import EXIT_USAGE
from typer import Exit

import scheduler_service.server
from scheduler_service.config import SchedulerSettings


def load(*arguments: str) -> SchedulerSettings:
    return SchedulerSettings.from_command_line(arguments, "scheduler")


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("sesame")
    return file


def test_where_callers_need_tokens_the_gateway_must_demand_keys(
    token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = ("--auth-token-file", str(token_file), "--gateway-port", "0")
    with pytest.raises(SystemExit) as caught:
        load(*closed)
    assert caught.value.code == EXIT_USAGE
    assert "--gateway-authenticates" in capsys.readouterr().err
    assert load(*closed, "--gateway-authenticates").callers_need_credentials
    assert not load("--gateway-port", "0").callers_need_credentials


def test_the_gateways_port_beyond_loopback_needs_a_word_and_is_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    beyond = ("--gateway-port", "0", "--gateway-host", "0.0.0.0")
    with pytest.raises(SystemExit):
        load(*beyond)
    assert "--gateway-host: 0.0.0.0 is not loopback" in capsys.readouterr().err
    [warning] = [one for one in load(*beyond, "--insecure").security_warnings() if "gateway" in one]
    assert "without a token" in warning
    assert load("--gateway-port", "7", "--gateway-host", "[::1]").gateway_address == "[::1]:7"


def test_the_gateways_packages_are_imported_only_with_its_port() -> None:
    source = ast.parse(Path(scheduler_service.server.__file__).read_text())
    imported = {node.module or "" for node in source.body if isinstance(node, ast.ImportFrom)}
    assert imported
    assert not any("gateway" in module or "smg" in module for module in imported)


def settings_of(*options: str, key: str = "") -> Any:
    given, rest = gateway_process._parser().parse_known_args(["--worker", "127.0.0.1:7", *options])
    return gateway_process._settings(given, rest, key)


def test_the_control_plane_is_closed_with_a_key_that_nobody_has() -> None:
    first, second = settings_of(), settings_of()
    [(_, _, key, _)] = first.control_plane_api_keys
    assert len(key) > 40
    assert first.control_plane_api_keys != second.control_plane_api_keys


def test_the_gateway_listens_on_loopback_with_its_metrics_too() -> None:
    settings = settings_of(key="secret")
    assert settings.host == settings.prometheus_host == "127.0.0.1"
    assert 0 not in (settings.port, settings.prometheus_port)
    assert settings.port != settings.prometheus_port
    assert settings.worker_urls == ["grpc://127.0.0.1:7"]
    assert settings.api_key == "secret"


def test_options_for_smg_win_over_ours() -> None:
    assert settings_of().health_check_interval_secs == 2
    settings = settings_of("--health-check-interval-secs=9", "--policy=round_robin")
    assert (settings.health_check_interval_secs, settings.policy) == (9, "round_robin")


@pytest.mark.parametrize(
    "option", ["--api-key=k", "--control-plane-api-keys=a:b:admin:k", "--tenant-api-key=a:k"]
)
def test_a_key_among_smgs_options_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match="show in the process list"):
        settings_of(option)


def test_a_wrong_option_of_smg_ends_the_process_with_its_status_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gateway_process, "read_secrets", lambda known: {})
    for option, value in (("--bogus", "1"), ("--policy", "best")):
        assert gateway_process.main(["--worker", "a:1", option, value]) == EXIT_USAGE
        [line] = capsys.readouterr().err.splitlines()
        assert option in line


def test_a_port_that_another_server_has_ends_the_process_before_anything_answers_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gateway_process, "read_secrets", lambda known: {})
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        arguments = ["--worker", "a:1", "--port", str(port), "--port-file", str(tmp_path / "port")]
        assert gateway_process.main(arguments) == 1
    assert f"can't listen at 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
    assert not (tmp_path / "port").exists()


def launch(listen: str, key: str = "", *options: str, insecure: bool = False) -> GatewayLaunch:
    return gateway_launch(listen, key, insecure=insecure, log_level="warning", options=options)


@pytest.mark.parametrize(
    ("listen", "host", "port", "url"),
    [
        ("8000", "127.0.0.1", 8000, "http://127.0.0.1:7/v1"),
        ("localhost:0", "localhost", 0, "http://localhost:7/v1"),
        ("[::1]:8000", "::1", 8000, "http://[::1]:7/v1"),
    ],
)
def test_where_the_gateway_listens(listen: str, host: str, port: int, url: str) -> None:
    found = launch(listen)
    assert (found.host, found.port, found.url(7)) == (host, port, url)


@pytest.mark.parametrize(
    ("listen", "key", "insecure", "complaint"),
    [
        ("0.0.0.0:8000", "", True, "give a key"),
        ("0.0.0.0:8000", "k", False, "tls-cert-path"),
        ("here", "", False, "HOST:PORT"),
        ("127.0.0.1:70000", "", False, "HOST:PORT"),
    ],
)
def test_beyond_loopback_a_key_is_needed_and_tls_unless_told_otherwise(
    listen: str, key: str, insecure: bool, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.cli import common
    from rich.console import Console

    said = io.StringIO()
    monkeypatch.setattr(common, "stderr", Console(file=said, width=1000))
    with pytest.raises(Exit) as caught:
        launch(listen, key, insecure=insecure)
    assert caught.value.exit_code == EXIT_USAGE
    assert complaint in said.getvalue()


def test_beyond_loopback_with_a_key_and_tls_or_a_word_it_starts() -> None:
    assert launch("0.0.0.0:8000", "k", insecure=True).url(7) == "http://127.0.0.1:7/v1"
    assert launch("0.0.0.0:8000", "k", "--tls-cert-path=a", "--tls-key-path=b").tls


def test_the_key_is_on_no_command_line(tmp_path: Path) -> None:
    child = launch("8000", "secret").child(
        tmp_path, lambda name, line: None, ["127.0.0.1:7"], tool_format="hermes"
    )
    command = " ".join(child._command(8000))
    assert "secret" not in command
    assert b"secret" in child._secrets
    assert "--tool-call-parser qwen" in command
    assert "secret" not in repr(launch("8000", "secret"))
