"""Which callers the services of `paceline serve` accept, and its warnings about missing protection."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import paceline
import pytest
from paceline import errors
from paceline.channel import Security

from tests.support.checkout import ROOT
from tests.support.serve import Serve, run, serving

pytestmark = pytest.mark.long

TLS = ROOT / "tests" / "support" / "tls"
PORT_WITH_TLS = ["-S", f"tls-cert={TLS / 'server.pem'}", "-S", f"tls-key={TLS / 'server.key'}"]
FOR_CERTIFIED = [*PORT_WITH_TLS, "-S", f"tls-client-ca={TLS / 'ca.pem'}"]


def answered(address: str, security: Security) -> bool:
    with paceline.Client(address, security=security) as client:
        [completion] = client.completions("x", max_tokens=2, timeout_s=60)
        return len(completion.token_ids) == 2


def executor_refuses(address: str, token: str) -> bool:
    with paceline.ExecutorClient(address, security=Security(token=token)) as client:
        try:
            client.get_status(timeout_s=60)
        except errors.Unauthenticated:
            return True
    return False


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """paceline serve --token-file FILE, with a token for people at the executor."""
    directory = tmp_path_factory.mktemp("closed")
    options = []
    for option, token in (("--token-file", "of-clients\n"), ("--executor-token-file", "of-schedulers")):
        (directory / option.strip("-")).write_text(token)
        options.append(f"{option}={directory / option.strip('-')}")
    with serving(directory, *options) as serve:
        yield serve


def test_a_token_file_is_demanded_of_clients(closed: Serve) -> None:
    assert answered(closed.address, Security(token="of-clients"))
    for token in ("", "wrong", "of-schedulers"):
        client = paceline.Client(closed.address, security=Security(token=token))
        with client, pytest.raises(errors.Unauthenticated):
            client.completions("x", max_tokens=1, timeout_s=60)
    assert "no token" not in closed.log


def test_the_executor_serves_only_callers_with_its_own_token(closed: Serve) -> None:
    for token in ("", "wrong", "of-clients"):
        assert executor_refuses(closed.executor_address, token)
    assert not executor_refuses(closed.executor_address, "of-schedulers")


def test_no_token_is_in_arguments_or_environment_of_a_service(closed: Serve) -> None:
    for pid in closed.children().values():
        shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        for token in (b"of-clients", b"of-schedulers", b"auth_token", b"admin_token"):
            assert token not in shown.replace(b"--auth-token-file", b"")


def test_the_scheduler_sends_the_executors_token_to_no_port_that_others_could_take(closed: Serve) -> None:
    command = Path(f"/proc/{closed.children()['scheduler_service']}/cmdline").read_bytes().split(b"\0")
    reached = command[command.index(b"--executor") + 1].decode()
    socket = Path(reached.removeprefix("unix:"))
    assert reached.startswith("unix:")
    assert socket.is_socket()
    assert socket.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("options", "token", "security"),
    [
        pytest.param(
            ["-S", "auth-token-file={token}", *FOR_CERTIFIED],
            "sesame",
            Security(TLS / "ca.pem", TLS / "client.pem", TLS / "client.key", token="sesame"),
            id="a token and certificates",
        ),
        pytest.param(
            ["-S", "config={settings}"],
            "sesame",
            Security(token="sesame"),
            id="a token, in a settings file",
            marks=pytest.mark.slow,
        ),
        pytest.param(PORT_WITH_TLS, None, Security(TLS / "ca.pem"), id="TLS, and no token"),
    ],
)
def test_serve_reaches_a_scheduler_whatever_its_own_options_demand(
    tmp_path: Path, options: list[str], token: str | None, security: Security
) -> None:
    files = {"token": tmp_path / "token", "settings": tmp_path / "settings.yaml"}
    files["token"].write_text("sesame")
    files["settings"].write_text(f"auth-token-file: {files['token']}\n")
    with serving(tmp_path, *(option.format_map(files) for option in options)) as serve:
        assert answered(serve.address, security)
        serve.wait_for("Ctrl-C stops")


def test_plaintext_beyond_loopback_is_a_warning_and_the_environments_token_is_demanded(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, "--host", "0.0.0.0", "--insecure", PACELINE_TOKEN="sesame") as serve:
        assert answered(serve.address, Security(token="sesame"))
        with paceline.Client(serve.address) as client, pytest.raises(errors.Unauthenticated):
            client.model_info(timeout_s=60)
        for token in ("", "sesame"):
            assert executor_refuses(serve.executor_address, token)
        assert serve.log.count("plaintext beyond this machine") == 1
        assert "no token" not in serve.log


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--token", "x", "serve"], {}, "give serve --token-file FILE or PACELINE_TOKEN"),
        (["--tls-ca", str(TLS / "ca.pem"), "serve"], {}, "-S tls-cert=FILE"),
        (["serve", "--token-file", "{file}"], {"PACELINE_TOKEN": "b"}, "different tokens"),
        (["scheduler"], {"PACELINE_TOKEN": "x"}, "--auth-token-file"),
        (["--token", "x", "executor", "--backend", "oracle"], {}, "--auth-token-file"),
    ],
)
def test_a_security_option_without_effect_is_refused(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], said: str
) -> None:
    (tmp_path / "token").write_text("a")
    given = [argument.replace("{file}", str(tmp_path / "token")) for argument in arguments]
    result = run(*given, **variables)
    assert result.returncode == 2
    [line] = result.stderr.strip().splitlines()
    assert said in line


def test_a_token_on_the_command_line_is_one_warning(closed: Serve) -> None:
    result = run("--token", "of-clients", "generate", "x", "-m", "2", "-a", closed.address)
    assert result.returncode == 0, result.stderr
    assert len(re.findall("shows in the process list", result.stderr)) == 1
    quiet = run("generate", "x", "-m", "2", "-a", closed.address, PACELINE_TOKEN="of-clients")
    assert (quiet.returncode, quiet.stderr.strip()) == (0, "[cut at 2 tokens; -m N allows more]")
