"""Settings: flags beat the environment, which beats the file; a mistake is told and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from scheduler_service.config import MAX_INSTANCE, SchedulerSettings
from scheduler_service.core.request import DraftingWish, DraftSource
from scheduler_service.model import DraftingOffer

ALONE, ALL = frozenset({DraftSource.NGRAM, DraftSource.GRAMMAR}), frozenset(DraftSource)


def load(*arguments: str) -> SchedulerSettings:
    return SchedulerSettings.from_command_line(arguments, "scheduler")


def test_flags_beat_the_environment_which_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("executor: [a:1, b:2]\nport: 1\nmax-running: 11\nmax_queued_requests: 21\n")
    monkeypatch.setenv("PACELINE_SCHEDULER_PORT", "2")
    monkeypatch.setenv("PACELINE_SCHEDULER_MAX_RUNNING", "12")
    settings = load("--config", str(file), "--port", "3")
    assert (settings.port, settings.max_running, settings.max_queued_requests) == (3, 12, 21)
    assert settings.executor == ("a:1", "b:2")


def test_executors_are_a_repeated_flag_or_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("--executor", "a:1", "--executor", "b:2").executor == ("a:1", "b:2")
    monkeypatch.setenv("PACELINE_SCHEDULER_EXECUTOR", "c:3, d:4")
    assert load().executor == ("c:3", "d:4")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--port", "-1"], "port"),
        (["--port", "many"], "port"),
        (["--bogus", "1"], "bogus"),
        (["--executor", "a:1", "--executor", "a:1"], "twice"),
        (["--executor", "a:1", "--draft-executor", "a:1"], "twice"),
        (["--executor", "grpc://a:1"], "give host:port without grpc://"),
        (["--draft-executor", "http://a:1"], "give host:port without http://"),
        (["--peer", "https://a:1", "--advertise", "b:1"], "give host:port without https://"),
        (["--executor", "localhost"], "its port is missing"),
        (["--speculation", "on"], "speculation"),
        (["--speculation", "0"], "speculation"),
        (["--speculation", "-3"], "speculation"),
        (["--max-draft-tokens", "0"], "--max-draft-tokens"),
        (["--tls-cert", __file__], "go together"),
        (["--stall-timeout-s", "nan"], "--stall-timeout-s"),
        (["--auth-token-file", "nowhere"], "nowhere"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_mistake_names_its_setting(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load(*arguments)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], DraftingOffer(ALONE, DraftingWish(ALONE))),
        (["--speculation", "off"], DraftingOffer(ALONE, DraftingWish())),
        (["--speculation", "5"], DraftingOffer(ALONE, DraftingWish(ALONE, 5))),
        (["--draft-executor", "d:1"], DraftingOffer(ALL, DraftingWish(ALL))),
        (["--draft-executor", "d:1", "--speculation", "off"], DraftingOffer(ALL, DraftingWish())),
    ],
)
def test_speculation_is_on_by_default(arguments: list[str], expected: DraftingOffer) -> None:
    assert load(*arguments).drafting == expected


@pytest.mark.parametrize(("written", "length"), [("off", None), ("auto", None), ("4", 4)])
def test_speculation_in_the_file_is_what_it_says(tmp_path: Path, written: str, length: int | None) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"speculation: {written}\n")  # YAML reads `off` as false and 4 as a number
    default = load("--config", str(file)).drafting.default
    assert default == (DraftingWish() if written == "off" else DraftingWish(ALONE, length))


def test_an_unknown_setting_in_the_file_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("prot: 1\n")
    with pytest.raises(SystemExit):
        load("--config", str(file))
    assert "prot" in capsys.readouterr().err


def test_tokens_come_from_files_and_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("sesame\n")
    settings = load("--auth-token-file", str(file), "--executor-token-file", str(file))
    assert settings.executor_security.token == "sesame"
    assert settings.credentials.demanded
    assert "sesame" not in repr(settings)


def test_the_instance_name_is_unique_and_the_same_after_a_restart() -> None:
    def name(**settings: Any) -> str:
        return SchedulerSettings(**settings).instance_name

    assert name(port=5) == name(port=5) != name(port=6)
    assert name(port=5, host="127.0.0.1") != name(port=5, host="127.0.0.2")
    assert name(port=0) == ""  # a restart chooses another port
    assert name(port=0, instance="left") == "left"
    assert len(name(port=5, host="::1")) <= MAX_INSTANCE
    for bad in ("x" * (MAX_INSTANCE + 1), "two words", "é"):
        with pytest.raises(ValidationError):
            SchedulerSettings(instance=bad)


def test_adapters_of_the_start_have_names_of_their_own_and_directories() -> None:
    settings = SchedulerSettings(adapter=("sql", "chat=tuned/v2"))
    assert settings.adapters == {"sql": "sql", "chat": "tuned/v2"}
    for wrong in (("a", "a=b"), ("",), ("=b",), ("a/b",)):
        with pytest.raises(ValidationError, match="--adapter"):
            SchedulerSettings(adapter=wrong)
