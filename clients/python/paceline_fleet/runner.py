"""Runs one stack of a fleet on this node, with the supervisor that `paceline serve` is. Knows no Ray.

The processes are children of this process and end with it: their standard input ends, and they drain.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.cli.serve import QUIET
from paceline.cli.served_model import default_sampling
from paceline.cli.stack import Stack, StackConfig, starting
from paceline.cli.supervisor import ChildFailed
from paceline.directory import LOOK_EVERY_S
from paceline.scheduler.v1 import scheduler_pb2 as pb

from paceline_fleet.announcer import Announcer, own_entry
from paceline_fleet.node_models import model_on_node
from paceline_fleet.roster import StackReport
from paceline_fleet.spec import FleetModel, TlsFiles, TokenFiles
from paceline_fleet.tokens import stack_token

REPORT_S = 1.0
_TOLD_S = 10.0
_HANDOVER_S = LOOK_EVERY_S + 2.0
"""Time in which clients can hear of a stack from those that it replaces, before these end."""
_MAX_LINES = 200
_STATES = {
    number: pb.SchedulerState.Name(number).removeprefix("SCHEDULER_STATE_").lower().replace("_", " ")
    for number in pb.SchedulerState.values()
}

Report = Callable[[Mapping[str, Any], list[str]], Awaitable[Mapping[str, Any]]]
"""Sends a StackReport's fields and new log lines to the roster; its answer. May raise anything."""


@dataclass(frozen=True, slots=True)
class StackLaunch:
    """What a stack of a fleet is given: names of files, and no token."""

    model: FleetModel
    address: str  # loopback, ip or hostname
    ports: range
    insecure: bool
    tokens: TokenFiles
    tls: TlsFiles | None

    @classmethod
    def of(cls, model: Mapping[str, Any], common: Mapping[str, Any]) -> StackLaunch:
        """From plain values: a model's fields, and `FleetSpec.common`."""
        first, _, last = (common["ports"] or "0--1").partition("-")
        return cls(
            model=FleetModel.model_validate(model),
            address=common["address"],
            ports=range(int(first), int(last) + 1),
            insecure=common["insecure"],
            tokens=TokenFiles.model_validate(common["tokens"]),
            tls=TlsFiles.model_validate(common["tls"]) if common["tls"] else None,
        )

    def config(self, path: Path | None, node_ip: str, port: int, executor_port: int) -> StackConfig:
        """The stack to start, with the model's path on this node.

        The executor sees the GPUs that Ray gave to this process, by CUDA_VISIBLE_DEVICES, which it inherits.
        """
        model = self.model
        host = "127.0.0.1" if self.address == "loopback" else node_ip
        name = {"loopback": host, "ip": node_ip}.get(self.address) or socket.getfqdn()
        drain = f"--drain-timeout-s={model.drain_timeout_s}"
        return StackConfig(
            backend=model.backend,
            model=path,
            host=host,
            port=port,
            executor_port=executor_port,
            executor_options=(
                *_LOGS,
                drain,
                *default_sampling(model.backend, model.model),
                *model.flags("executor"),
            ),
            scheduler_options=(
                *_LOGS,
                drain,
                f"--advertise={f'[{name}]' if ':' in name else name}:{port}",
                f"--tokens-file={self.tokens.clients}",
                *(self.tls.flags if self.tls else ()),
                *(("--insecure",) if self.insecure else ()),
                *model.flags("scheduler"),
            ),
        )


_LOGS = ("--log-level", "warning", *QUIET[2:])


class StackRunner:
    """One stack: `start`, then `check` now and then, `stop` at the end. `about`: who and where it is."""

    def __init__(self, launch: StackLaunch, about: StackReport, node_ip: str, report: Report) -> None:
        self._launch, self._about, self._node_ip, self._report = launch, about, node_ip, report
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._cleanup = AsyncExitStack()
        self._stack: Stack | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._reporter: asyncio.Task[None] | None = None
        self._others: list[tuple[str, str]] = []
        self._told, self._replaces = asyncio.Event(), False
        tls = launch.tls
        self._announcer = Announcer(
            tls.ca if tls else None, lambda line: self._say("fleet", line), insecure=launch.insecure
        )

    async def start(self) -> None:
        """Start the processes and wait until they serve. Raises ChildFailed, reported before."""
        self._reporter = asyncio.create_task(self._report_forever())
        try:
            host = "127.0.0.1" if self._launch.address == "loopback" else self._node_ip
            ports = [
                self._cleanup.enter_context(_reserved(where, self._launch.ports)).getsockname()[1]
                for where in (host, "127.0.0.1")
            ]
            model = self._launch.model
            path = await model_on_node(model.backend, model.model, self._fetching)
            config = self._launch.config(path, self._node_ip, *ports)
            self._stack = await self._cleanup.enter_async_context(starting(config, self._say, self._loading))
        except (ChildFailed, OSError) as error:
            await self._end("failed", str(error))
            raise ChildFailed(str(error)) from None
        except BaseException:
            await self._end("failed", "its start was cancelled")
            raise
        self._about = replace(self._about, reason="")
        self._supervisor = asyncio.create_task(self._stack.supervise())
        with suppress(TimeoutError):  # without a roster there is nobody to report to
            async with asyncio.timeout(_TOLD_S):
                await self._told.wait()
        if self._replaces:  # Serve ends the old ones once this returns
            await asyncio.sleep(_HANDOVER_S)

    def check(self) -> None:
        """Raises ChildFailed if the supervisor has given a process up."""
        if self._supervisor is not None and self._supervisor.done():
            self._supervisor.result()
            raise ChildFailed("the stack has ended")

    async def stop(self) -> None:
        """Let running streams end for up to the drain's time, and stop the processes."""
        self._about = replace(self._about, state="draining")
        if self._supervisor is not None and self._supervisor.done() and not self._supervisor.cancelled():
            await self._end("failed", str(self._supervisor.exception() or "the stack has ended"))
        else:
            await self._end("ended", "it was stopped")

    async def _end(self, state: str, reason: str) -> None:
        try:
            await _cancelled(self._supervisor)
            await self._cleanup.aclose()
        finally:
            await _cancelled(self._reporter)
            await self._announcer.close()
            with suppress(Exception):  # the roster may be gone
                async with asyncio.timeout(REPORT_S):
                    await self._report(
                        asdict(replace(self._about, state=state, reason=reason)), self._new_lines()
                    )

    def _say(self, name: str, line: str) -> None:
        self._lines.append(f"{time.strftime('%H:%M:%S')} {name:>9} {line}")

    def _fetching(self, what: str) -> None:
        self._about = replace(self._about, reason=what)

    def _loading(self, what: str, fraction: float) -> None:
        self._about = replace(self._about, reason=f"{what} ({fraction:.0%})" if fraction else what)

    def _new_lines(self) -> list[str]:
        lines = list(self._lines)
        self._lines.clear()
        return lines

    async def _report_forever(self) -> None:
        """Tell the roster and the other schedulers of this stack, each REPORT_S."""
        while True:
            try:
                async with asyncio.timeout(3 * REPORT_S):
                    await self._report_once()
            except Exception as error:  # the roster or a file is not there: the others are as they were
                self._about = replace(self._about, reason=f"{type(error).__name__}: {error}"[:200])
            await asyncio.sleep(REPORT_S)

    async def _report_once(self) -> None:
        entry = None
        if self._stack is not None:
            entry = await own_entry(self._stack.socket, self._stack.admin_security)
            self._about = replace(self._about, **_figures(self._stack, entry, self._about))
        with suppress(Exception):  # Ray's head or the roster's node may be gone for long
            async with asyncio.timeout(REPORT_S):
                answer = await self._report(asdict(self._about), self._new_lines())
                self._about = replace(self._about, slot=int(answer["slot"]))
                self._replaces = bool(answer.get("replaces"))
                self._others = [(str(address), str(name)) for address, name in answer["others"]]
        if entry is not None and self._about.slot >= 0:
            token = await asyncio.to_thread(stack_token, self._launch.tokens, self._about.slot)
            await self._announcer.announce(entry, self._others, token)
            self._told.set()


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _figures(stack: Stack, entry: pb.SchedulerEntry | None, about: StackReport) -> dict[str, Any]:
    """The fields of a report that change while a stack runs."""
    processes = {child.name: child.pid for child in stack.children if child.pid is not None}
    found = {"processes": processes, "restarts": sum(child.starts - 1 for child in stack.children)}
    if entry is None:
        return {**found, "state": about.state if about.state == "draining" else "no answer"}
    state = about.state if about.state == "draining" else _STATES.get(entry.state, "unknown")
    return {
        **found,
        "state": state,
        "reason": "",
        "address": entry.address,
        "tls_name": entry.tls_name,
        "running": entry.load.running,
        "waiting": entry.load.waiting,
        "wait_s": entry.load.predicted_wait_ms / 1000,
    }


def _reserved(host: str, ports: range) -> socket.socket:
    """A bound socket that keeps a port for a service, which listens on it, also while the service restarts.

    It is bound alone, so that no two have one port, and shares it from then on with who sets SO_REUSEADDR, as
    gRPC does; the system gives it to no other. Raises OSError if all of `ports` are taken.
    """
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    for port in ports or (0,):
        one = socket.socket(family)
        try:
            one.bind((host, port))
        except OSError:
            one.close()
            continue
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return one
    raise OSError(f"all ports from {ports.start} to {ports.stop - 1} are taken on this node")


def own_report(stack: str, model: str, version: str, node: str) -> StackReport:
    """The first report of a stack in this process."""
    return StackReport(stack, model, version, node, socket.gethostname(), os.getpid())
