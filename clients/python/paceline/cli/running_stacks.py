"""The stacks that this user's `serve`, `demo` and `bench` have running on this machine, each asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from paceline import errors
from paceline.channel import Link, Security, open_channel
from paceline.cli.scratch import front_files, port_of, stack_directories
from paceline.client import Client
from paceline.responses import lower_name
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class RunningStack:
    """What a stack's scheduler says about itself; None where it does not answer, or demands a token.

    Of several models at one address each is one, loaded or not.
    """

    pid: int  # of the process that keeps the stack running: stop it with SIGTERM
    port: int  # of its scheduler, or of the router of several models
    state: str  # the scheduler's, or why it is not known
    model: str | None = None
    running: int | None = None  # sequences
    waiting: int | None = None
    uptime_s: float | None = None
    detail: str = ""  # of one of several models: why it failed, or what it waits for
    memory_bytes: int | None = None  # the same: planned for it


def running_stacks(token: str) -> Iterator[RunningStack]:
    """The stacks whose processes live. A killed one may leave its directory."""
    found = list(stack_directories())
    of_several = {pid for pid, directory in found if (directory / "router").exists()}
    for pid, directory in found:
        files = front_files(directory)
        port = port_of(files)
        if port is None:  # it is just starting, or has ended
            continue
        if files.port.name == "router":
            yield from _models(pid, port, files.socket, token)
        elif pid not in of_several:
            yield _asked(pid, port, files.socket, token)


def _models(pid: int, port: int, path: Path, token: str) -> Iterator[RunningStack]:
    """Several models at one address, each as its router and, if it is loaded, its scheduler says."""
    security = Security(token=token)
    with open_channel(f"unix:{path}", Link.PUBLIC, security) as channel:
        watch = SchedulerServiceStub(channel).WatchSchedulers
        call = watch(pb.WatchSchedulersRequest(), timeout=_TIMEOUT_S, metadata=security.metadata)
        try:
            entries = list(next(call).entries)
        except grpc.RpcError as error:
            needs_token = isinstance(errors.from_rpc(error), errors.Unauthenticated)
            yield RunningStack(pid, port, "needs a token" if needs_token else "does not answer")
            return
        finally:
            call.cancel()
    for entry in entries:
        state = lower_name(pb.SchedulerState, "SCHEDULER_STATE_", entry.state)
        one = RunningStack(pid, port, state, entry.model)
        if entry.state == pb.SCHEDULER_STATE_SERVING:
            one = _asked(pid, port, path, token, entry.model)
        yield replace(one, detail=entry.detail, memory_bytes=entry.memory_bytes or None)


def _asked(pid: int, port: int, path: Path, token: str, model: str = "") -> RunningStack:
    security = Security(token=token)
    with Client(
        f"unix:{path}", security=security, failover_timeout_s=0, directory="off", model=model
    ) as client:
        try:
            status = client.status(timeout_s=_TIMEOUT_S)
        except errors.Unauthenticated:
            return RunningStack(pid, port, "needs a token")
        except errors.PacelineError:
            return RunningStack(pid, port, "does not answer")
        try:
            name = client.model_info(timeout_s=_TIMEOUT_S).name
        except errors.PacelineError:
            name = None
    return RunningStack(pid, port, status.state, name, status.running, status.waiting, status.uptime_s)
