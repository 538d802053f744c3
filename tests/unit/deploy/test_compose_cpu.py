"""deploy/compose/cpu.yaml fetches a model and serves it, with settings that the services take."""

from __future__ import annotations

import re
from typing import Any

import pytest
from paceline.cli.models.wheel import SMOLLM2

from tests.unit.deploy.files import (
    DEPLOY,
    DOCKERFILE,
    Machine,
    documents,
    has_no_rights,
    seconds,
    unsafe_warnings,
)

FILE = DEPLOY / "compose" / "cpu.yaml"
SERVICES = ("model", "stack")


@pytest.fixture(scope="module")
def compose() -> Any:
    return documents(FILE)[0]


@pytest.fixture(scope="module")
def options(compose: Any) -> dict[str, list[str]]:
    """Options of `paceline serve` by name."""
    found: dict[str, list[str]] = {}
    for word in compose["services"]["stack"]["command"]:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("name", SERVICES)
def test_containers_have_no_rights(name: str, compose: Any) -> None:
    service = compose["services"][name]
    assert has_no_rights(service)
    assert "cache:/var/cache/paceline" in service["volumes"]


def test_the_model_is_fetched_before_it_is_served_under_the_same_name(compose: Any) -> None:
    model, stack = (compose["services"][name] for name in SERVICES)
    assert model["command"] == ["pull", f"${{MODEL:-{SMOLLM2.name}}}"]
    assert stack["command"][:2] == ["serve", model["command"][1]]
    assert stack["depends_on"] == {"model": {"condition": "service_completed_successfully"}}


def test_clients_need_tls_and_tokens(options: dict[str, list[str]], tmp_path_factory: Any) -> None:
    flags = [f"--{option}" for option in options["--scheduler-option"]]
    scheduler = Machine(tmp_path_factory.mktemp("cpu")).parse("scheduler", [*flags, "--host=0.0.0.0"])
    assert unsafe_warnings(scheduler) == []
    assert scheduler.credentials.demanded
    tls = {option for option in options["--scheduler-option"] if option.startswith("tls-")}
    assert set(options["--gateway-option"]) == tls  # one certificate for both ports


def test_ports_are_published_and_the_image_is_built_from_this_tree(
    compose: Any, options: dict[str, list[str]]
) -> None:
    stack = compose["services"]["stack"]
    inside = {port.rpartition(":")[2] for port in stack["ports"]}
    assert inside == {"50051", options["--openai"][0].rpartition(":")[2]}
    assert (FILE.parent / stack["build"]["context"] / stack["build"]["dockerfile"]).resolve() == DOCKERFILE
    assert f" AS {stack['build']['target']}\n" in DOCKERFILE.read_text()
    drain = [one for one in options["--scheduler-option"] if one.startswith("drain-timeout-s=")]
    assert seconds(stack["stop_grace_period"]) > seconds(drain[0].partition("=")[2])


def test_the_variables_are_told_at_its_top() -> None:
    text = FILE.read_text()
    head = text[: text.index("\nname:")]
    assert all(f"{name}=" in head for name in set(re.findall(r"\$\{([A-Z_]+)", text)))
