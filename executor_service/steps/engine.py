"""`Engine`: sessions and steps over one loaded backend. No I/O, no gRPC, no threads.

store     sequences, sessions, pages, adapters   cache/sequence_store.py
pipeline  steps, at most two in flight           pipeline.py
counters  what was computed                      counters.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from executor_service.adapters.registry import AdapterRegistry
from executor_service.adapters.slots import AdapterSlots
from executor_service.adapters.store import AdapterStore
from executor_service.backends.base import AdapterBackend, Backend, ForwardOutput
from executor_service.cache.sequence_store import SequenceStore
from executor_service.cache.session import ClientSession, Leases
from executor_service.contract.forward_view import WHOLE, ForwardView
from executor_service.contract.limits import Limits
from executor_service.contract.plan import Abandoned, CacheView, Forwards, Reason, RequestRefused, TokenIds
from executor_service.steps.counters import StepCounters
from executor_service.steps.pipeline import Pipeline
from executor_service.steps.running_step import RunningStep, StepKind, running_step


class Engine:
    """What the device thread works on. All methods: device thread."""

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        epoch: int,
        leases: Leases | None = None,
        clock: Callable[[], float] | None = None,
        replay_clock: Callable[[], float] | None = None,
    ) -> None:
        """`clock`: of leases. `replay_clock`: by which replays are limited; None: they are not."""
        self.limits, self._backend = limits, backend
        registry = AdapterRegistry(limits.max_adapters, limits.max_adapter_bytes)
        device = backend if isinstance(backend, AdapterBackend) else None
        adapters = AdapterStore(registry, AdapterSlots(limits.max_adapter_slots), device)
        self.store = SequenceStore(limits, epoch, leases, clock, adapters, replay_clock)
        self.counters = StepCounters()
        self.pipeline = Pipeline(self.store, backend, self.counters)
        self._forward: RunningStep | None = None  # that of the RPC Forward, while it runs

    @property
    def running_step(self) -> RunningStep | None:
        """What is computed now; None: nothing. Any thread."""
        if (forward := self._forward) is not None:
            return forward
        rows = self.pipeline.oldest_rows
        return None if rows is None else running_step(rows)

    def open_session(
        self, replaces: int, lease_ms: int, label: str, owner: str = "", caller: str = ""
    ) -> ClientSession:
        """Open a session after ending and fencing the caller's session `replaces` and that of `owner`."""
        sessions, leases = self.store.sessions, self.store.leases
        if replaces and (old := sessions.find(replaces, caller)) is not None:
            self._end(old, fence=True)
        if owner and (old := sessions.owned_by(owner, caller)) is not None:
            self._end(old, fence=True)
        lease_s = lease_ms / 1000 or leases.default_s
        lease_s = min(max(lease_s, leases.min_s), leases.max_s)
        return sessions.open(lease_s, label, owner, caller)

    def close_session(self, session_id: int, caller: str = "") -> int:
        """End a session and return the number of caches released. An unknown session is no error."""
        if session_id == 0:
            raise RequestRefused(Reason.INVALID, "session_id: session 0 is shared and can't be closed")
        session = self.store.sessions.find(session_id, caller)
        return 0 if session is None else self._end(session, fence=False)

    def look(
        self, session_id: int, epoch: int, cache_ids: Sequence[int], caller: str = ""
    ) -> tuple[int, list[CacheView]]:
        """The id of the session's last step, and the state of these caches or of all."""
        self.store.check_epoch(epoch)
        self.pipeline.settle()
        session = self.store.sessions.get(session_id, caller)
        return session.last_step_id, self.store.views(session, cache_ids)

    def expire(self) -> int:
        """Release what has outlived its lease, and return the number of caches released."""
        self.pipeline.renew_leases()
        expired = self.store.expire()
        self.counters.sessions_expired += expired.sessions
        self.counters.caches_expired += expired.shared
        return expired.owned + expired.shared

    def forward_once(
        self, inputs: Sequence[TokenIds], want: frozenset[str], views: Sequence[ForwardView] = ()
    ) -> Forwards[list[ForwardOutput]]:
        """The non-autoregressive forward of each input, one after another, without a cache.

        `views`: one per input; none: all of each.

        Raises Abandoned when no client waits any more.
        """
        self.pipeline.settle()
        outputs: list[ForwardOutput] = []
        self._forward = RunningStep(StepKind.FORWARD, len(inputs), sum(map(len, inputs)))
        try:
            for tokens, view in zip(inputs, views or [WHOLE] * len(inputs), strict=True):
                if not (yield):
                    raise Abandoned
                outputs += self._backend.forward_once([tokens], want, view)
        finally:
            self._forward = None
        return outputs

    def _end(self, session: ClientSession, *, fence: bool) -> int:
        self.pipeline.settle()
        return self.store.end(session, fence=fence)
