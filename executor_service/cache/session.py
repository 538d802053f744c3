"""Sessions: which client owns which caches, the order of its steps, its lease, and its stored replies."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from executor_service.cache.sequence import CachedSequence
from executor_service.contract.plan import Reason, RequestRefused, StepPlan, StepResult

REMEMBERED_IDS = 16_384
"""Released cache ids that a session remembers to refuse their reuse; the proto promises this number."""

REMEMBERED_FENCES = 16_384
"""Replaced sessions that are remembered, so that their late steps are refused as FENCED, not as unknown."""

MAX_CALLERS = 1024
"""Maximum number of callers with a session 0."""


@dataclass(frozen=True, slots=True)
class Leases:
    """Lease lengths in seconds: the default, and the limits of what a client may ask for."""

    default_s: float = 30.0
    min_s: float = 0.5
    max_s: float = 3600.0


class ClientSession:
    """One client's caches, step order and stored replies.

    Each caller also has a session 0, whose steps have no order. `caller` is the name of the caller's
    identity. Opening a session replaces the same caller's session with the same `owner`, unless that is "".
    `quota` limits session 0; None: no limit.
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
        """Whether the id names a cache, or one of the last REMEMBERED_IDS released caches."""
        return cache_id in self.caches or cache_id in self._released

    def remember_released(self, cache_id: int) -> None:
        """Remember a released cache id, so that it cannot be used again."""
        self._released[cache_id] = None
        if len(self._released) > REMEMBERED_IDS:
            self._released.popitem(last=False)

    def released_ids(self) -> OrderedDict[int, None]:
        """A copy of the released ids, for `restore_released`."""
        return self._released.copy()

    def restore_released(self, released: OrderedDict[int, None]) -> None:
        """Forget the ids released since `released_ids` made this copy."""
        self._released = released

    def is_next(self, plan: StepPlan) -> bool:
        """Whether the step's id follows that of the last step begun; True for steps without an id."""
        return plan.step_id in (0, self.last_step_id + 1)

    def advance(self, plan: StepPlan) -> None:
        """Note that the step was begun: from now on, a step with its id is a replay."""
        if plan.step_id:
            self.last_step_id = plan.step_id

    def replay(self, plan: StepPlan) -> StepResult | None:
        """The stored reply if the step is a replay, None if it is the next step.

        Raises RequestRefused if it is neither. No step of the session is in flight unless the step is the
        next one: the pipeline finishes a step before it looks for its reply.
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
    """Limits on the pages and caches that the session 0s of all callers hold together; 0: no limit.

    The rest is left to other sessions. A page counts once for each cache that uses it.
    """

    def __init__(self, max_pages: int, max_caches: int) -> None:
        self.max_pages, self.max_caches = max_pages or 1 << 31, max_caches or 1 << 31
        self.sessions: OrderedDict[str, ClientSession] = OrderedDict()  # by caller, least recently used first

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

    A caller finds only its own sessions. Another caller's id is answered like an id that does not exist, so
    that guessing ids reveals nothing. In a service without identities every caller is "".
    """

    def __init__(
        self,
        default_lease_s: float,
        max_sessions: int,
        clock: Callable[[], float],
        max_per_caller: int | None = None,
        quota: Quota | None = None,
    ) -> None:
        self._clock, self._max_sessions, self._default_lease_s = clock, max_sessions, default_lease_s
        self._max_per_caller = max_sessions if max_per_caller is None else max_per_caller
        self._quota = quota or Quota(0, 0)
        self._opened: dict[int, ClientSession] = {}  # all but session 0
        self._fenced: OrderedDict[int, str] = OrderedDict()  # id to caller, oldest first

    def __iter__(self) -> Iterator[ClientSession]:
        return iter((*self._quota.sessions.values(), *self._opened.values()))

    def __len__(self) -> int:
        """Number of sessions; a session 0 counts only while it holds caches."""
        return len(self._opened) + sum(bool(one.caches) for one in tuple(self._quota.sessions.values()))

    def get(self, session_id: int, caller: str = "") -> ClientSession:
        """The caller's session, with its lease renewed. Raises RequestRefused if there is none.

        Session 0: device thread. Others: any thread.
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
        mine = (session for session in self._opened.values() if session.caller == caller)
        return next((session for session in mine if session.owner == owner), None)

    def open(self, lease_s: float, label: str, owner: str = "", caller: str = "") -> ClientSession:
        """A new session, whose id is random: ids of an earlier process are unknown. Raises RequestRefused."""
        mine = sum(session.caller == caller for session in self._opened.values())
        if mine >= self._max_per_caller:
            raise RequestRefused(
                Reason.SESSIONS,
                f"{caller or 'the caller'} has {mine} sessions open, the maximum of one caller; close one",
            )
        if len(self._opened) >= self._max_sessions:
            raise RequestRefused(Reason.SESSIONS, f"{self._max_sessions} sessions are open; close one")
        session_id = 0
        while session_id == 0 or session_id in self._opened:
            session_id = secrets.randbits(63)
        self._opened[session_id] = ClientSession(session_id, lease_s, label, self._clock(), owner, caller)
        return self._opened[session_id]

    def find(self, session_id: int, caller: str = "") -> ClientSession | None:
        """The caller's session, without renewing its lease; None if it is unknown or session 0."""
        session = self._opened.get(session_id)
        return session if session is not None and session.caller == caller else None

    def touch(self, session_id: int) -> None:
        """Renew the lease of a session, if it exists, of whichever caller."""
        if (session := self._opened.get(session_id)) is not None:
            session.renewed_s = self._clock()

    def remove(self, session: ClientSession, *, fence: bool) -> None:
        """Forget a session whose caches were released. `fence`: refuse its later steps as FENCED."""
        del self._opened[session.id]
        if fence:
            self._fenced[session.id] = session.caller
            if len(self._fenced) > REMEMBERED_FENCES:
                self._fenced.popitem(last=False)

    def _shared(self, caller: str) -> ClientSession:
        """The caller's session 0, made if there is none. At MAX_CALLERS one without caches is dropped."""
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
