"""Calls that are read and not queued yet: what each waits for, and since when."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc.aio

from scheduler_service.core.wait_report import SLOW_S, Phase, WaitReport
from scheduler_service.core.waiting.reasons import WaitReason, WaitSums
from scheduler_service.streams.request import scoped_id

_CAME_AT: ContextVar[float | None] = ContextVar("came_at", default=None)


def call_came() -> None:
    """Note when this task's call came: before it waits for its turn."""
    _CAME_AT.set(time.monotonic())


class ArrivingCall:
    """One call. Its phases are those of `core.request.Request`."""

    def __init__(self) -> None:
        """Made when its message is read; it came when `call_came` says, or now."""
        now = time.monotonic()
        came_at = _CAME_AT.get()
        self.arrival = now if came_at is None else came_at
        self._phases = [(WaitReason.CALLERS_TURN, self.arrival), (WaitReason.TOKENIZING, now)]

    @property
    def phases(self) -> tuple[tuple[WaitReason, float], ...]:
        """What it has waited for, and from when on."""
        return tuple(self._phases)

    @property
    def reason(self) -> WaitReason:
        """What it waits for."""
        return self._phases[-1][0]

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A context manager: within the block its grammar is compiled."""
        self._phases.append((WaitReason.GRAMMAR_COMPILING, time.monotonic()))
        yield
        self._phases.append((WaitReason.TOKENIZING, time.monotonic()))

    def report(self, request_id: str, identity: str, labels: Mapping[str, str], now: float) -> WaitReport:
        """Where it is; its sums are up to `now`."""
        sums = WaitSums()
        ends = [*(began for _, began in self._phases[1:]), now]
        for (reason, began), ended in zip(self._phases, ends, strict=True):
            sums.add(reason, ended - began)
        return WaitReport(
            scoped_id(identity, request_id),
            identity,
            Phase.ARRIVING,
            self.arrival,
            0.0,
            sums.times(),
            reason=self.reason,
            first_reason=self.reason,
            labels=labels,
        )


class ArrivingCalls:
    """Those whose ids are known: between the check of their fields and their queueing."""

    def __init__(self) -> None:
        # By the core's id: of two calls with the same one, the later.
        self._calls: dict[str, tuple[ArrivingCall, str, str, Mapping[str, str]]] = {}

    @contextmanager
    def entered(
        self, call: ArrivingCall, identity: str, request_id: str, labels: Mapping[str, str]
    ) -> Iterator[None]:
        """A context manager: within the block the call is found by its id."""
        key, entry = scoped_id(identity, request_id), (call, request_id, identity, labels)
        self._calls[key] = entry
        try:
            yield
        finally:
            if self._calls.get(key) is entry:
                del self._calls[key]

    @property
    def identities(self) -> Iterable[str]:
        """Whose calls are here."""
        return (identity for _, _, identity, _ in self._calls.values())

    @property
    def known_ids(self) -> Iterable[str]:
        """The core's ids of the calls here."""
        return self._calls

    def by_reason(self) -> Counter[WaitReason]:
        """How many calls here wait for what. Looks at each once."""
        return Counter(call.reason for call, *_ in self._calls.values())

    def why(self, request_id: str, identity: str) -> WaitReport | None:
        """The identity's call of this id; None if it has none here."""
        entry = self._calls.get(scoped_id(identity, request_id))
        return None if entry is None else _report(entry, time.monotonic())

    def slow(self, identity: str | None) -> Iterable[WaitReport]:
        """The calls that came SLOW_S ago or earlier. identity: whose; None: everybody's."""
        now = time.monotonic()
        for entry in self._calls.values():
            if now - entry[0].arrival > SLOW_S and identity in (None, entry[2]):
                yield _report(entry, now)


def _report(entry: tuple[ArrivingCall, str, str, Mapping[str, str]], now: float) -> WaitReport:
    call, request_id, identity, labels = entry
    return call.report(request_id, identity, labels, now)


_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def deadline_of(context: _Context) -> float | None:
    """The call's deadline on the clock of time.monotonic; None without one."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining
