"""`serve` tells a wrong setting of one process before it waits for another one to start."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from paceline.cli import stack
from paceline.cli.gateway_launch import GatewayLaunch
from paceline.cli.stack import ExecutorLaunch, StackConfig, starting
from paceline.cli.supervisor import ChildFailed

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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["tls-cert-path=FILE", "tls-key-path=/nowhere"], "--tls-key-path: /nowhere: No such file"),
        (["tls-cert-path=FILE", "tls-key-path=FILE"], "holds no certificate in PEM format"),
        (["ca-cert-paths=/nowhere"], "--ca-cert-paths: /nowhere: No such file or directory"),
        (["no-such-option=1"], "no-such-option"),
    ],
)
async def test_a_wrong_option_of_the_gateway_does_not_wait_for_the_model(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no certificate")
    flags = [f"--{option.replace('FILE', str(tmp_path / 'file'))}" for option in options]
    use_programs({"executor_service": NEVER_LISTENS, "scheduler_service": NEVER_LISTENS}, monkeypatch)
    told = await failure(StackConfig("oracle", gateway=GatewayLaunch("127.0.0.1", 0, options=tuple(flags))))
    assert told.startswith("the gateway ended (exit status 2): gateway: ")
    assert said in told


async def test_right_options_of_the_gateway_pass() -> None:
    await GatewayLaunch("127.0.0.1", 0, api_key="secret", options=("--log-level", "error")).check()
