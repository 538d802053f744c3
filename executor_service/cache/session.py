"""Sessions: who owns which caches, in which order their steps come, and until when."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from executor_service.cache.sequence import CachedSequence
from executor_service.contract.plan import Reason, RequestRefused, StepPlan, StepResult

REMEMBERED_IDS = 16_384
"""Released cache ids that a session remembers, to refuse their reuse (documented in the proto)."""

REMEMBERED_FENCES = 16_384
"""Replaced sessions whose late steps are told so; older ones are merely unknown."""


MAX_CALLERS = 1024
"""Callers whose session 0 is remembered."""


@dataclass(frozen=True, slots=True)
class Leases:
    """Lease lengths in seconds: of a session that asks for none, and the range that may be asked for."""

    default_s: float = 30.0
    min_s: float = 0.5
    max_s: float = 3600.0


class ClientSession:
    """One client's caches, step order and stored replies. Session 0, one for each caller, has no order.

    `caller` is the name of the caller's identity. A new session of the same caller and `owner` replaces
    this one; "": none does. `quota` bounds session 0; None: whatever is free.
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
        self.last_step_id = 0  # begun last
        self._replies: OrderedDict[int, tuple[bytes, StepResult]] = OrderedDict()

    def used(self, cache_id: int) -> bool:
        """Whether the id names a live cache or one of the last REMEMBERED_IDS released ones."""
        return cache_id in self.caches or cache_id in self._released

    def remember_released(self, cache_id: int) -> None:
        """Refuse this id from now on."""
        self._released[cache_id] = None
        if len(self._released) > REMEMBERED_IDS:
            self._released.popitem(last=False)

    def released_ids(self) -> OrderedDict[int, None]:
        """A copy of what `used` knows of released caches, for `restore_released`."""
        return self._released.copy()

    def restore_released(self, released: OrderedDict[int, None]) -> None:
        """Forget which ids were released since."""
        self._released = released

    def is_next(self, plan: StepPlan) -> bool:
        """Whether the step is the one behind all that were begun, as far as its session has an order."""
        return plan.step_id in (0, self.last_step_id + 1)

    def advance(self, plan: StepPlan) -> None:
        """A step is begun: from now on its reply can be asked for again."""
        if plan.step_id:
            self.last_step_id = plan.step_id

    def replay(self, plan: StepPlan) -> StepResult | None:
        """The stored reply if this step was done before, None if it is the next one.

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
        """Store the reply of a done step, and forget the oldest beyond `window`."""
        if plan.step_id == 0:
            return
        self._replies[plan.step_id] = (plan.digest, result)
        if len(self._replies) > window:
            self._replies.popitem(last=False)


class Quota:
    """What the session 0s of all callers may hold together, so that sessions find room beside them.

    A page counts once for each cache that uses it. 0: any number.
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
        """Why a row is refused that needs so many more pages than are left."""
        return (
            f"needs {needed} pages, {max(left, 0)} are left of the {self.max_pages} that callers without "
            "a session share; open a session"
        )

    def no_cache(self) -> str:
        """Why an opening or a fork is refused."""
        return f"callers without a session share {self.max_caches} caches, all in use; open a session"


class Sessions:
    """All live sessions, and the replaced ones that are fenced off.

    A caller finds its own sessions only: another's is as unknown to it as one that never was, so that
    trying ids tells nothing. "" is the caller of a service that knows no callers.
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
        """Live sessions; a session 0 counts while it holds caches."""
        return len(self._live) + sum(bool(one.caches) for one in tuple(self._quota.sessions.values()))

    def get(self, session_id: int, caller: str = "") -> ClientSession:
        """The caller's session, its lease renewed. Raises RequestRefused. Any thread; 0: the worker's."""
        session = self.find(session_id, caller) if session_id else self._shared(caller)
        if session is None:
            if self._fenced.get(session_id) == caller:
                raise RequestRefused(Reason.FENCED, "header.session_id: the session was replaced")
            raise RequestRefused(Reason.SESSION, "header.session_id: unknown session; open one")
        session.renewed_s = self._clock()
        return session

    def owned_by(self, owner: str, caller: str = "") -> ClientSession | None:
        """The caller's live session that was opened for this owner."""
        mine = (session for session in self._live.values() if session.caller == caller)
        return next((session for session in mine if session.owner == owner), None)

    def open(self, lease_s: float, label: str, owner: str = "", caller: str = "") -> ClientSession:
        """A new session under a random id, so that no id of another process means anything here."""
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
        """The caller's session if it lives, never session 0; its lease is not renewed."""
        session = self._live.get(session_id)
        return session if session is not None and session.caller == caller else None

    def touch(self, session_id: int) -> None:
        """Renew a session's lease, whoever owns it, if it lives."""
        if (session := self._live.get(session_id)) is not None:
            session.renewed_s = self._clock()

    def remove(self, session: ClientSession, *, fence: bool) -> None:
        """Forget a session whose caches were released; with `fence`, say so to its late steps."""
        del self._live[session.id]
        if fence:
            self._fenced[session.id] = session.caller
            if len(self._fenced) > REMEMBERED_FENCES:
                self._fenced.popitem(last=False)

    def _shared(self, caller: str) -> ClientSession:
        """The caller's session 0. One that holds nothing is forgotten if there are too many."""
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
