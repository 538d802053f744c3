"""The doctor of a fleet names what is wrong, each with what to do, and nothing where all is well."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline_fleet.doctor import RayReport, problems
from paceline_fleet.roster import StackReport
from paceline_fleet.spec import FleetSpec
from paceline_fleet.tokens import make_tokens


def test_a_healthy_fleet_has_no_problem_and_each_that_it_has_is_named(tmp_path: Path) -> None:
    model = {"name": "small", "backend": "oracle", "replicas": 2, "cpus": 2}
    spec = FleetSpec.model_validate({"fleet": "chat", "home": tmp_path, "models": [model]})
    make_tokens(spec)
    secret = tmp_path / "ray-token"
    secret.touch(0o600)
    ray = RayReport(["127.0.0.1"], 4, 0, keeps_state=True, encrypts=False, token_file=secret)
    stacks = [StackReport(name, "small", "1", "node", "host", 1, "serving") for name in "ab"]

    def found(ray: RayReport = ray, *stacks: StackReport, ended: tuple[StackReport, ...] = ()) -> list[str]:
        listing: dict[str, Any] = {"stacks": [*map(asdict, stacks)], "ended": [*map(asdict, ended)]}
        return problems(spec, ray, listing)

    assert found(ray, *stacks) == []
    [listens, forgets, room] = found(replace(ray, nodes=["10.0.0.1"], cpus=3, keeps_state=False), *stacks)
    assert "without TLS on 10.0.0.1" in listens
    assert "memory alone" in forgets
    assert room == "the stacks may need 4 CPUs, and the nodes have 3"
    lost = replace(stacks[1], state="failed", reason="no model")
    assert found(ray, replace(stacks[0], restarts=3), ended=(lost,)) == [
        "small: 1 of 2 stacks serve",
        "small a: its processes were started again 3 times",
        "small: the last stack that failed: no model",
    ]
    secret.chmod(0o644)
    assert found(ray, *stacks) == [f"every user of this machine may read {secret}: chmod 600"]
    secret.unlink()
    assert found(ray, *stacks) == [f"{secret} is missing on this machine"]
