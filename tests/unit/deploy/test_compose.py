"""The compose file starts both services with settings that they take, and closes what need not be open."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploy.files import (
    COMPOSE,
    DOCKERFILE,
    USER,
    Machine,
    documents,
    has_no_rights,
    seconds,
    unsafe_warnings,
)

SERVICES = ("executor", "scheduler")
MARGIN_S = 15.0


@pytest.fixture(scope="module")
def compose() -> Any:
    return documents(COMPOSE)[0]


@pytest.fixture(scope="module")
def settings(compose: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    machine = Machine(tmp_path_factory.mktemp("compose"))
    return {name: machine.parse(name, compose["services"][name]["command"]) for name in SERVICES}


@pytest.mark.parametrize("name", SERVICES)
def test_containers_have_no_rights(name: str, compose: Any) -> None:
    service = compose["services"][name]
    assert has_no_rights(service)
    assert "environment" not in service  # no tokens in variables
    assert "privileged" not in service


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_built_from_this_tree(name: str, compose: Any) -> None:
    build = compose["services"][name]["build"]
    context = (COMPOSE.parent / build["context"]).resolve()
    assert context / build["dockerfile"] == DOCKERFILE
    assert f" AS {build['target']}\n" in DOCKERFILE.read_text()
    assert build["target"] == name


def test_the_executor_is_reached_by_its_scheduler_alone(compose: Any, settings: dict[str, Any]) -> None:
    executor, scheduler = settings["executor"], settings["scheduler"]
    assert compose["services"]["executor"]["network_mode"] == "none"
    assert "ports" not in compose["services"]["executor"]
    assert list(scheduler.executor) == [f"unix:{executor.local_socket}"]
    assert scheduler.executor_token_file == executor.auth_token_file
    folder = str(executor.local_socket.parent)
    for name in SERVICES:
        assert f"socket:{folder}" in compose["services"][name]["volumes"]
    options = compose["volumes"]["socket"]["driver_opts"]["o"]
    assert {f"uid={USER}", f"gid={USER}", "mode=0700"} <= set(options.split(","))
    assert scheduler.instance  # host names change with each container


def test_clients_need_tls_and_tokens(settings: dict[str, Any]) -> None:
    for name in SERVICES:
        assert unsafe_warnings(settings[name]) == []
        assert settings[name].credentials.demanded
    assert settings["scheduler"].tls_cert is not None


def test_published_ports_are_those_of_the_scheduler_and_metrics_stay_on_the_machine(
    compose: Any, settings: dict[str, Any]
) -> None:
    scheduler = settings["scheduler"]
    clients, metrics = compose["services"]["scheduler"]["ports"]
    assert int(clients.rpartition(":")[2]) == scheduler.port
    assert int(metrics.rpartition(":")[2]) == scheduler.metrics_port
    assert metrics.startswith("127.0.0.1:")


@pytest.mark.parametrize("name", SERVICES)
def test_containers_drain_before_they_are_killed(name: str, compose: Any, settings: dict[str, Any]) -> None:
    grace_s = seconds(compose["services"][name]["stop_grace_period"])
    assert grace_s >= settings[name].drain_timeout_s + MARGIN_S
    assert compose["services"]["scheduler"]["depends_on"] == ["executor"]  # stopped in the other order


@pytest.mark.parametrize("name", SERVICES)
def test_files_of_the_settings_are_mounted_read_only(name: str, compose: Any) -> None:
    mounts = [one.rsplit(":", 2) for one in compose["services"][name]["volumes"] if one.startswith("${")]
    assert all(mode == "ro" for *_, mode in mounts)
    read_only = {target for _, target, _ in mounts}
    for flag in compose["services"][name]["command"]:
        value = flag.partition("=")[2]
        if value.startswith(("/etc/", "/model")):
            assert {value, str(Path(value).parent)} & read_only, flag


def test_what_must_be_written_is_writable(compose: Any) -> None:
    for name in SERVICES:
        assert any(one.startswith("/tmp:") for one in compose["services"][name]["tmpfs"])
    assert "kernels:/var/cache/paceline" in compose["services"]["executor"]["volumes"]
    named = {
        one.partition(":")[0]
        for name in SERVICES
        for one in compose["services"][name]["volumes"]
        if not one.startswith("${")
    }
    assert named == compose["volumes"].keys()


def test_the_variables_are_told_at_its_top() -> None:
    text = COMPOSE.read_text()
    head = text[: text.index("\nname:")]
    used = set(re.findall(r"\$\{([A-Z_]+)", text))
    assert used == {"MODEL", "SECRETS", "GPU", "PORT", "METRICS_PORT"}
    assert all(f"{name}=" in head for name in used)
