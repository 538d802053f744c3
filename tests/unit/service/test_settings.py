"""Unknown settings are mistakes; secrets come over standard input; weaker protection is a warning."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from service_kit.identity import token_hash
from service_kit.known import nearest
from service_kit.secrets import parse_secrets
from service_kit.settings import ServiceSettings

from executor_service.backends.torch_backend.parallel.ranks import Rank
from executor_service.config import ExecutorConfig
from scheduler_service.config import SchedulerSettings

ORACLE = ["--backend", "oracle"]
Fails = Callable[..., str]


def executor(*arguments: str) -> ExecutorConfig:
    return ExecutorConfig.from_command_line([*ORACLE, *arguments], "executor")


def scheduler(*arguments: str) -> SchedulerSettings:
    return SchedulerSettings.from_command_line(arguments, "scheduler")


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Fails:
    """What a service says when it refuses a command line."""

    def of(parse: Callable[..., ServiceSettings], *arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            parse(*arguments)
        assert caught.value.code == 2
        return capsys.readouterr().err

    return of


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], io.BytesIO]:
    """Puts bytes on standard input."""

    def put(data: bytes) -> io.BytesIO:
        stream = io.BytesIO(data)
        monkeypatch.setattr(os, "read", lambda descriptor, size: stream.read(size))
        return stream

    return put


@pytest.mark.parametrize(
    ("parse", "name", "near"),
    [
        (scheduler, "PACELINE_SCHEDULER_AUTH_TOKEN", "PACELINE_SCHEDULER_AUTH_TOKEN_FILE"),
        (scheduler, "PACELINE_SCHEDULER_TLS_CRET", "PACELINE_SCHEDULER_TLS_CERT"),
        (executor, "PACELINE_EXECUTOR_AUTH_TOKN_FILE", "PACELINE_EXECUTOR_AUTH_TOKEN_FILE"),
        (executor, "paceline_executor_reflecton", "PACELINE_EXECUTOR_REFLECTION"),
    ],
)
def test_a_variable_that_is_no_setting_ends_the_start_with_the_nearest_name(
    parse: Callable[..., ServiceSettings],
    name: str,
    near: str,
    monkeypatch: pytest.MonkeyPatch,
    complaint: Fails,
) -> None:
    monkeypatch.setenv(name, "x-value")
    said = complaint(parse)
    assert f"{name}: no such setting; did you mean {near}?" in said
    assert "x-value" not in said


def test_the_dashes_of_options_make_none_alike() -> None:
    assert nearest("--foo", ["--tool-format", "--step-tokens"]) == ""
    assert nearest("--tool-form", ["--tool-format"]) == "; did you mean --tool-format?"


def test_variables_of_the_other_service_and_of_clients_are_none_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PACELINE_SCHEDULER_ANYTHING", "PACELINE_TOKEN", "PACELINE_EXECUTORS"):
        monkeypatch.setenv(name, "x")
    assert executor("--port", "1").port == 1


def test_variables_that_kubernetes_makes_are_explained(
    monkeypatch: pytest.MonkeyPatch, complaint: Fails
) -> None:
    monkeypatch.setenv("PACELINE_EXECUTOR_SERVICE_HOST", "10.0.0.1")
    assert "enableServiceLinks" in complaint(executor)


def test_flags_and_the_file_tell_the_nearest_name_too(tmp_path: Path, complaint: Fails) -> None:
    assert "--auth-token: no such setting; did you mean --auth-token-file?" in complaint(
        executor, "--auth-token=x"
    )
    file = tmp_path / "settings.yaml"
    file.write_text("tls-crt: x\n")
    assert "tls-crt: no such setting; did you mean tls-cert?" in complaint(scheduler, "--config", str(file))


def test_a_prefix_of_a_flag_is_no_flag(complaint: Fails) -> None:
    assert "--metrics-po" in complaint(executor, "--metrics-po", "1")


def test_the_executors_secret_is_demanded_from_its_callers(stdin: Callable[[bytes], io.BytesIO]) -> None:
    rest = stdin(b'{"auth_token": "s3cret"}\nwhat follows')
    config = executor("--secrets-stdin")
    assert rest.read() == b"what follows"
    assert config.bound_to_stdin
    assert config.credentials.demanded
    assert config.credentials.admits((("authorization", "Bearer s3cret"),))
    assert not config.credentials.admits(())
    assert "s3cret" not in repr(config)


def test_an_administrators_secret_alone_demands_nothing_of_others(
    stdin: Callable[[bytes], io.BytesIO],
) -> None:
    stdin(b'{"executor_token": "e", "admin_token": "a"}\n')
    settings = scheduler("--secrets-stdin")
    assert settings.executor_security.token == "e"
    assert settings.credentials.admits(())
    assert not settings.credentials.demanded
    stdin(b'{"executor_token": "e", "admin_token": "a", "client_token": "c"}\n')
    assert not scheduler("--secrets-stdin").credentials.admits(())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "standard input ended before the line of secrets"),
        (b'{"auth_token": "x"}', "standard input ended"),
        (b"s3cret\n", "is not JSON"),
        (b'["s3cret"]\n', "is no JSON object"),
        (b'{"auth_tokn": "s3cret"}\n', "no secret is called 'auth_tokn'; did you mean auth_token?"),
        (b'{"auth_token": ""}\n', "auth_token: expected a string"),
        (b'{"auth_token": 7}\n', "auth_token: expected a string"),
        (b'{"auth_token": "s3cret s3cret"}\n', "auth_token: a token is visible ASCII"),
        (b" " * (1 << 17), "has more than"),
    ],
)
def test_a_wrong_line_of_secrets_ends_the_start_and_is_not_shown(
    line: bytes, said: str, stdin: Callable[[bytes], io.BytesIO], complaint: Fails
) -> None:
    stdin(line)
    message = complaint(executor, "--secrets-stdin")
    assert said in message
    assert "s3cret" not in message


def test_each_service_knows_its_own_secrets_alone() -> None:
    known = SchedulerSettings.SECRET_TOKENS.keys() | SchedulerSettings.OTHER_SECRETS
    with pytest.raises(ValueError, match="auth_token"):
        parse_secrets(b'{"auth_token": "x"}', known)


def test_the_executors_token_comes_from_one_place(
    tmp_path: Path, stdin: Callable[[bytes], io.BytesIO], complaint: Fails
) -> None:
    (tmp_path / "token").write_text("t")
    stdin(b'{"executor_token": "e"}\n')
    arguments = ("--secrets-stdin", "--executor-token-file", str(tmp_path / "token"))
    assert "given twice" in complaint(scheduler, *arguments)


def test_a_broken_tokens_file_is_refused_at_the_start(tmp_path: Path, complaint: Fails) -> None:
    file = tmp_path / "tokens"
    file.write_text("- {name: a, sha256: abc}")
    assert "entry 1: sha256" in complaint(scheduler, "--tokens-file", str(file))
    assert "--tokens-file: no file" in complaint(scheduler, "--tokens-file", str(tmp_path / "none"))


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_host_may_have_brackets(host: str) -> None:
    config = executor("--host", host, "--metrics-host", host)
    assert (config.address, config.metrics_host) == ("[::1]:50061", "::1")


def tokens_file(folder: Path, mode: int = 0o600) -> Path:
    file = folder / "tokens"
    file.write_text(f"- {{name: a, sha256: {token_hash('t')}}}")
    file.chmod(mode)
    return file


def test_each_setting_that_protects_less_is_one_warning(tmp_path: Path) -> None:
    tokens = ("--tokens-file", str(tokens_file(tmp_path)))
    assert executor(*tokens, "--metrics-port", "0").security_warnings() == []
    assert executor().security_warnings() == []  # on loopback
    (no_token, _) = executor("--host", "0.0.0.0", "--insecure").security_warnings()
    assert "no token" in no_token
    (plaintext,) = executor(*tokens, "--host", "0.0.0.0", "--insecure").security_warnings()
    (reflection,) = executor(*tokens, "--reflection").security_warnings()
    (metrics,) = executor(*tokens, "--metrics-port", "0", "--metrics-host", "::").security_warnings()
    assert "plaintext" in plaintext
    assert "reflection" in reflection
    assert "metrics" in metrics


@pytest.mark.parametrize(("mode", "warnings"), [(0o600, 0), (0o640, 0), (0o644, 1), (0o604, 1)])
def test_a_secret_file_that_others_may_read_is_a_warning(tmp_path: Path, mode: int, warnings: int) -> None:
    tokens = ("--tokens-file", str(tokens_file(tmp_path)))
    secret = tmp_path / "secret"
    secret.write_text("u")
    secret.chmod(mode)
    for flag, load in (("--auth-token-file", executor), ("--executor-token-file", scheduler)):
        found = load(*tokens, flag, str(secret)).security_warnings()
        assert found == [f"{flag}: every user of this machine may read {secret}: chmod 600"][:warnings]


@pytest.mark.parametrize("flag", ["--executor-token-file", "--executor-tls-ca", "--config"])
@pytest.mark.parametrize("kind", ["pipe", "device", "large", "folder"])
def test_a_file_that_would_hang_the_start_or_fill_the_memory_is_refused(
    tmp_path: Path, flag: str, kind: str, complaint: Fails
) -> None:
    file = Path("/dev/zero") if kind == "device" else tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "large":
        file.write_bytes(b"x" * ((1 << 20) + 1))
    elif kind == "folder":
        file.mkdir()
    told = complaint(scheduler, flag, str(file))
    assert str(file) in told
    assert ("has more than" if kind == "large" else "is not a regular file") in told


def test_plaintext_to_an_executor_elsewhere_is_a_warning(tmp_path: Path) -> None:
    tokens = ("--tokens-file", str(tokens_file(tmp_path)))
    near = ("--executor", "127.0.0.1:1", "--executor", "[::1]:2", "--executor", "unix:/x")
    far = ("--executor", "10.0.0.7:50061", "--draft-executor", "gpu2:50061")
    assert scheduler(*tokens, *near).security_warnings() == []
    (warning,) = scheduler(*tokens, *near, *far).security_warnings()
    assert "plaintext to executors beyond this machine (10.0.0.7:50061, gpu2:50061)" in warning
    ca = str(Path(__file__).parents[2] / "support" / "tls" / "ca.pem")
    assert scheduler(*tokens, *far, "--executor-tls-ca", ca).security_warnings() == []


def test_a_rendezvous_without_credentials_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_file(tmp_path)
    torch = ("--tokens-file", str(tmp_path / "tokens"), "--backend", "torch", "--model", str(tmp_path))
    assert executor(*torch).security_warnings() == []
    (here,) = executor(*torch, "--tensor-parallel", "2").security_warnings()
    assert "on this machine" in here
    for name, value in Rank(0, 2, 0, 2, "10.0.0.7", 29500).environment().items():
        monkeypatch.setenv(name, value)
    (there,) = executor(*torch).security_warnings()
    assert "at 10.0.0.7" in there


def test_without_credentials_only_a_loopback_service_has_administrators() -> None:
    assert executor().credentials._open_admin
    assert not executor("--host", "0.0.0.0", "--insecure").credentials._open_admin
    assert os.environ.get("PACELINE_EXECUTOR_HOST") is None


def test_spans_need_their_packages(complaint: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scheduler("--otel").otel
    monkeypatch.setattr("service_kit.settings.find_spec", lambda _: None)
    for parse in (scheduler, executor):
        assert "--otel: OpenTelemetry is not installed" in complaint(parse, "--otel")
