"""A YAML file of several models: what it sets, and what is refused of it before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from paceline.cli.several_models.config import ForAllModels, models_config
from paceline.cli.several_models.plan import ModelsConfig


def config_of(directory: Path, content: str) -> ModelsConfig:
    """Of a file of models."""
    (directory / "m.yaml").write_text(content)
    shared = ForAllModels("oracle", "127.0.0.1", 0, "", (), (), (), ())
    return models_config([str(directory / "m.yaml")], shared, None)


def test_a_models_own_settings_reach_its_scheduler(tmp_path: Path) -> None:
    settings = "{metrics-port: 9000, drain-timeout-s: 3, max-running: 5}"
    options = (
        config_of(tmp_path, f"models: [{{name: a, scheduler: {settings}}}]").models[0].stack.scheduler_options
    )
    assert {"--metrics-port=9000", "--drain-timeout-s=3", "--max-running=5"} <= {*options}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tokens-file", "a: scheduler: tokens-file: one for all models: -S tokens-file=..."),
        ("tls_cert", "a: scheduler: tls-cert: one for all models: -S tls-cert=..."),
        ("advertise", "a: scheduler: advertise: not with several models"),
    ],
)
def test_settings_that_the_router_would_not_know_of_are_refused_for_one_model_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    with pytest.raises(typer.Exit):
        config_of(tmp_path, f"models: [{{name: a, scheduler: {{{name}: x}}}}]")
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("models: [{name: x}, {name: x}]", "two models are called x"),
        ("models: [{name: '../x'}]", "'../x' can't be a model's name"),
        ("models: [{nam: x}]", "no field is called 'nam'"),
        ("models: [{name: x, on-demand: 3}]", "on-demand: expected a bool"),
        ("models: []", "expected 1 to 64 models, got 0"),
        ("models: 3", "expected one list"),
        ("memory: 3\nmodels: [{name: x}]", "expected one list, `models:`, and perhaps `keep-alive-s:`"),
        ("keep-alive-s: -1\nmodels: [{name: x}]", "keep-alive-s: expected seconds above 0, got -1"),
        ("keep-alive-s: yes\nmodels: [{name: x}]", "keep-alive-s: expected seconds above 0, got True"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_the_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    with pytest.raises(typer.Exit) as refused:
        config_of(tmp_path, content)
    assert refused.value.exit_code == 2
    assert said in capsys.readouterr().err.replace("\n", " ")
