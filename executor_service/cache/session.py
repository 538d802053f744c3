"""Sessions: which client owns which caches, the order of its steps, its lease, and its stored replies."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from executor_service.cache.sequence import CachedSequence
from executor_service.contract.plan import Reason, RequestRefused, StepPlan, StepResult

REMEMBERED_IDS = 16_384
"""Number of released cache ids that a session remembers, to refuse their reuse (documented in the proto)."""

REMEMBERED_FENCES = 16_384
"""Number of replaced sessions whose late steps are refused as fenced; those of older ones are unknown."""

MAX_CALLERS = 1024
"""Number of callers that have a session 0."""


@dataclass(frozen=True, slots=True)
class Leases:
    """Lease lengths in seconds: of a session that asks for none, and the range that may be asked for."""

    default_s: float = 30.0
    min_s: float = 0.5
    max_s: float = 3600.0


class ClientSession:
    """One client's caches, step order and stored replies.

    Each caller also has a session 0, whose steps have no order. `caller` is the name of the caller's
    identity. A new session of the same caller with the same `owner` replaces this one, unless that is "".
    `quota` bounds session 0; None: unbounded.
    """

    def __init__(
        self,
        session_id: int,
        lease_s: float,
        label: str,
        renewed_s: float,
        owner: str = "",
        caller: str = "",
        quota: Quota | None = None,
    ) -> None:
        self.id, self.lease_s, self.label, self.renewed_s = session_id, lease_s, label, renewed_s
        self.owner, self.caller, self.quota = owner, caller, quota
        self.caches: dict[int, CachedSequence] = {}
        self._released: OrderedDict[int, None] = OrderedDict()
        self.last_step_id = 0  # of the step begun last
        self._replies: OrderedDict[int, tuple[bytes, StepResult]] = OrderedDict()

    def used(self, cache_id: int) -> bool:
        """Whether the id is that of a cache, or of one of the last REMEMBERED_IDS released ones."""
        return cache_id in self.caches or cache_id in self._released

    def remember_released(self, cache_id: int) -> None:
        """Remember a released cache id, so that it is refused from now on."""
        self._released[cache_id] = None
        if len(self._released) > REMEMBERED_IDS:
            self._released.popitem(last=False)

    def released_ids(self) -> OrderedDict[int, None]:
        """A copy of the released ids, for `restore_released`."""
        return self._released.copy()

    def restore_released(self, released: OrderedDict[int, None]) -> None:
        """Forget the ids released since that copy was made."""
        self._released = released

    def is_next(self, plan: StepPlan) -> bool:
        """Whether the step follows the one begun last; always True for steps without an id."""
        return plan.step_id in (0, self.last_step_id + 1)

    def advance(self, plan: StepPlan) -> None:
        """The step was begun: the same id is a replay from now on."""
        if plan.step_id:
            self.last_step_id = plan.step_id

    def replay(self, plan: StepPlan) -> StepResult | None:
        """The stored reply if the step is a replay, None if it is the next step.

        Raises RequestRefused when it is neither. All steps before it are done: a replay of one that is in
        flight waits for it first.
        """
        step_id = plan.step_id
        if step_id == 0:
            return None
        if self.id == 0:
            raise RequestRefused(
                Reason.INVALID, "header.step_id: session 0 has no step order; open a session"
            )
        if step_id == self.last_step_id + 1:
            return None
        if step_id > self.last_step_id:
            raise RequestRefused(
                Reason.STEP_GAP,
                f"header.step_id: expected {self.last_step_id + 1}, is {step_id}: steps are missing",
            )
        stored = self._replies.get(step_id)
        if stored is None:
            raise RequestRefused(
                Reason.STEP_FORGOTTEN, f"header.step_id: the reply of step {step_id} is no longer kept"
            )
        digest, result = stored
        if digest != plan.digest:
            raise RequestRefused(
                Reason.STEP_CONTENT, f"header.step_id: step {step_id} was done with other content"
            )
        return result

    def remember(self, plan: StepPlan, result: StepResult, window: int) -> None:
        """Store the reply of a step, and drop the oldest if there are more than `window`."""
        if plan.step_id == 0:
            return
        self._replies[plan.step_id] = (plan.digest, result)
        if len(self._replies) > window:
            self._replies.popitem(last=False)


class Quota:
    """Bounds on what the session 0s of all callers hold together, so that there is room for other sessions.

    A page counts once for each cache that uses it. 0: no bound.
    """

    def __init__(self, max_pages: int, max_caches: int) -> None:
        self.max_pages, self.max_caches = max_pages or 1 << 31, max_caches or 1 << 31
        self.sessions: OrderedDict[str, ClientSession] = OrderedDict()  # by caller; the least recent first

    @property
    def pages_left(self) -> int:
        """Pages that may still be reserved."""
        used = sum(cache.table.count for one in self.sessions.values() for cache in one.caches.values())
        return self.max_pages - used

    @property
    def caches_left(self) -> int:
        """Caches that may still be opened."""
        return self.max_caches - sum(len(one.caches) for one in self.sessions.values())

    def no_page(self, needed: int, left: int) -> str:
        """The error message of a row that needs more pages than are left."""
        return (
            f"needs {needed} pages, {max(left, 0)} are left of the {self.max_pages} that callers without "
            "a session share; open a session"
        )

    def no_cache(self) -> str:
        """The error message of an opening or a fork when no cache is left."""
        return f"callers without a session share {self.max_caches} caches, all in use; open a session"


class Sessions:
    """All sessions, and the ids of replaced ones, whose late steps are refused as fenced.

    A caller finds only its own sessions: the id of another's is as unknown as one that was never given out,
    so that guessing ids reveals nothing. In a service without identities every caller is "".
    """

    def __init__(
        self,
        default_lease_s: float,
        limit: int,
        clock: Callable[[], float],
        limit_per_caller: int | None = None,
        quota: Quota | None = None,
    ) -> None:
        self._clock, self._limit, self._default_lease_s = clock, limit, default_lease_s
        self._limit_per_caller = limit if limit_per_caller is None else limit_per_caller
        self._quota = quota or Quota(0, 0)
        self._live: dict[int, ClientSession] = {}
        self._fenced: OrderedDict[int, str] = OrderedDict()  # with their callers

    def __iter__(self) -> Iterator[ClientSession]:
        return iter((*self._quota.sessions.values(), *self._live.values()))

    def __len__(self) -> int:
        """Number of sessions; a session 0 counts while it holds caches."""
        return len(self._live) + sum(bool(one.caches) for one in tuple(self._quota.sessions.values()))

    def get(self, session_id: int, caller: str = "") -> ClientSession:
        """The caller's session, with its lease renewed. Raises RequestRefused.

        Any thread for sessions other than 0.
        """
        session = self.find(session_id, caller) if session_id else self._shared(caller)
        if session is None:
            if self._fenced.get(session_id) == caller:
                raise RequestRefused(Reason.FENCED, "header.session_id: the session was replaced")
            raise RequestRefused(Reason.SESSION, "header.session_id: unknown session; open one")
        session.renewed_s = self._clock()
        return session

    def owned_by(self, owner: str, caller: str = "") -> ClientSession | None:
        """The caller's session that was opened for this owner."""
        mine = (session for session in self._live.values() if session.caller == caller)
        return next((session for session in mine if session.owner == owner), None)

    def open(self, lease_s: float, label: str, owner: str = "", caller: str = "") -> ClientSession:
        """A new session. Its id is random, so that ids of another process are unknown here."""
        mine = sum(session.caller == caller for session in self._live.values())
        if mine >= self._limit_per_caller:
            raise RequestRefused(
                Reason.SESSIONS,
                f"{caller or 'the caller'} has {mine} sessions open, the most of one caller; close one",
            )
        if len(self._live) >= self._limit:
            raise RequestRefused(Reason.SESSIONS, f"{self._limit} sessions are open; close one")
        session_id = 0
        while session_id == 0 or session_id in self._live:
            session_id = secrets.randbits(63)
        self._live[session_id] = ClientSession(session_id, lease_s, label, self._clock(), owner, caller)
        return self._live[session_id]

    def find(self, session_id: int, caller: str = "") -> ClientSession | None:
        """The caller's session, without renewing its lease; None if it is unknown or session 0."""
        session = self._live.get(session_id)
        return session if session is not None and session.caller == caller else None

    def touch(self, session_id: int) -> None:
        """Renew the lease of a session, if it exists, whoever its caller is."""
        if (session := self._live.get(session_id)) is not None:
            session.renewed_s = self._clock()

    def remove(self, session: ClientSession, *, fence: bool) -> None:
        """Forget a session whose caches were released. `fence`: refuse its later steps as fenced."""
        del self._live[session.id]
        if fence:
            self._fenced[session.id] = session.caller
            if len(self._fenced) > REMEMBERED_FENCES:
                self._fenced.popitem(last=False)

    def _shared(self, caller: str) -> ClientSession:
        """The caller's session 0. An empty one is dropped if there are MAX_CALLERS."""
        every = self._quota.sessions
        session = every.get(caller)
        if session is None:
            if len(every) >= MAX_CALLERS:
                unused = next((name for name, one in every.items() if not one.caches), None)
                if unused is None:
                    raise RequestRefused(Reason.QUOTA, f"{MAX_CALLERS} callers use session 0; open a session")
                del every[unused]
            session = ClientSession(
                0, self._default_lease_s, "default", self._clock(), "", caller, self._quota
            )
            every[caller] = session
        every.move_to_end(caller)
        return session
