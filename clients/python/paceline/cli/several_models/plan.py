"""The models to serve, what each needs of memory, and whether that fits: known before any is loaded."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.cli.child_run import send_signal
from paceline.cli.gateway_launch import GatewayLaunch
from paceline.cli.services import command
from paceline.cli.stack import StackConfig, demands_token
from paceline.cli.supervisor import ChildFailed

_SCHEDULER_BYTES = 176 << 20  # of a scheduler and its tokenizer process
_SERVE_BYTES, _GATEWAY_BYTES = 160 << 20, 112 << 20  # of this process and two routers; of one gateway
_PLAN_TIMEOUT_S = 300.0  # a process that a signal has stopped would hold up all loads
_GB = 1e9


@dataclass(frozen=True, slots=True)
class ModelLaunch:
    """A model to serve under a name, by a stack of its own on free ports of loopback."""

    name: str
    stack: StackConfig
    on_demand: bool = False  # loaded when it is asked for, not at the start
    adapters: tuple[str, ...] = ()
    keep_alive_s: float | None = None  # put away when it wasn't used for so long; None: only for another

    @property
    def executors(self) -> list[list[str]]:
        """The settings of its executors: of the one that serves, and of the one that drafts."""
        launches = [self.stack.executor, *([self.stack.draft] if self.stack.draft else [])]
        return [one.settings for one in launches]


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    """The models, and the address that leads to all. `router_options` are further flags of the router."""

    models: tuple[ModelLaunch, ...]
    host: str
    port: int
    router_options: tuple[str, ...] = ()
    client_token: str = field(default="", repr=False)
    gateway: GatewayLaunch | None = None
    memory: int | None = None  # bytes of all processes together; None: no bound

    @property
    def demands_token(self) -> bool:
        """Whether clients must send one."""
        return bool(self.client_token) or demands_token(self.router_options)

    @property
    def room(self) -> int | None:
        """Bytes that all models together may take; None: no bound."""
        gateways = self.gateway.processes if self.gateway else 0
        return None if self.memory is None else self.memory - _SERVE_BYTES - gateways * _GATEWAY_BYTES

    def check_fits(self, needs: Mapping[str, int]) -> None:
        """Raises ChildFailed that names a model which can't be loaded beside those that stay loaded."""
        room = self.room
        if room is None:
            return
        stays = {one.name: needs.get(one.name, 0) for one in self.models if not one.on_demand}
        for name, need in needs.items():
            others = {other: size for other, size in stays.items() if other != name}
            if need + sum(others.values()) > room:
                beside = "".join(f", {other} {size / _GB:.2f} GB" for other, size in others.items())
                raise ChildFailed(
                    f"model {name} needs {need / _GB:.2f} GB, and of --memory {self.memory_text} it can have"
                    f" {(room - sum(others.values())) / _GB:.2f} GB (the rest: serve and its router"
                    f" {((self.memory or 0) - room) / _GB:.2f} GB{beside}); less kv-memory makes it smaller"
                )

    @property
    def memory_text(self) -> str:
        """The bound as a person reads it."""
        return f"{(self.memory or 0) / _GB:.2f} GB"


async def planned(models: Sequence[ModelLaunch]) -> tuple[dict[str, int], dict[str, str]]:
    """Bytes that models need by name, and of those that could not be planned the reasons."""
    process = await asyncio.create_subprocess_exec(
        *command("executor_service.memory_forecast"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends it
    )
    asked = [(one.name, settings) for one in models for settings in one.executors]
    lines = "".join(json.dumps(settings) + "\n" for _, settings in asked)
    try:
        async with asyncio.timeout(_PLAN_TIMEOUT_S):
            output, _ = await process.communicate(lines.encode())
    except TimeoutError:
        output = b""
    finally:
        send_signal(process, signal.SIGKILL)
    needs = {one.name: _SCHEDULER_BYTES for one in models}
    problems: dict[str, str] = {}
    answers = [json.loads(line) for line in output.splitlines()]
    answers += [{"problem": "its memory could not be planned"}] * (len(asked) - len(answers))
    for (name, _), answer in zip(asked, answers, strict=True):
        if "problem" in answer:
            problems[name] = answer["problem"]
            needs.pop(name, None)
        elif name in needs:
            needs[name] += answer["bytes"]
    return needs, problems
