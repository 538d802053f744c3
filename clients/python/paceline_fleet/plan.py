"""What `fleet up` and `fleet update` would change, and how many stacks a load needs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline_fleet.spec import FleetModel, FleetSpec, Replicas

DOWN_AT = 0.7
"""Part of the target that the load may be of one stack less, for a stack to end: hysteresis."""


@dataclass(frozen=True, slots=True)
class StackLoad:
    """Sequences of one stack, and the predicted wait of a request that came now."""

    running: int
    waiting: int
    wait_s: float = 0.0


def desired_stacks(loads: Sequence[StackLoad], current: int, replicas: Replicas) -> int:
    """The number of stacks for a load, within `replicas`; `current`: those that are wanted now.

    As many as keep each below `target`, and one more where a request would wait longer than `max_wait_s`. One
    stack at most ends at a time, and only if the others stay below DOWN_AT of the target and nobody waits.
    """
    total = sum(load.running + load.waiting for load in loads)
    needed = max(1, math.ceil(total / replicas.target))
    late = any(load.wait_s > replicas.max_wait_s for load in loads)
    if late:
        needed = max(needed, current + 1)
    if needed < current:
        fits = not late and total <= DOWN_AT * replicas.target * (current - 1)
        needed = current - 1 if fits else current
    return min(max(needed, replicas.min), replicas.max)


def changes(old: FleetSpec | None, new: FleetSpec) -> list[str]:
    """What differs between the fleet as it was applied last and a new spec, a line each; empty: nothing."""
    if old is None:
        lines = [f"start the fleet {new.fleet} {_where(new)}"]
        return lines + [f"+ {model.name}: {_stacks(model)} of {_served(model)}" for model in new.models]
    lines = []
    if old.ray != new.ray:
        lines.append(f"refused: the fleet is {_where(old)}; `paceline fleet down` first to move it")
    before = {model.name: model for model in old.models}
    for model in new.models:
        was = before.pop(model.name, None)
        if was is None:
            lines.append(f"+ {model.name}: {_stacks(model)} of {_served(model)}")
            continue
        if was.replicas != model.replicas:
            lines.append(f"~ {model.name}: {_stacks(was)} -> {_stacks(model)}")
        if (was.cpus, was.gpus, was.labels, was.per_node) != (
            model.cpus, model.gpus, model.labels, model.per_node,
        ):  # fmt: skip
            lines.append(f"~ {model.name}: all stacks are placed anew: {_needs(was)} -> {_needs(model)}")
        elif old.version_of(was) != new.version_of(model):
            order = "new stacks first, where there is room" if model.surge else "old stacks first"
            lines.append(f"~ {model.name}: all stacks are replaced, {order}: {_difference(was, model)}")
        elif was.surge != model.surge:
            lines.append(f"~ {model.name}: surge {was.surge} % -> {model.surge} %")
    return lines + [f"- {name}: all its stacks drain and end" for name in before]


def _where(spec: FleetSpec) -> str:
    return f"on the Ray cluster at {spec.ray.address}" if spec.ray else "on this machine, on a Ray of its own"


def _stacks(model: FleetModel) -> str:
    low, high = model.replicas.min, model.replicas.max
    count = str(low) if low == high else f"{low} to {high}"
    return f"{count} stack{'' if count == '1' else 's'}"


def _served(model: FleetModel) -> str:
    return f"{model.model or ('the default model' if model.backend == 'torch' else model.backend)}"


def _needs(model: FleetModel) -> str:
    gpus = f", {model.gpus} GPU{'s' if model.gpus > 1 else ''}" if model.gpus else ""
    labels = "".join(f", {name}={value}" for name, value in model.labels.items())
    nodes = f", at most {model.per_node} a node" if model.per_node else ""
    return f"{model.cpus:g} CPU{gpus}{labels}{nodes}"


def _difference(was: FleetModel, model: FleetModel) -> str:
    fields = ("backend", "model", "executor", "scheduler", "drain_timeout_s")
    found = [
        f"{name} {getattr(was, name)!s} -> {getattr(model, name)!s}"
        for name in fields
        if getattr(was, name) != getattr(model, name)
    ]
    return "; ".join(found) or "address, ports, tokens or TLS files"
