"""`SequenceStore`: all cached sequences, the sessions that own them, their pages, and the ops on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from service_kit.clock import RunningClock

from executor_service.adapters.store import AdapterStore, no_adapters
from executor_service.cache.kv_cache import KvCache
from executor_service.cache.sequence import CachedSequence
from executor_service.cache.session import ClientSession, Leases, Quota, Sessions
from executor_service.contract.grammar import ReplayUnfinished
from executor_service.contract.limits import Limits
from executor_service.contract.plan import (
    CacheView,
    Fork,
    Op,
    OpResult,
    Reason,
    Refusal,
    Release,
    RequestRefused,
    Truncate,
)
from executor_service.grammar.replays import Replays


class Expired(NamedTuple):
    """Numbers of sessions and sequences released because their leases had run out."""

    sessions: int
    owned: int  # sequences of these sessions
    shared: int  # sequences of session 0, which have leases of their own


class SequenceStore:
    """Sequences by session and cache id. Changed by the device thread only, except `draining`."""

    def __init__(
        self,
        limits: Limits,
        epoch: int,
        leases: Leases | None = None,
        clock: Callable[[], float] | None = None,
        adapters: AdapterStore | None = None,
        replay_clock: Callable[[], float] | None = None,
    ) -> None:
        """`replay_clock`: by which replays of outputs are limited, as of `ReplayBudget`."""
        self.limits, self.epoch = limits, epoch
        self.leases = leases or Leases()
        self.clock = clock or RunningClock(time.monotonic)
        self.pages = KvCache(limits.total_pages, limits.page_size)
        self.adapters = adapters or no_adapters()
        self.replays = Replays(replay_clock, self.clock)
        self.sessions = Sessions(
            self.leases.default_s,
            limits.max_sessions,
            self.clock,
            limits.max_sessions_per_caller,
            Quota(limits.max_default_pages, limits.max_default_sequences),
        )
        self.count = 0  # sequences of all sessions
        self.draining = False  # True: no sequence is opened any more; set by any thread

    def check_epoch(self, epoch: int) -> None:
        """Raises RequestRefused when a request names another epoch than this executor's. Any thread."""
        if epoch not in (0, self.epoch):
            raise RequestRefused(Reason.EPOCH, f"header.epoch: {epoch} is over, it is {self.epoch}")

    def add(self, session: ClientSession, cache_id: int, sequence: CachedSequence) -> None:
        """Add a sequence, and with it a hold on its adapter.

        Its id is unused, and there are fewer than `limits.max_sequences` (not checked).
        """
        session.caches[cache_id] = sequence
        self.count += 1
        if sequence.automaton is not None:
            self.replays.taken(sequence.automaton)

    def take_back(self, session: ClientSession, cache_id: int) -> None:
        """Undo `add`, so that the id can be used again. The sequence's pages have been released."""
        sequence = session.caches.pop(cache_id)
        self.adapters.drop(sequence.adapter)
        self.count -= 1
        if sequence.automaton is not None:
            self.replays.keep(session, sequence.automaton, sequence.output.copy())

    def apply(self, session: ClientSession, op: Op | Refusal, now_s: float) -> OpResult:
        """Carry out one op. An op that is refused changes nothing."""
        if isinstance(op, Refusal):
            return OpResult(refusal=op)
        if isinstance(op, Release):
            return OpResult(released=sum(self._release(session, cache_id) for cache_id in op.cache_ids))
        if isinstance(op, Truncate):
            return self._truncate(session, op, now_s)
        return self._fork(session, op, now_s)

    def end(self, session: ClientSession, *, fence: bool) -> int:
        """Release all sequences of a session and forget it; returns the number of sequences.

        No step of the session is in flight. `fence`: refuse its later steps as FENCED.
        """
        released = sum(self._release(session, cache_id) for cache_id in tuple(session.caches))
        self.replays.forget(session)
        self.sessions.remove(session, fence=fence)
        return released

    def expire(self) -> Expired:
        """Release sessions, and sequences of session 0, whose leases have run out."""
        self.replays.expire()
        now_s = self.clock()
        sessions = owned = shared = 0
        for session in self.sessions:
            if session.id:
                if now_s - session.renewed_s > session.lease_s:
                    sessions += 1
                    owned += self.end(session, fence=False)
                continue
            for cache_id, sequence in tuple(session.caches.items()):
                if now_s - sequence.renewed_s > session.lease_s:
                    shared += self._release(session, cache_id)
        return Expired(sessions, owned, shared)

    def views(self, session: ClientSession, cache_ids: Sequence[int]) -> list[CacheView]:
        """The state of these caches of a session, or of all; renews their leases. Skips unknown ids."""
        views = []
        for cache_id in cache_ids or sorted(session.caches):
            if (sequence := session.caches.get(cache_id)) is not None:
                sequence.renewed_s = session.renewed_s
                views.append(
                    CacheView(
                        cache_id,
                        sequence.length,
                        sequence.ids[sequence.length : sequence.known].copy(),
                        sequence.prompt_length,
                        sequence.table.count,
                    )
                )
        return views

    def check(self) -> None:
        """Recount pages, adapters and sequences. Raises LedgerError or AssertionError if a count is wrong."""
        self.pages.check(sequence.table for session in self.sessions for sequence in session.caches.values())
        self.adapters.check(
            sequence.adapter for session in self.sessions for sequence in session.caches.values()
        )
        if self.count != sum(len(session.caches) for session in self.sessions):
            raise AssertionError(f"{self.count} sequences are counted, but the sessions hold another number")

    def _release(self, session: ClientSession, cache_id: int) -> bool:
        """Forget a sequence. If it has a row in flight, the commit finds its block table empty."""
        sequence = session.caches.pop(cache_id, None)
        if sequence is None:
            return False
        self.pages.cut(sequence.table, 0)
        self.adapters.drop(sequence.adapter)
        session.remember_released(cache_id)
        self.count -= 1
        return True

    def _truncate(self, session: ClientSession, op: Truncate, now_s: float) -> OpResult:
        sequence = session.caches.get(op.cache_id)
        if sequence is None:
            return _refused(Reason.CACHE, f"truncate.cache_id: unknown or released cache {op.cache_id}")
        if op.length > sequence.length:
            return _refused(Reason.INVALID, f"truncate.length: at most {sequence.length}, is {op.length}")
        self.pages.cut(sequence.table, op.length)
        sequence.forget_pending(op.length)
        sequence.renewed_s = now_s
        return OpResult(kv_length=op.length)

    def _fork(self, session: ClientSession, op: Fork, now_s: float) -> OpResult:
        source = session.caches.get(op.source_id)
        if source is None:
            return _refused(Reason.CACHE, f"fork.source_id: unknown or released cache {op.source_id}")
        if session.used(op.cache_id):
            return _refused(
                Reason.CACHE_ID_USED, f"fork.cache_id: {op.cache_id} was used before in this session"
            )
        if op.length > source.length:
            return _refused(Reason.INVALID, f"fork.length: at most {source.length}, is {op.length}")
        if self.count >= self.limits.max_sequences:
            return _refused(Reason.SEQUENCES, f"all {self.limits.max_sequences} sequences are in use")
        if (quota := session.quota) is not None and quota.caches_left < 1:
            return _refused(Reason.QUOTA, f"fork: {quota.no_cache()}")
        automaton = None
        if op.sampling.grammar is not None:
            output = source.ids[source.prompt_length : op.length].copy()
            automaton = self.replays.automaton(session, op.sampling.grammar, output)
            try:
                if why := automaton.why_not(output):
                    return _refused(Reason.GRAMMAR, f"fork.sampling.grammar: {why}")
            except ReplayUnfinished as error:
                return _refused(Reason.GRAMMAR_BEHIND, f"fork.sampling.grammar: {error}")
        source.renewed_s = now_s
        self.adapters.share(source.adapter)
        fork = CachedSequence(
            self.pages.fork(source.table, op.length),
            source.ids[: op.length].copy(),
            length=op.length,
            prompt_length=source.prompt_length,
            sampling=op.sampling,
            salt=source.salt,
            renewed_s=now_s,
            automaton=automaton,
            adapter=source.adapter,
        )
        self.add(session, op.cache_id, fork)
        return OpResult(kv_length=op.length)


def _refused(reason: Reason, message: str) -> OpResult:
    return OpResult(refusal=Refusal(reason, message))
