"""Counts and logs failed calls and administrators' calls, at a bounded rate of log lines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor

from service_kit.logs import Log

log = Log(__name__)

INTERVAL_S = 10.0
"""The first event of a kind is logged at once; its repetitions as one line per interval, with their count."""
MAX_KINDS = 64
"""Kinds of events per interval that are logged apart; further kinds are logged together as "other"."""

_SERIOUS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_OTHER = "other"

_Kind = tuple[str, tuple[tuple[str, str], ...], bool]
"""(event, fields, whether it is logged as a warning)."""


class Audit:
    """The audit log of one service. Not thread-safe: use it on the service's event loop.

    Methods in `contracts` are logged by name, all others as "other", so that callers can't choose labels of
    metrics or words of the log. `count_failed(method, reason)` is called for each call that failed.
    """

    def __init__(self, contracts: Iterable[FileDescriptor], count_failed: Callable[[str, str], None]) -> None:
        self._names = {
            f"/{service.full_name}/{method.name}": method.name
            for contract in contracts
            for service in contract.services_by_name.values()
            for method in service.methods
        }
        self._count_failed = count_failed
        self._pending: Counter[_Kind] = Counter()  # repetitions, which the interval's end logs; 0: none yet
        self._flushing: asyncio.TimerHandle | None = None

    def failed(self, identity: str, method: str, code: grpc.StatusCode, reason: str) -> None:
        """Record that a call of this identity ended with this status. `method` is the full name, as sent."""
        name = self._names.get(method, _OTHER)
        self._count_failed(name, reason)
        fields = {"identity": identity, "method": name, "code": code.name, "reason": reason}
        self._add("calls ended with an error", fields, serious=code in _SERIOUS)

    def administered(self, identity: str, method: str) -> None:
        """Record an administrator's permitted call. `method` is the name without its service."""
        self._add("administrator's calls", {"identity": identity, "method": method}, serious=False)

    def _add(self, event: str, fields: dict[str, str], *, serious: bool) -> None:
        """Log the first event of its kind in an interval at once; count the others for the interval's end."""
        kind = event, tuple(fields.items()), serious
        if kind in self._pending:
            self._pending[kind] += 1
        elif len(self._pending) >= MAX_KINDS:
            others = tuple((name, _OTHER) for name in fields)
            self._pending[event, others, serious] += 1
        else:
            self._pending[kind] = 0
            _log(kind, 1)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(INTERVAL_S, self.flush)

    def flush(self) -> None:
        """Log the repetitions of the current interval, and begin another interval if there were any."""
        if self._flushing is not None:
            self._flushing.cancel()
        logged = {kind: count for kind, count in self._pending.items() if count}
        for kind, count in logged.items():
            _log(kind, count)
        self._pending = Counter(dict.fromkeys(logged, 0))
        self._flushing = None
        if logged:
            self._flushing = asyncio.get_running_loop().call_later(INTERVAL_S, self.flush)


def _log(kind: _Kind, count: int) -> None:
    event, fields, serious = kind
    write = log.warning if serious else log.info
    given: dict[str, Any] = dict(fields)
    write(event, **given, count=count)
