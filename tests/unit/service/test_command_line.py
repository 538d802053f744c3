"""The command lines of services, as people read and write them."""

from __future__ import annotations

import re

import pytest

from executor_service.config import ExecutorConfig
from scheduler_service.config import SchedulerSettings

SERVICES = [ExecutorConfig, SchedulerSettings]


def parsed(*arguments: str) -> ExecutorConfig:
    return ExecutorConfig.from_command_line(["--backend", "oracle", *arguments], "paceline executor")


@pytest.mark.parametrize("value", ["true", "True", "yes", "on", "1"])
def test_a_switch_is_turned_on_with_a_value_too(value: str) -> None:
    assert parsed(f"--reflection={value}").reflection
    assert parsed("--reflection").reflection


@pytest.mark.parametrize("value", ["false", "no", "OFF", "0"])
def test_a_switch_is_turned_off_with_a_value_too(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_EXECUTOR_REFLECTION", "true")
    assert parsed().reflection
    assert not parsed(f"--reflection={value}").reflection
    assert not parsed("--no-reflection").reflection


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--reflection=maybe", "paceline executor: --reflection: expected true or false, got 'maybe'\n"),
        ("--port", "paceline executor: argument --port: expected one argument\n"),
        ("here", "paceline executor: unrecognized arguments: here\n"),
    ],
)
def test_a_mistake_is_one_line_without_the_list_of_flags(
    flag: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parsed(flag)
    assert exit_.value.code == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("service", SERVICES)
def test_help_names_values_as_people_do_and_no_python_types(
    service: type[ExecutorConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        service.from_command_line(["--help"], "paceline service")
    text = capsys.readouterr().out
    assert "--port PORT" in text
    assert "--drain-timeout-s SECONDS" in text
    assert "--log-level debug|info|warning|error" in text
    assert not re.search(r"\b(str|int|float|Path|ByteSize|tuple)\b", text)
    assert "None" not in text
    assert "False" not in text
