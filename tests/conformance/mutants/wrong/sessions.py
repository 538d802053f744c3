"""Sessions, leases and epochs: caught by test_sessions.py."""

from __future__ import annotations

from typing import Any

from executor_service.cache.sequence_store import SequenceStore
from executor_service.cache.session import ClientSession, Sessions
from executor_service.steps.engine import Engine
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def sessions_not_isolated() -> None:
    """a cache id of another session is found"""

    class Leaky(dict[int, Any]):
        def __init__(self, sessions: Sessions) -> None:
            self._sessions = sessions
            super().__init__()

        def get(self, key: int, default: Any = None) -> Any:
            everywhere = [self, *(session.caches for session in self._sessions)]
            return next((caches[key] for caches in everywhere if key in caches), default)

    def open_(original: Any, self: Sessions, *args: Any) -> ClientSession:
        session: ClientSession = original(self, *args)
        session.caches = Leaky(self)
        return session

    wrap(Sessions, "open", open_)


@mutant()
def cache_ids_used_again() -> None:
    """a released cache's id opens a new one"""
    wrap(ClientSession, "used", lambda original, self, cache_id: cache_id in self.caches)


@mutant()
def no_fence() -> None:
    """a replaced session is merely forgotten"""
    wrap(Sessions, "remove", lambda original, self, session, *, fence: original(self, session, fence=False))


@mutant()
def leases_never_end() -> None:
    """nobody's caches are released for silence"""
    wrap(Engine, "expire", lambda original, self: None)


@mutant()
def heartbeats_ignored() -> None:
    """asking for a session's status does not renew its lease"""
    wrap(
        Sessions,
        "get",
        lambda original, self, session_id, caller: (
            self.find(session_id, caller) or original(self, session_id, caller)
        ),
    )


@mutant()
def epoch_ignored() -> None:
    """a request meant for another life of the executor is served"""
    wrap(SequenceStore, "check_epoch", lambda original, self, epoch: None)
