"""Which calls were refused or failed, and what administrators did: counted, and logged without a flood."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor

from paceline.service.logs import Log

log = Log(__name__)

INTERVAL_S = 10.0
"""What is alike is one line at once, and then one line for all of each further interval."""
MAX_KINDS = 64
"""Lines of an interval; what does not fit is one more line."""

_SERIOUS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_OTHER = "other"

_Kind = tuple[str, tuple[tuple[str, str], ...], bool]
"""Event, fields, and whether it is serious."""


class Audit:
    """Of one service, for use on its event loop.

    `contracts` have the methods that are named; all others are "other", so that strangers choose neither
    labels of metrics nor words of the log. `count(method, reason)` is called for each call that failed.
    """

    def __init__(self, contracts: Iterable[FileDescriptor], count: Callable[[str, str], None]) -> None:
        self._names = {
            f"/{service.full_name}/{method.name}": method.name
            for contract in contracts
            for service in contract.services_by_name.values()
            for method in service.methods
        }
        self._count = count
        self._pending: Counter[_Kind] = Counter()  # since the last lines; 0: told once in this interval
        self._flushing: asyncio.TimerHandle | None = None

    def failed(self, identity: str, method: str, code: grpc.StatusCode, reason: str) -> None:
        """A call of this identity got this status. `method`: its full name, as sent."""
        name = self._names.get(method, _OTHER)
        self._count(name, reason)
        fields = {"identity": identity, "method": name, "code": code.name, "reason": reason}
        self._add("calls ended with an error", fields, serious=code in _SERIOUS)

    def administered(self, identity: str, method: str) -> None:
        """An administrator's call that is allowed. `method`: its name alone."""
        self._add("administrator's calls", {"identity": identity, "method": method}, serious=False)

    def _add(self, event: str, fields: dict[str, str], *, serious: bool) -> None:
        kind = event, tuple(fields.items()), serious
        if kind in self._pending:
            self._pending[kind] += 1
        elif len(self._pending) >= MAX_KINDS:
            others = tuple((name, _OTHER) for name in fields)
            self._pending[event, others, serious] += 1
        else:
            self._pending[kind] = 0
            _tell(kind, 1)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(INTERVAL_S, self.flush)

    def flush(self) -> None:
        """Tell what has gathered, and begin another interval if there was anything."""
        if self._flushing is not None:
            self._flushing.cancel()
        told = {kind: count for kind, count in self._pending.items() if count}
        for kind, count in told.items():
            _tell(kind, count)
        self._pending = Counter(dict.fromkeys(told, 0))
        self._flushing = None
        if told:
            self._flushing = asyncio.get_running_loop().call_later(INTERVAL_S, self.flush)


def _tell(kind: _Kind, count: int) -> None:
    event, fields, serious = kind
    say = log.warning if serious else log.info
    given: dict[str, Any] = dict(fields)
    say(event, **given, count=count)
