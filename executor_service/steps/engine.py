"""`Engine`: step plans in, their results out. One thread, no I/O, no gRPC.

A step is: the header's checks (whole or not at all), the ops in order, then the rows (`batch.py`).

    begin(plan)     all of that, up to the launch of its forward
    step.finish()   wait for the forward, commit the rows, make the reply

With a backend that computes by itself, one more step may be begun while one is under way; the results are
those of one step after another (`overlap.py` says when one has to wait for that). With any other backend a
step is done once it is begun, and so is one that takes several forwards (`pieces.py`).

Before each of several forwards the caller is asked whether anybody still waits for the step. If nobody does,
an abandonable step is undone as a whole, its ops included (`savepoint.py`): then it never was.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from paceline.service.clock import RunningClock

from executor_service.backends.base import Backend, Flight, ForwardOutput, Landed
from executor_service.cache.kv_cache import KvCache
from executor_service.cache.sequence import Sequence
from executor_service.cache.session import Quota, Session, Sessions
from executor_service.contract.limits import Limits
from executor_service.contract.plan import (
    Abandoned,
    CacheView,
    Fork,
    Op,
    OpResult,
    Reason,
    Refusal,
    Release,
    RowResult,
    StepPlan,
    StepRefused,
    StepResult,
    TokenIds,
    Truncate,
    Wanted,
)
from executor_service.steps.batch import Batch
from executor_service.steps.overlap import must_wait
from executor_service.steps.pieces import may_take_several
from executor_service.steps.savepoint import Savepoint

MOST_FLIGHTS = 2  # one computes, one waits behind it; more would only be more rows for sequences that ended


@dataclass(frozen=True, slots=True)
class Leases:
    """Lease lengths in seconds: what a client gets that asks for none, and what it may ask for."""

    default_s: float = 30.0
    least_s: float = 0.5
    most_s: float = 3600.0


@dataclass(slots=True)
class Counters:
    """Since the start; read by other threads, written by the worker's."""

    steps: int = 0
    steps_abandoned: int = 0  # nobody waited for them any more; not begun, or undone
    rows: int = 0
    tokens_computed: int = 0
    tokens_sampled: int = 0
    drafts_verified: int = 0
    drafts_accepted: int = 0
    compute_s: float = 0.0
    prefill_steps: int = 0  # steps with a row that computed prompt tokens
    decode_steps: int = 0  # all others that had rows
    prefill_s: float = 0.0  # part of compute_s
    decode_s: float = 0.0
    prefill_rows: int = 0
    decode_rows: int = 0
    sessions_expired: int = 0
    caches_expired: int = 0
    refused: Counter[Reason] = field(default_factory=Counter)  # rows and ops


class Step:
    """A step that was begun."""

    __slots__ = (
        "_engine", "arrived_s", "batch", "began_s", "cached", "free", "ops", "plan", "result", "session",
    )  # fmt: skip

    def __init__(
        self,
        engine: Engine,
        session: Session,
        plan: StepPlan,
        arrived_s: float | None,
        result: StepResult | None = None,
    ) -> None:
        self._engine, self.session, self.plan = engine, session, plan
        self.began_s = time.perf_counter()
        self.arrived_s = self.began_s if arrived_s is None else arrived_s
        self.ops: list[OpResult] = []
        self.batch: Batch | None = None
        self.free = self.cached = 0  # pages of each kind once it was begun, commits left out
        self.result = result  # once it is done

    @property
    def flight(self) -> Flight | None:
        """What it waits for; None once it is done."""
        return None if self.batch is None else self.batch.flight

    def finish(self) -> StepResult:
        """Wait for it, and for what was begun before it. Again: the same result."""
        while self.result is None:
            self._engine.finish_one()
        return self.result


class Engine:
    """Sequences, sessions and pages of one loaded backend. All methods but properties: worker thread."""

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        epoch: int,
        leases: Leases | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.limits, self.epoch = limits, epoch
        self.leases = leases or Leases()
        self.clock = clock or RunningClock(time.monotonic)
        self.cache = KvCache(limits.total_pages, limits.page_size)
        self.sessions = Sessions(
            self.leases.default_s,
            limits.max_sessions,
            self.clock,
            limits.max_sessions_per_caller,
            Quota(limits.max_default_pages, limits.max_default_sequences),
        )
        self.counters = Counters()
        self.draining = False  # set by any thread
        self.sequences = 0  # live caches of all sessions
        self._backend = backend
        self._flights = min(backend.max_flights, MOST_FLIGHTS)
        self._under_way: deque[Step] = deque()  # launched and not finished
        self._finished_s = 0.0  # when the last step was
        self._free_by_commits = self._cached_by_commits = 0  # by how much all of them changed those pages

    def execute(self, plan: StepPlan) -> StepResult:
        """Begin a step and finish it."""
        return self.begin(plan).finish()

    def begin(
        self,
        plan: StepPlan,
        arrived_s: float | None = None,
        wanted: Wanted = lambda: True,
        *,
        abandonable: bool = False,
        caller: str = "",
    ) -> Step:
        """Begin one step that arrived then by `perf_counter`, or find the reply it got before.

        Finishes what is under way as far as it must. `wanted` is asked before each forward of a step that
        takes several; unless the step is abandonable, that changes nothing. Raises StepRefused when nothing
        was done, and Abandoned when all was undone; any other exception is fatal.
        """
        self.check_epoch(plan.epoch)
        session = self.sessions.get(plan.session_id, caller)
        while len(self._under_way) >= self._flights:
            self.finish_one()
        ahead = self._ahead
        undoable = abandonable and may_take_several(plan, session, self.limits.max_piece_tokens)
        if ahead is not None and (undoable or not session.is_next(plan) or must_wait(plan, session, ahead)):
            self.settle()
        stored = session.replay(plan)
        step = Step(self, session, plan, arrived_s, stored)
        if stored is not None:
            return step
        now_s, sequences = session.renewed_s, self.sequences
        savepoint = Savepoint(session, plan, self.cache) if undoable else None
        step.ops = [self._apply(session, op, now_s) for op in plan.ops]
        if plan.rows or plan.openings:
            try:
                step.batch = self._launch(session, plan, now_s, wanted, savepoint)
            except Abandoned:
                self.sequences = sequences
                self.counters.steps_abandoned += 1
                self.counters.compute_s += time.perf_counter() - step.began_s
                raise
        session.advance(plan)
        step.free = self.cache.free - self._free_by_commits
        step.cached = self.cache.cached - self._cached_by_commits
        if self._flights == 1 or step.flight is None or isinstance(step.flight, Landed):
            self._complete(step)
        else:
            self._under_way.append(step)
        return step

    def settle(self) -> None:
        """Finish all that is under way."""
        while self._under_way:
            self.finish_one()

    def finish_one(self) -> None:
        """Finish the oldest step that is under way."""
        self._complete(self._under_way.popleft())

    @property
    def _ahead(self) -> Batch | None:
        """The rows that were launched last, while they are under way."""
        return self._under_way[-1].batch if self._under_way else None

    def _launch(
        self, session: Session, plan: StepPlan, now_s: float, wanted: Wanted, savepoint: Savepoint | None
    ) -> Batch:
        """Prepare the rows and launch them; where that takes several forwards, compute them.

        Raises Abandoned, behind `savepoint.restore`.
        """
        batch = self._prepare(session, plan, now_s)
        if self._under_way and (batch.refused or batch.several):  # perhaps refused for what it finds there
            batch.cancel()
            self.settle()
            batch = self._prepare(session, plan, now_s)
        elif savepoint is not None and savepoint.holds_pages and batch.short:
            # Perhaps for want of the very pages that are held for the way back: then there is none.
            batch.cancel()
            savepoint.discard()
            savepoint = None
            batch = self._prepare(session, plan, now_s)
        self.sequences += batch.opened
        if not batch.several:
            batch.launch()
        elif savepoint is None:
            batch.compute(lambda: wanted() or True)
        elif not batch.compute(wanted):
            batch.cancel()
            savepoint.restore()
            raise Abandoned
        if savepoint is not None:
            savepoint.discard()
        return batch

    def _prepare(self, session: Session, plan: StepPlan, now_s: float) -> Batch:
        batch = Batch(session, plan, self.cache, self._backend, self.limits, now_s, self._ahead)
        batch.prepare(self.sequences, self.draining)
        return batch

    def _complete(self, step: Step) -> None:
        """Commit a step's rows and make its reply, which knows nothing of what was begun behind it."""
        rows: list[RowResult] = []
        freed_behind = 0
        if (batch := step.batch) is not None:
            opened, free, cached = batch.opened, self.cache.free, self.cache.cached
            batch.commit()
            self.sequences += batch.opened - opened
            self._free_by_commits += self.cache.free - free
            self._cached_by_commits += self.cache.cached - cached
            rows, freed_behind = batch.results, batch.freed_behind
            self._renew(step)
            step.batch = None
        now_s = time.perf_counter()
        had_device_s = max(step.began_s, self._finished_s)
        queued_s, elapsed_s = had_device_s - step.arrived_s, now_s - had_device_s
        self._finished_s = now_s
        self.counters.steps += 1
        self.counters.compute_s += elapsed_s
        if batch is not None:
            self._count(batch, elapsed_s)
        for refusal in [op.refusal for op in step.ops] + [row.refusal for row in rows]:
            if refusal is not None:
                self.counters.refused[refusal.reason] += 1
        free = step.free + self._free_by_commits - freed_behind
        cached = step.cached + self._cached_by_commits
        queue_us, compute_us = int(queued_s * 1e6), int(elapsed_s * 1e6)
        step.result = StepResult(step.ops, rows, free, cached, queue_us, compute_us)
        step.session.remember(step.plan, step.result, self.limits.max_in_flight)

    def check_epoch(self, epoch: int) -> None:
        """Raises StepRefused when a request means another life of this executor. Any thread."""
        if epoch not in (0, self.epoch):
            raise StepRefused(Reason.EPOCH, f"header.epoch: {epoch} is over, it is {self.epoch}")

    def open_session(
        self, replaces: int, lease_ms: int, label: str, owner: str = "", caller: str = ""
    ) -> Session:
        """Open a session, after releasing and fencing those that it replaces: that one, and the owner's.

        Only the caller's own sessions are replaced.
        """
        if replaces and (old := self.sessions.find(replaces, caller)) is not None:
            self._end(old, fence=True)
        if owner and (old := self.sessions.owned_by(owner, caller)) is not None:
            self._end(old, fence=True)
        lease_s = lease_ms / 1000 or self.leases.default_s
        lease_s = min(max(lease_s, self.leases.least_s), self.leases.most_s)
        return self.sessions.open(lease_s, label, owner, caller)

    def close_session(self, session_id: int, caller: str = "") -> int:
        """End a session; the number of caches released. An unknown one is no error."""
        if session_id == 0:
            raise StepRefused(Reason.INVALID, "session_id: session 0 is shared and can't be closed")
        session = self.sessions.find(session_id, caller)
        return 0 if session is None else self._end(session, fence=False)

    def look(
        self, session_id: int, epoch: int, cache_ids: Items[int], caller: str = ""
    ) -> tuple[int, list[CacheView]]:
        """The session's last step that is done, and its caches: these, or all. Raises StepRefused."""
        self.check_epoch(epoch)
        self.settle()
        session = self.sessions.get(session_id, caller)
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
        return session.last_step_id, views

    def touch(self, session_id: int) -> None:
        """Renew the lease of a session that has something queued, if it lives."""
        self.sessions.touch(session_id)

    def expire(self) -> int:
        """Release what nobody has asked for within its lease; how many caches that were.

        In session 0 each cache has a lease of its own. No lease runs out while its step is under way.
        """
        for step in self._under_way:
            self._renew(step)
        now_s, released = self.clock(), 0
        for session in self.sessions:
            if session.id:
                if now_s - session.renewed_s > session.lease_s:
                    self.counters.sessions_expired += 1
                    released += self._end(session, fence=False)
                continue
            for cache_id, sequence in tuple(session.caches.items()):
                if now_s - sequence.renewed_s > session.lease_s:
                    self.counters.caches_expired += 1
                    released += self._release(session, cache_id)
        return released

    def forward_once(
        self, inputs: Items[TokenIds], want: frozenset[str], wanted: Wanted = lambda: True
    ) -> list[ForwardOutput]:
        """The non-autoregressive forward, one input after another; no cache is involved.

        Raises Abandoned when nobody wants the rest any more.
        """
        self.settle()
        outputs: list[ForwardOutput] = []
        for tokens in inputs:
            if not wanted():
                raise Abandoned
            outputs += self._backend.forward_once([tokens], want)
        return outputs

    def check(self) -> None:
        """Balance the books. Raises LedgerError."""
        self.cache.check(sequence.table for session in self.sessions for sequence in session.caches.values())
        if self.sequences != sum(len(session.caches) for session in self.sessions):
            raise AssertionError("the number of live sequences is wrong")

    def _apply(self, session: Session, op: Op | Refusal, now_s: float) -> OpResult:
        if isinstance(op, Refusal):
            return OpResult(refusal=op)
        if isinstance(op, Release):
            return OpResult(released=sum(self._release(session, cache_id) for cache_id in op.cache_ids))
        if isinstance(op, Truncate):
            return self._truncate(session, op, now_s)
        return self._fork(session, op, now_s)

    def _release(self, session: Session, cache_id: int) -> bool:
        sequence = session.caches.pop(cache_id, None)
        if sequence is None:
            return False
        self.cache.cut(sequence.table, 0)  # its row under way finds it without pages
        session.remember_released(cache_id)
        self.sequences -= 1
        return True

    def _truncate(self, session: Session, op: Truncate, now_s: float) -> OpResult:
        sequence = session.caches.get(op.cache_id)
        if sequence is None:
            return _refused(Reason.CACHE, f"truncate.cache_id: unknown or released cache {op.cache_id}")
        if op.length > sequence.length:
            return _refused(Reason.INVALID, f"truncate.length: at most {sequence.length}, is {op.length}")
        self.cache.cut(sequence.table, op.length)
        sequence.forget_pending(op.length)
        sequence.renewed_s = now_s
        return OpResult(kv_length=op.length)

    def _fork(self, session: Session, op: Fork, now_s: float) -> OpResult:
        source = session.caches.get(op.source_id)
        if source is None:
            return _refused(Reason.CACHE, f"fork.source_id: unknown or released cache {op.source_id}")
        if session.used(op.cache_id):
            return _refused(
                Reason.CACHE_ID_USED, f"fork.cache_id: {op.cache_id} was used before in this session"
            )
        if op.length > source.length:
            return _refused(Reason.INVALID, f"fork.length: at most {source.length}, is {op.length}")
        if self.sequences >= self.limits.max_sequences:
            return _refused(Reason.SEQUENCES, f"all {self.limits.max_sequences} sequences are in use")
        if (quota := session.quota) is not None and quota.caches_left < 1:
            return _refused(Reason.QUOTA, f"fork: {quota.no_cache()}")
        source.renewed_s = now_s
        session.caches[op.cache_id] = Sequence(
            self.cache.fork(source.table, op.length),
            source.ids[: op.length].copy(),
            length=op.length,
            prompt_length=source.prompt_length,
            sampling=op.sampling,
            salt=source.salt,
            renewed_s=now_s,
        )
        self.sequences += 1
        return OpResult(kv_length=op.length)

    def _end(self, session: Session, *, fence: bool) -> int:
        """Release everything of a session and forget it."""
        self.settle()
        released = sum(self._release(session, cache_id) for cache_id in tuple(session.caches))
        self.sessions.remove(session, fence=fence)
        return released

    def _renew(self, step: Step) -> None:
        """The leases of what a step computes for."""
        step.session.renewed_s = now_s = self.clock()
        if step.batch is not None and not step.session.id:
            for job in step.batch.jobs:
                job.sequence.renewed_s = now_s

    def _count(self, batch: Batch, elapsed_s: float) -> None:
        counters, tally = self.counters, batch.tally
        counters.rows += len(batch.results)
        counters.tokens_computed += tally.tokens_computed
        counters.tokens_sampled += tally.tokens_sampled
        counters.drafts_verified += tally.drafts_verified
        counters.drafts_accepted += tally.drafts_accepted
        counters.prefill_rows += batch.prefill_rows
        counters.decode_rows += batch.decode_rows
        if batch.prefill_rows:
            counters.prefill_steps += 1
            counters.prefill_s += elapsed_s
        elif batch.decode_rows:
            counters.decode_steps += 1
            counters.decode_s += elapsed_s


def _refused(reason: Reason, message: str) -> OpResult:
    return OpResult(refusal=Refusal(reason, message))
