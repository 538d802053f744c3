"""The images contain what they start, and run as a user without rights."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkout import ROOT
from tests.unit.deploy.files import COMPOSE, DOCKERFILE, KUBERNETES, USER, documents, manifests

TEXT = DOCKERFILE.read_text()
IGNORED = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
STAGES = {
    name: (base, body)
    for base, name, body in re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", TEXT, re.M | re.S)
}
SERVICES = {"executor": "executor_service", "scheduler": "scheduler_service"}


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_starts_its_service_as_a_user_without_rights(service: str) -> None:
    base, body = STAGES[service]
    assert base in ("runtime", "gpu-runtime")
    assert re.findall(r"^USER (\S+)$", body, re.M)[-1] == f"{USER}:{USER}"
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", body, re.M)
    assert entry == f'["tini", "--", "python", "-m", "{SERVICES[service]}"]'
    assert find_spec(SERVICES[service]) is not None


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_has_the_extra_of_its_service(service: str) -> None:
    _, body = STAGES[f"{service}-build"]
    assert f"'.[{service}]'" in body
    assert "--constraint constraints.txt" in body
    assert f"COPY --from={service}-build /opt/paceline" in STAGES[service][1]
    assert service in _project()["optional-dependencies"]


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    copied = [word for line in re.findall(r"^COPY (?!--)(.+) \S+$", TEXT, re.M) for word in line.split()]
    assert copied
    for path in copied:
        assert (ROOT / path).exists()
        assert f"!{path}" in IGNORED
    assert IGNORED[1] == "*"  # all else stays out
    assert {one for one in IGNORED if one.startswith("!")} == {f"!{path}" for path in copied}


def test_the_wheel_is_built_from_what_is_copied() -> None:
    project, wheel = _project(), _pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [project["readme"], *project["license-files"], *wheel["packages"], *wheel["force-include"]]
    copied = [Path(line.removeprefix("!")) for line in IGNORED if line.startswith("!")]
    missing = [path for path in needed if not any(Path(path).is_relative_to(one) for one in copied)]
    assert not missing


def test_all_deployments_run_the_images_of_this_version() -> None:
    tag = _project()["version"]
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    images = [one["image"] for one in (*pod["initContainers"], *pod["containers"])]
    (cluster,) = documents(KUBERNETES / "fleet" / "ray-cluster.yaml")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    images += [one["image"] for group in groups for one in group["template"]["spec"]["containers"]]
    for file in COMPOSE.parent.glob("*.yaml"):
        images += [one["image"] for one in documents(file)[0]["services"].values()]
    images += re.findall(r"-t (\S+)", TEXT)
    images += re.findall(r"-t (\S+)", (ROOT / "docs" / "deploy.md").read_text())
    assert set(images) == {f"paceline-{image}:{tag}" for image in (*SERVICES, "stack", "fleet")}


def _pyproject() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _project() -> Any:
    return _pyproject()["project"]
