"""`paceline fleet`: stacks on the nodes of a Ray cluster, placed, healed and scaled by Ray Serve."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli.common import console, fail, stderr
from paceline.cli.rows import print_aligned
from paceline.extras import installation

if TYPE_CHECKING:
    from paceline_fleet.spec import FleetSpec

fleet = typer.Typer(no_args_is_help=True, help="Run stacks on many machines, with Ray.")
_POLL_S = 0.5
_FORGETS = (
    "This Ray keeps its state in its head's memory alone: if the head is lost, streams go on, but nothing is"
    " healed, and a head that is started again knows nothing of the fleet (docs/fleet.md says what keeps it)."
)
_SETTINGS = {
    "executor": "executor_service.config:ExecutorConfig",
    "scheduler": "scheduler_service.config:SchedulerSettings",
}

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The fleet's YAML file.")]


@fleet.command()
def up(
    spec: SpecFile,
    *,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would change, and change nothing.")] = False,
) -> None:
    """Start a fleet, or bring the running one to what SPEC says.

    A stack is an executor and a scheduler on one node, which Ray Serve places, and starts elsewhere when its
    node is lost. Clients take the address of any one, and learn of the others. Without `ray` in the spec, a
    Ray of its own is started on this machine, on loopback.

    A spec:

        fleet: chat
        models:
          - name: small                # several models are several groups of stacks
            model: Qwen/Qwen3-0.6B     # as `paceline serve MODEL`, on each node; `backend: oracle` needs none
            executor: {kv-memory: 2GiB}   # as -E
            scheduler: {max-running: 64}  # as -S
            replicas: {min: 1, max: 4, target: 32}  # stacks, and sequences of one; or a number
            cpus: 2                    # of a stack; also gpus, labels, per_node, surge, drain_timeout_s

    Beyond one machine: `address: ip` or `hostname`, `tls: {cert: , key: , ca: }`,
    `ray: {address: , token_file: }`, `tokens: {clients: tokens.yaml, stacks: FILE}`. These files lie on every
    node under the same path. Where no tokens are named, they are drawn into the fleet's directory.
    """
    _change(spec, _spec(spec), plan=plan)


@fleet.command()
def update(
    spec: SpecFile,
    *,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would change, and change nothing.")] = False,
) -> None:
    """Bring a running fleet to what SPEC says, as `up` does, which also starts one.

    Stacks whose settings change are replaced, by new ones first where `surge` is not 0. Streams of the old
    ones end there, in `drain_timeout_s` at most. If the new ones can't serve, the old spec is applied again.
    """
    wanted = _spec(spec)
    if _applied(wanted) is None:
        fail(f"the fleet {wanted.fleet} was not started from here: `paceline fleet up {spec}` does")
    _change(spec, wanted, plan=plan)


def _change(spec: Path, wanted: FleetSpec, *, plan: bool) -> None:
    from paceline_fleet import plan as plans
    from paceline_fleet import tokens

    old = _applied(wanted)
    lines = plans.changes(old, wanted)
    for line in lines or ["nothing changes"]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if any(line.startswith("refused") for line in lines):
        raise typer.Exit(1)
    if plan:
        return
    _require_ray()
    if wanted.tokens is None:
        tokens.make_tokens(wanted)
    _connect(wanted, start=True)
    from paceline_fleet import serve_application
    from paceline_fleet.cluster import keeps_state

    if not keeps_state():
        stderr.print(_FORGETS, markup=False, highlight=False, soft_wrap=True)
    serve_application.apply(wanted)
    wanted.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    failed = _wait(wanted)
    if failed:
        back = ""
        if old is not None and lines:  # its stacks are there still, unless surge is 0
            serve_application.apply(old)
            back = _wait(old) or "what was there before serves again"
        fail(f"{failed}{'; ' if back else ''}{back}; `paceline fleet logs {spec}` says more")
    (wanted.directory / "spec.json").write_text(wanted.model_dump_json())
    addresses = sorted(one["address"] for one in _listing(wanted)["stacks"] if one["address"])
    token = "" if wanted.tokens else f" Callers' token: {wanted.directory / 'client-token'}"
    stderr.print(f"Serving at {', '.join(addresses)}.{token}", markup=False, highlight=False, soft_wrap=True)


@fleet.command()
def status(
    spec: SpecFile,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """List a fleet's stacks: where they are, what they do, and why one doesn't serve."""
    wanted = _spec(spec)
    _connect(wanted)
    from paceline_fleet import serve_application

    found = serve_application.overview(wanted.fleet)
    listing = _listing(wanted)
    models = {
        name: {"state": one.status.name, "message": _last_line(one.message)}
        for name, one in (found.deployments.items() if found else ())
        if name != serve_application.ROSTER
    }
    if as_json:
        typer.echo(json.dumps({"fleet": wanted.fleet, "models": models, **listing}))
        return
    rows = [("model", "stack", "node", "state", "address", "running", "waiting", "restarts", "reason")]
    for one in [*listing["stacks"], *listing["ended"]]:
        numbers = (str(one[name]) for name in ("running", "waiting", "restarts"))
        where = (one["model"], one["stack"], one["node"][:8], one["state"], one["address"])
        rows.append((*where, *numbers, one["reason"]))
    print_aligned(console, rows)
    for name, model in models.items():
        if model["message"]:
            console.print(f"{name}: {model['message']}", markup=False, highlight=False, soft_wrap=True)


@fleet.command()
def logs(
    spec: SpecFile,
    stack: Annotated[str, typer.Argument(help="Of this stack alone.", show_default=False)] = "",
) -> None:
    """Print the newest log lines of a fleet's stacks, also of those that are gone."""
    wanted = _spec(spec)
    _connect(wanted)
    from paceline_fleet import serve_application

    for name, line in serve_application.ask(wanted.fleet, "lines", stack):
        console.print(f"{name} {line}", markup=False, highlight=False, soft_wrap=True)


@fleet.command()
def down(spec: SpecFile) -> None:
    """Let streams end for as long as the spec says, and stop a fleet and the Ray that `up` started."""
    wanted = _spec(spec)
    from paceline_fleet.cluster import OwnCluster

    _connect(wanted)
    from paceline_fleet import serve_application

    serve_application.end(wanted.fleet, alone=wanted.ray is None)
    (wanted.directory / "spec.json").unlink(missing_ok=True)
    if wanted.ray is None:
        OwnCluster(wanted.directory).stop()
    console.print(f"{wanted.fleet} is stopped", markup=False, highlight=False)


@fleet.command()
def doctor(spec: SpecFile) -> None:
    """Say what is wrong with a fleet, and what to do. Exits with 1 if anything is."""
    wanted = _spec(spec)
    _connect(wanted)
    from paceline_fleet.cluster import OwnCluster, ray_report
    from paceline_fleet.doctor import problems

    token_file = wanted.ray.token_file if wanted.ray else OwnCluster(wanted.directory).token_file
    found = problems(wanted, ray_report(token_file), _listing(wanted))
    for line in found or ["nothing is wrong"]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if found:
        raise typer.Exit(1)


def _spec(path: Path) -> FleetSpec:
    """The checked spec. Exits with status 2 and a line for each mistake."""
    if find_spec("pydantic_settings") is None:
        fail(f"pydantic-settings is not installed; {installation('ray')}", 2)
    from paceline_fleet.spec import read_spec
    from paceline_fleet.tokens import check_tokens

    try:
        spec = read_spec(path)
        spec.check_files()
        check_tokens(spec)
    except ValueError as error:
        fail(str(error), 2)
    for model in spec.models:
        for service in ("executor", "scheduler"):
            _check_settings(path, spec, model.name, service)  # type: ignore[arg-type]
    return spec


def _check_settings(
    path: Path, spec: FleetSpec, name: str, service: Literal["executor", "scheduler"]
) -> None:
    """Have the service's own settings judge the options, in a process of its own."""
    model = next(one for one in spec.models if one.name == name)
    given = model.flags(service)
    if not given:
        return
    module, _, kind = _SETTINGS[service].partition(":")
    program = f"from {module} import {kind}; import sys; {kind}.from_command_line(sys.argv[1:], 'x')"
    backend = [f"--backend={model.backend}"] if service == "executor" and model.backend != "torch" else []
    done = subprocess.run(
        [sys.executable, "-c", program, *backend, *given], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [line.removeprefix("x: ") for line in done.stderr.strip().splitlines()]
        lines = lines if done.returncode == 2 else lines[-1:]
        fail("\n".join(f"{path}: models.{name}.{service}: {line}" for line in lines), 2)


def _require_ray() -> None:
    if find_spec("ray") is None:
        fail(f"a fleet needs Ray, which is not installed; {installation('ray')}")


def _connect(spec: FleetSpec, *, start: bool = False) -> None:
    """Connect to the fleet's Ray; `start`: one of its own, if the spec names none. Exits with advice."""
    _require_ray()
    import os

    from paceline_fleet.cluster import FleetDownError, OwnCluster, connect, set_up_environment

    own = OwnCluster(spec.directory)
    try:
        if spec.ray is not None:
            connect(spec.ray.address, spec.ray.token_file)
            return
        set_up_environment(own.token_file)
        if start:
            spec.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with console.status("starting Ray"):
                own.start(os.cpu_count() or 1)
        connect(own.address, own.token_file)
    except FleetDownError as error:
        fail(str(error))


def _applied(spec: FleetSpec) -> FleetSpec | None:
    """The spec that was applied last."""
    from paceline_fleet.spec import FleetSpec

    try:
        return FleetSpec.model_validate_json((spec.directory / "spec.json").read_text())
    except (OSError, ValueError):
        return None


def _wait(spec: FleetSpec) -> str:
    """Wait until all stacks serve, and show what happens; the reason if they can't, else empty."""
    from paceline_fleet import serve_application

    shown = ""
    while True:
        found = serve_application.overview(spec.fleet)
        stacks = _listing(spec)["stacks"]
        there = sum(bool(one["address"]) for one in stacks) >= sum(one.replicas.min for one in spec.models)
        if found is not None and found.status.name == "RUNNING" and there:
            return ""
        if found is not None and found.status.name in ("DEPLOY_FAILED", "UNHEALTHY"):
            reasons = [one["reason"] for one in _listing(spec)["ended"] if one["state"] == "failed"]
            return reasons[-1] if reasons else _last_line(found.message)
        counts = {one["state"]: sum(other["state"] == one["state"] for other in stacks) for one in stacks}
        line = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        if line and line != shown:
            stderr.print(f"stacks: {line}", markup=False, highlight=False)
            shown = line
        time.sleep(_POLL_S)


def _listing(spec: FleetSpec) -> dict[str, Any]:
    """What the roster knows; nothing while it isn't there."""
    from paceline_fleet import serve_application

    try:
        found: dict[str, Any] = serve_application.ask(spec.fleet, "listing")
    except Exception:  # Ray's and Serve's are of many kinds: it starts, or its node is gone
        return {"stacks": [], "ended": []}
    return found


def _last_line(message: str) -> str:
    return (message.strip().splitlines() or [""])[-1]
