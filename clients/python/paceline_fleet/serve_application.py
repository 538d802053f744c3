"""The Serve application of a fleet: one deployment a model, whose replicas are stacks, and the roster.

A stack is on one node because it is one actor, which takes the CPUs and GPUs of all its processes: Ray tells
it which GPUs are its own, and Serve can bound the stacks of a node, which it can't beside placement groups.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve._private import replica as serve_replica
from ray.serve.config import ProxyLocation
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatusOverview

from paceline_fleet.autoscaling import autoscaling_config
from paceline_fleet.roster import Roster, StackReport
from paceline_fleet.runner import StackLaunch, StackRunner, own_report
from paceline_fleet.spec import FleetModel, FleetSpec

ROSTER = "roster"
_HEALTH_S = 1.0
_STOP_S = 20.0
"""Time beyond the drain for a stack's processes to end."""
_STARTS = 4
"""Starts of a stack, with growing waits between them, after which its model's deployment has failed."""


_add_port = serve_replica.add_port_to_grpc_server


def _on_the_nodes_address(server: Any, address: str) -> int:
    """Open the port of calls between replicas on the node's own address; Serve has it on all."""
    host = ray.util.get_node_ip_address()
    here = f"[{host}]:0" if ":" in host else f"{host}:0"
    return int(_add_port(server, here if address == "[::]:0" else address))


serve_replica.add_port_to_grpc_server = _on_the_nodes_address  # in replicas, which import this module
logging.getLogger("ray.serve").setLevel(logging.WARNING)  # its INFO lines would be among a command's output


class FleetStack:
    """A replica: a stack on this node."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: Mapping[str, Any], common: Mapping[str, Any], version: str
    ) -> None:
        replica, here = serve.get_replica_context(), ray.get_runtime_context()
        about = own_report(replica.replica_tag, model["name"], version, here.get_node_id())
        self._roster: DeploymentHandle[Any] = serve.get_deployment_handle(ROSTER, replica.app_name)
        launch = StackLaunch.of(model, common)
        self._runner = StackRunner(launch, about, ray.util.get_node_ip_address(), self._report)
        self._load = about
        await self._runner.start()

    async def _report(self, report: Mapping[str, Any], lines: list[str]) -> Mapping[str, Any]:
        self._load = StackReport.of(report)
        answer: Mapping[str, Any] = await self._roster.report.remote(report, lines)
        return answer

    async def check_health(self) -> None:
        """Called by Serve: raises if the stack's processes can't be kept running."""
        self._runner.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve: what the number of stacks follows."""
        load = self._load
        return {"running": float(load.running), "waiting": float(load.waiting), "wait_s": load.wait_s}

    async def __del__(self) -> None:  # Serve awaits it when the replica is to stop
        if hasattr(self, "_runner"):
            await self._runner.stop()


class RosterActor:
    """The one replica that keeps the roster. `_stacks`: bound, so that they belong to this application."""

    def __init__(self, *_stacks: object) -> None:
        self._roster = Roster(0, time.monotonic())

    def reconfigure(self, config: Mapping[str, int]) -> None:
        """Called by Serve with the spec's number of slots."""
        self._roster.slots = config["slots"]

    async def report(self, report: Mapping[str, Any], lines: list[str]) -> dict[str, Any]:
        """See Roster.report."""
        return self._roster.report(StackReport.of(report), lines, time.monotonic())

    async def listing(self) -> dict[str, Any]:
        """See Roster.listing."""
        return self._roster.listing(time.monotonic())

    async def lines(self, stack: str) -> list[tuple[str, str]]:
        """See Roster.lines."""
        return self._roster.lines(stack)


def application(spec: FleetSpec) -> serve.Application:
    """The application that a spec describes."""
    stacks = [_stacks(spec, model) for model in spec.models]
    roster = serve.deployment(RosterActor).options(  # type: ignore[attr-defined]
        _internal=True,  # Serve's own versions change with each deployment, and replace all replicas
        name=ROSTER,
        version="1",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,
        user_config={"slots": spec.slots},
    )
    return roster.bind(*stacks)  # type: ignore[no-any-return]


def _stacks(spec: FleetSpec, model: FleetModel) -> serve.Application:
    resources: dict[str, Any] = {"num_cpus": model.cpus, "num_gpus": model.gpus}
    if model.labels:
        resources["label_selector"] = dict(model.labels)
    options: dict[str, Any] = {
        "name": model.name,
        "version": spec.version_of(model),
        "ray_actor_options": resources,
        "health_check_period_s": _HEALTH_S,
        "graceful_shutdown_timeout_s": model.drain_timeout_s + _STOP_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": _STARTS * model.replicas.max,
        "max_surge_percent": model.surge,
    }
    if model.per_node is not None:
        options["max_replicas_per_node"] = model.per_node
    scaling = autoscaling_config(model.replicas)
    options |= {"num_replicas": model.replicas.min} if scaling is None else {"autoscaling_config": scaling}
    plain = model.model_dump(mode="json")
    deployed = serve.deployment(FleetStack).options(_internal=True, **options)  # type: ignore[attr-defined]
    return deployed.bind(plain, spec.common(), spec.version_of(model))  # type: ignore[no-any-return]


def apply(spec: FleetSpec) -> None:
    """Have Serve bring about what the spec says, and return at once. Needs `ray.init`."""
    serve.start(proxy_location=ProxyLocation.Disabled)
    target = serve.RunTarget(application(spec), name=spec.fleet, route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)


def end(fleet: str, *, alone: bool) -> None:
    """Drain and stop a fleet's stacks; `alone`: and Serve, which has no other application."""
    serve.delete(fleet)
    if alone:
        serve.shutdown()


def overview(fleet: str) -> ApplicationStatusOverview | None:
    """What Serve says of the fleet; None if it is not there."""
    return serve.status().applications.get(fleet)


def ask(fleet: str, question: str, *arguments: str, timeout_s: float = 5.0) -> Any:
    """The roster's answer. Raises what Serve raises, TimeoutError included, where it is not there."""
    handle = serve.get_deployment_handle(ROSTER, fleet)
    return getattr(handle, question).remote(*arguments).result(timeout_s=timeout_s)
