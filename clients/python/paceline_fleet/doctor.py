"""What is wrong with a fleet, and what to do, from what its Ray and its roster say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bounded_files import others_may_read
from paceline.channel import is_loopback

from paceline_fleet.spec import FleetSpec


@dataclass(frozen=True, slots=True)
class RayReport:
    """What a cluster says of itself: addresses of nodes that live, and their CPUs and GPUs together."""

    nodes: Sequence[str]
    cpus: float
    gpus: float
    keeps_state: bool
    encrypts: bool
    token_file: Path


def problems(spec: FleetSpec, ray: RayReport, listing: Mapping[str, Any]) -> list[str]:
    """A line for each; `listing`: as `Roster.listing` gives it. No line has a token."""
    return [*_files(spec, ray), *_cluster(spec, ray), *_stacks(spec, listing)]


def _files(spec: FleetSpec, ray: RayReport) -> list[str]:
    found = []
    for path in (ray.token_file, spec.token_files.stacks):
        if not path.is_file():
            found.append(f"{path} is missing on this machine")
        elif others_may_read(path):
            found.append(f"every user of this machine may read {path}: chmod 600")
    return found


def _cluster(spec: FleetSpec, ray: RayReport) -> list[str]:
    found = []
    elsewhere = [address for address in ray.nodes if not is_loopback(f"{address}:1")]
    if elsewhere and not ray.encrypts:
        found.append(
            f"Ray listens without TLS on {', '.join(elsewhere)}, and its token runs code: set RAY_USE_TLS=1"
        )
    if not ray.keeps_state:
        found.append(
            "the head's state is in its memory alone: a new head knows nothing (docs/fleet.md, Storage)"
        )
    for what, field, have in (("CPUs", "cpus", ray.cpus), ("GPUs", "gpus", ray.gpus)):
        need = sum(getattr(one, field) * one.replicas.max for one in spec.models)
        if need > have:
            found.append(f"the stacks may need {need:g} {what}, and the nodes have {have:g}")
    return found


def _stacks(spec: FleetSpec, listing: Mapping[str, Any]) -> list[str]:
    found = []
    for model in spec.models:
        stacks = [one for one in listing["stacks"] if one["model"] == model.name]
        serving = sum(one["state"] == "serving" for one in stacks)
        if serving < model.replicas.min:
            found.append(f"{model.name}: {serving} of {model.replicas.min} stacks serve")
        for one in stacks:
            why = f": {one['reason']}" if one["reason"] else ""
            if one["state"] != "serving" or why:
                found.append(f"{model.name} {one['stack']}: {one['state']}{why}")
            if one["restarts"]:
                found.append(
                    f"{model.name} {one['stack']}: its processes were started again {one['restarts']} times"
                )
        failed = [one for one in listing["ended"] if one["model"] == model.name and one["state"] == "failed"]
        if failed:
            found.append(f"{model.name}: the last stack that failed: {failed[-1]['reason']}")
    return found
