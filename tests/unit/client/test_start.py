"""`serve` tells a wrong setting of one process before it waits for another one to start."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import typer
from paceline.cli import stack
from paceline.cli.app import app
from paceline.cli.gateway_launch import gateway_launch
from paceline.cli.models.wheel import DEFAULT_MODEL
from paceline.cli.scratch import ChildFiles
from paceline.cli.served_model import served_name
from paceline.cli.stack import ExecutorLaunch, StackConfig, starting
from paceline.cli.supervisor import ChildFailed
from typer.testing import CliRunner

NEVER_LISTENS = "import sys; sys.stdin.read()"
MISTAKEN = "import sys; print('scheduler: --tokens-file: no file x'); sys.exit(2)"


def use_programs(programs: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the services be these programs, by their modules."""

    def command(module: str, *arguments: str) -> list[str]:
        return [sys.executable, "-S", "-c", programs[module]]

    monkeypatch.setattr(stack, "command", command)


async def failure(config: StackConfig) -> str:
    """Why the stack does not start."""
    with pytest.raises(ChildFailed) as caught:
        async with asyncio.timeout(30), starting(config, lambda name, line: None, lambda what, done: None):
            pass
    return str(caught.value)


@pytest.mark.parametrize("drafts", [False, True])
async def test_a_wrong_setting_of_the_scheduler_does_not_wait_for_the_executor(
    monkeypatch: pytest.MonkeyPatch, *, drafts: bool
) -> None:
    use_programs({"executor_service": NEVER_LISTENS, "scheduler_service": MISTAKEN}, monkeypatch)
    draft = ExecutorLaunch("oracle") if drafts else None
    told = await failure(StackConfig("oracle", draft=draft))
    assert told == "the scheduler ended (exit status 2): scheduler: --tokens-file: no file x"


def test_serve_prints_a_wrong_setting_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use_programs({"executor_service": NEVER_LISTENS, "scheduler_service": MISTAKEN}, monkeypatch)
    result = CliRunner().invoke(app, ["serve", "--backend", "oracle", "--port", "0"])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-2:] == [
        "scheduler scheduler: --tokens-file: no file x",
        "paceline: the scheduler ended (exit status 2)",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tls-cert=FILE", "--tls-key=/nowhere"], "/nowhere can't be read"),
        (["--tls-cert=FILE"], "--tls-cert and --tls-key go together"),
        (["--no-such-option=1"], "no-such-option"),
        (["--max-body-bytes=0"], "--max-body-bytes: expected more than 0"),
        (["--policy=cache_aware"], "requests are spread over the schedulers"),
        (["--tls-cert-path=FILE"], "now it is tls-cert"),
    ],
)
def test_a_wrong_option_of_the_gateway_does_not_wait_for_the_model(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    given = [option.replace("FILE", str(tmp_path / "file")) for option in options]
    with pytest.raises(typer.Exit) as ended:
        gateway_launch("0", insecure=False, logs=(), options=given)
    assert ended.value.exit_code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_keys_of_earlier_versions_end_the_start_and_say_what_keys_are_now(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        gateway_launch("0", insecure=False, logs=(), api_key="given")
    monkeypatch.setenv("PACELINE_API_KEY", "given")
    with pytest.raises(typer.Exit):
        gateway_launch("0", insecure=False, logs=())
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("give --token-file FILE, PACELINE_TOKEN, or -S tokens-file=FILE") == 2


def test_a_gateway_beyond_loopback_needs_tls_or_insecure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        gateway_launch("0.0.0.0:0", insecure=False, logs=())
    assert "-G tls-cert=FILE -G tls-key=FILE, or --insecure" in " ".join(capsys.readouterr().err.split())
    assert gateway_launch("0.0.0.0:0", insecure=True, logs=()).host == "0.0.0.0"


def test_a_model_is_served_under_the_name_that_it_was_asked_for_by(tmp_path: Path) -> None:
    file = tmp_path / "small.Q4_1.gguf"
    file.write_bytes(b"")
    assert served_name("torch", "owner/small-GGUF") == "owner/small-GGUF"
    assert served_name("torch", "owner/small-GGUF:Q4_1") == "owner/small-GGUF:Q4_1"
    assert served_name("torch", None) == DEFAULT_MODEL.name
    for own in (str(file), str(tmp_path), "small.Q4_1.gguf", "owner/small@v1", "two words"):
        assert served_name("torch", own) == "", own
    assert served_name("oracle", None) == ""
    config = StackConfig("torch", file, name="owner/small-GGUF")
    command = config.scheduler_command(0, ChildFiles.of("scheduler", tmp_path), "127.0.0.1:1", "")
    assert "--model-name=owner/small-GGUF" in command
