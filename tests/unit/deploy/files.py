"""The files of deploy/, parsed, and stand-ins for the files that they expect on the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from service_kit.settings import ServiceSettings

from executor_service.config import ExecutorConfig
from scheduler_service.config import SchedulerSettings
from tests.support.checkout import ROOT

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
BASE = KUBERNETES / "base"
AUTOSCALING = KUBERNETES / "autoscaling"
SYSTEMD = DEPLOY / "systemd"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
DOCKERFILE = DEPLOY / "Dockerfile"
USER = 65532
"""The user of both images, by number, so that Kubernetes can tell that it is not root."""

SERVICES: dict[str, type[ServiceSettings]] = {"executor": ExecutorConfig, "scheduler": SchedulerSettings}

_PLACES = re.compile(r"(?<![\w./-])/(?:etc/paceline|models|model|srv/models|credentials)\b[\w./-]*")
_TLS = ROOT / "tests" / "support" / "tls"
_HASH = "0c1c0056c97ccb9fd1b3f163a8d8c9e26f8f3ea8281405b8c0d9602565ebc1ce"
_STAND_INS = {
    "tls.crt": (_TLS / "server.pem").read_text(),
    "tls.key": (_TLS / "server.key").read_text(),
    "client.crt": (_TLS / "client.pem").read_text(),
    "client.key": (_TLS / "client.key").read_text(),
    "client-ca.crt": (_TLS / "ca.pem").read_text(),
    "executor-ca.crt": (_TLS / "ca.pem").read_text(),
    "token": "sesame\n",
    "executor-token": "sesame\n",
    "tokens.yaml": f'- {{name: "alice", sha256: "{_HASH}"}}\n',
}


def documents(path: Path) -> list[dict[str, Any]]:
    """All documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text()))


def manifests() -> dict[str, dict[str, Any]]:
    """Kubernetes' objects by kind; all are called paceline, so a kind has one."""
    folders = (BASE, AUTOSCALING)
    found = [one for folder in folders for path in sorted(folder.glob("*.yaml")) for one in documents(path)]
    objects = [one for one in found if one["kind"] != "Kustomization"]
    by_kind = {one["kind"]: one for one in objects}
    assert len(by_kind) == len(objects)
    return by_kind


class Machine:
    """Stand-ins, below `root`, for the files that a deployment expects; `settings` has its *.yaml files."""

    def __init__(self, root: Path, settings: Path | None = None) -> None:
        self._root, self._settings = root, settings

    def here(self, text: str) -> str:
        """The text with the paths of stand-ins, which are made."""
        return _PLACES.sub(lambda found: str(self._made(found[0])), text)

    def parse(self, service: str, flags: list[str]) -> Any:
        """The settings that a service would have; fails as the service would."""
        given = [self.here(flag) for flag in flags]
        try:
            return SERVICES[service].from_command_line(given, service)
        except SystemExit as error:
            raise AssertionError(f"{service} {' '.join(flags)}: refused") from error

    def _made(self, path: str) -> Path:
        place = self._root / path.lstrip("/")
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch(0o600)  # so that settings may name their own file
            content = _STAND_INS.get(place.name, "")
            if place.name in ("executor.yaml", "scheduler.yaml") and self._settings is not None:
                content = self.here((self._settings / place.name).read_text())
            place.write_text(content)
        return place


def seconds(duration: str) -> float:
    """Seconds of compose's and systemd's durations, as 150s or 150."""
    return float(duration.removesuffix("s"))


def unsafe_warnings(settings: Any) -> list[str]:
    """Warnings of a service at its start, but for that of its metrics port, which a network policy closes."""
    return [one for one in settings.security_warnings() if "metrics port" not in one]


def has_no_rights(container: Mapping[str, Any]) -> bool:
    """Whether a container of compose can neither write its own files nor gain rights."""
    hardened = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}
    return all(container.get(name) == value for name, value in hardened.items())
