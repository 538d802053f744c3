"""The configuration: where values come from, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from executor_service.backends.oracle_backend.settings import OracleSettings
from executor_service.backends.torch_backend.settings import TorchSettings
from executor_service.config import ExecutorConfig

ORACLE = ["--backend", "oracle"]


def parse(arguments: list[str]) -> ExecutorConfig:
    return ExecutorConfig.from_command_line(arguments, "executor")


@pytest.fixture
def problem(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """What is said of a command line that is wrong."""

    def of(arguments: list[str]) -> str:
        with pytest.raises(SystemExit) as caught:
            parse(arguments)
        assert caught.value.code == 2
        return capsys.readouterr().err

    return of


def test_flags_win_over_environment_over_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = tmp_path / "executor.yaml"
    yaml.write_text("backend: oracle\nport: 1\npages: 10\nmax_rows: 7\n")
    monkeypatch.setenv("PACELINE_EXECUTOR_PORT", "2")
    monkeypatch.setenv("PACELINE_EXECUTOR_PAGES", "20")
    config = parse(["--config", str(yaml), "--port", "3"])
    assert (config.backend, config.port, config.pages, config.max_rows) == ("oracle", 3, 20, 7)


def test_the_yaml_can_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = tmp_path / "executor.yaml"
    yaml.write_text("backend: oracle\n")
    monkeypatch.setenv("PACELINE_EXECUTOR_CONFIG", str(yaml))
    assert parse([]).backend == "oracle"


def test_a_missing_yaml_is_an_error_and_not_ignored(
    tmp_path: Path, problem: Callable[[list[str]], str]
) -> None:
    assert "none.yaml" in problem([*ORACLE, "--config", str(tmp_path / "none.yaml")])


def test_the_adapter_directory_must_be_one(tmp_path: Path, problem: Callable[[list[str]], str]) -> None:
    assert "--adapter-dir: no directory" in problem([*ORACLE, "--adapter-dir", str(tmp_path / "none")])
    config = parse([*ORACLE, "--adapter-dir", str(tmp_path), "--adapter-memory", "1GiB"])
    assert (config.adapter_dir, config.adapter_memory) == (tmp_path, 1 << 30)


def test_kv_memory_takes_suffixes() -> None:
    assert parse([*ORACLE, "--kv-memory", "2GiB"]).kv_memory == 2 << 30


def test_it_is_frozen() -> None:
    with pytest.raises(ValidationError):
        parse(ORACLE).port = 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--model"),
        ([*ORACLE, "--port", "65536"], "--port"),
        ([*ORACLE, "--page-size", "0"], "--page-size"),
        ([*ORACLE, "--kv-memory", "many"], "--kv-memory"),
        ([*ORACLE, "--kv-memory", "1GiB", "--pages", "3"], "not both"),
        ([*ORACLE, "--tls-cert", __file__], "--tls-key"),
        ([*ORACLE, "--tls-client-ca", __file__], "--tls-cert"),
        ([*ORACLE, "--auth-token-file", "/no/such"], "--auth-token-file: no file"),
        (["--backend", "torch", "--model", "/no/such"], "--model: no file"),
        ([*ORACLE, "--draft-agreement", "1.5"], "--draft-agreement"),
        (["--backend", "script"], "--backend script needs --script"),
        (["--backend", "script", "--script", "a", "--vocab-size", "256"], "--vocab-size 257 or more"),
        (["--backend", "script", "--script", "a", "--draft-agreement", "0.5"], "is for --backend oracle"),
        ([*ORACLE, "--host", "0.0.0.0"], "not loopback"),
    ],
)
def test_what_can_not_be_served_is_refused_by_name(
    arguments: list[str], text: str, problem: Callable[[list[str]], str]
) -> None:
    assert text in problem(arguments)


def test_plaintext_beyond_loopback_takes_a_flag() -> None:
    assert parse([*ORACLE, "--host", "0.0.0.0", "--insecure"]).host == "0.0.0.0"
    assert parse([*ORACLE, "--host", "::1"]).address == "[::1]:50061"


def test_ranks_that_follow_are_told_every_setting_of_the_backend(tmp_path: Path) -> None:
    settings = TorchSettings(
        model=tmp_path,
        device="cpu",
        dtype="int8",
        kv_dtype="int8",
        graphs="off",
        programmatic_dependent_launch="on",
        threads=3,
        max_context=4096,
        tensor_parallel=2,
        rank_timeout_s=7.5,
        sampling_default=("temperature=0.2", "top_k=40"),
    )
    defaults = {name: field.default for name, field in TorchSettings.model_fields.items()}
    assert all(getattr(settings, name) != default for name, default in defaults.items())
    config = ExecutorConfig(**settings.model_dump(), log_level="error")
    theirs = parse(config.follower_flags)
    assert theirs.backend_settings == config.backend_settings == settings
    assert theirs.log_level == "error"
    assert theirs.exit_with_stdin


def test_a_backend_gets_its_own_settings_and_no_others() -> None:
    config = parse([*ORACLE, "--threads", "2", "--vocab-size", "99", "--draft-seed", "5"])
    assert config.backend_settings == OracleSettings(vocab_size=99, draft_seed=5)


def test_every_setting_is_described() -> None:
    assert all(field.description for field in ExecutorConfig.model_fields.values())
