"""The units start what exists, with settings that it takes, and let it drain."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploy.files import SERVICES, SYSTEMD, Machine, unsafe_warnings
from tests.unit.docs.test_commands import check_paceline

UNITS = {path.name: path for path in sorted(SYSTEMD.glob("*.service"))}
STACK = "paceline@.service"
MARGIN_S = 15.0


class Unit:
    """The settings of a unit: a list of values for each name."""

    def __init__(self, path: Path) -> None:
        text = re.sub(r"\\\n\s*", "", path.read_text())
        self.text = path.read_text()
        self.values: dict[str, list[str]] = {}
        for name, value in re.findall(r"^([A-Z]\w+)=(.*)$", text, re.M):
            self.values.setdefault(name, []).append(value)

    def one(self, name: str) -> str:
        (value,) = self.values[name]
        return value

    @property
    def command(self) -> list[str]:
        """The words of ExecStart for the instance gpu0, with what systemd and stack.env put in."""
        line = self.one("ExecStart")
        for there, here in (
            ("%i", "gpu0"),
            ("%d", "/credentials"),
            ("${MODEL}", "/models/m"),
            ("${PORT}", "50051"),
        ):
            line = line.replace(there, here)
        return shlex.split(line)


def services_of(unit: Unit) -> dict[str, list[str]]:
    """The flags with which the unit's command starts services."""
    program, command, *words = unit.command
    assert program == "/opt/paceline/bin/paceline"
    check_paceline(["paceline", command, *words])
    if command != "serve":
        return {command: words}
    options = [(words[i], words[i + 1]) for i, word in enumerate(words) if word in ("-E", "-S")]
    given = {"-E": "executor", "-S": "scheduler"}
    found: dict[str, list[str]] = {"executor": ["--model=/models/m"], "scheduler": []}
    for option, pair in options:
        found[given[option]].append(f"--{pair}")
    found["scheduler"] += [f"--host={words[words.index('--host') + 1]}", "--executor=unix:/run/socket"]
    return found


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest) -> Unit:
    return Unit(UNITS[request.param])


def parsed(unit: Unit, tmp_path: Path) -> dict[str, Any]:
    """The settings of the unit's services, read as they would."""
    examples = SYSTEMD if "serve" not in unit.command else None
    machine = Machine(tmp_path, examples)
    if examples is None:  # the files of a stack may be empty mappings
        for service in SERVICES:
            path = tmp_path / "etc" / "paceline" / "gpu0" / f"{service}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}\n")
    return {service: machine.parse(service, flags) for service, flags in services_of(unit).items()}


def test_a_unit_starts_services_with_settings_that_they_take(unit: Unit, tmp_path: Path) -> None:
    settings = parsed(unit, tmp_path)
    assert settings
    for service in settings.values():
        if service.host != "127.0.0.1":
            assert unsafe_warnings(service) == []
            assert service.tls_cert is not None
            assert service.credentials.demanded


def test_a_unit_drains_before_it_is_killed(unit: Unit, tmp_path: Path) -> None:
    drains_s = sum(service.drain_timeout_s for service in parsed(unit, tmp_path).values())
    assert float(unit.one("TimeoutStopSec")) >= drains_s + MARGIN_S
    # By default all processes get SIGTERM, and the executor drains under the scheduler.
    assert unit.one("KillMode") == "mixed"


def test_a_unit_is_not_started_again_where_that_does_not_help(unit: Unit) -> None:
    expected = {"2", "78"} if "executor" in unit.command else {"2"}
    assert set(unit.one("RestartPreventExitStatus").split()) == expected
    assert unit.one("Restart") == "on-failure"


def test_keys_and_tokens_are_credentials(unit: Unit) -> None:
    credentials = {value.partition(":")[0] for value in unit.values["LoadCredential"]}
    named = set(re.findall(r"%d/([\w.-]+)", unit.text))
    assert named == credentials
    secret = [word for word in unit.command if re.search(r"(-key|-token-file)=", word)]
    assert secret
    assert all("/credentials/" in word for word in secret)
    # A credential is a copy; the tokens file is read again when it changes.
    assert not any("tokens" in one for one in credentials)
    assert not any("TOKEN" in one for one in unit.values.get("Environment", []))


def test_the_files_that_a_unit_reads_are_named_at_its_top(unit: Unit) -> None:
    head, _, body = unit.text.partition("\n[Unit]\n")
    files = {Path(one).name for one in re.findall(r"/etc/paceline/%i/([\w.-]+)", body)}
    assert files
    assert all(name in head for name in files), files


def test_the_user_of_the_units_is_made(unit: Unit) -> None:
    users = re.findall(r"^u (\S+)", (SYSTEMD / "paceline.conf").read_text(), re.M)
    assert [unit.one("User")] == users
    assert unit.one("Group") == unit.one("User")


def test_a_unit_has_no_more_rights_than_it_needs(unit: Unit) -> None:
    assert unit.one("CapabilityBoundingSet") == ""
    for name in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictSUIDSGID", "RestrictNamespaces"):
        assert unit.one(name) == "yes"
    assert unit.one("ProtectSystem") == "strict"
    if "scheduler" in unit.command:
        assert unit.one("PrivateDevices") == "yes"
    else:  # GPUs, and a place for compiled kernels
        assert unit.one("DevicePolicy") == "closed"
        assert unit.one("Environment") == f"HOME=%C/{unit.one('CacheDirectory')}"


def test_there_is_a_unit_for_a_stack_and_for_each_service() -> None:
    assert UNITS.keys() == {STACK, "paceline-executor@.service", "paceline-scheduler@.service"}
