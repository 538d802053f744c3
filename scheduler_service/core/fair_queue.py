"""Fair order of admission: the queued sequences of all identities, and a virtual token counter per identity.

The counter (VTC: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv:2401.00588) is

    (uncached prompt tokens + OUTPUT_COST · output tokens) / weight

A prompt (and output that it continues) is charged when it is admitted, less its prefix hit; output tokens
are charged as they are sampled; tokens that are computed again after a preemption are not charged. Of the
identities with a queued sequence, the one with the lowest counter is served next; within one identity
`priority` decides, then arrival. The counter of an identity that becomes active is raised to the lowest one
of an identity with a queued sequence (if none is queued: to the counter at the last admission), so that an
idle identity saves up no service.

Running sequences are charged only when counters are compared (`settle`): with one active identity never, so
that fairness then costs a step nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import ceil
from typing import TypeAlias

from scheduler_service.core.account import Account
from scheduler_service.core.queue import SequenceQueue
from scheduler_service.core.request import Request
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.wait_ledger import WaitLedger

OUTPUT_COST = 2
"""Prompt tokens that an output token is worth, as in the paper."""
MAX_IDLE = 4096
"""Accounts kept of identities without a live request; the one idle for longest is forgotten first."""


_Turn: TypeAlias = tuple[float, bool, int, int, Account]
"""Counter, has running sequences, rank, version, account. Of two equal counters, that of an identity without
running sequences goes first."""


def _turn(account: Account) -> _Turn:
    return account.counter, account.running > 0, account.rank, account.version, account


class FairQueue:
    """All accounts, and their queued sequences."""

    def __init__(self, waits: WaitLedger | None = None) -> None:
        self._waits = waits or WaitLedger()
        self._active: dict[str, Account] = {}
        self._idle: dict[str, Account] = {}  # in the order of becoming idle
        self._turns: list[_Turn] = []
        """A heap. An entry is void if its version is not the account's. An entry whose account's counter has
        risen is replaced when it becomes the first."""
        self._ranks = 0
        self._queues: dict[Account, SequenceQueue] = {}  # of the active accounts: by priority, then arrival
        self._floor = 0.0  # highest counter of an account when a sequence of it was admitted
        self._weight = 0.0  # sum of the active accounts' weights
        self._count = 0
        self.queued_tokens = 0  # prompt and output tokens of the queued sequences

    # -- accounts --------------------------------------------------------------------------------

    @property
    def contested(self) -> bool:
        """Several identities are active."""
        return len(self._active) > 1

    @property
    def accounts(self) -> Iterable[Account]:
        """All accounts, active ones first."""
        yield from self._active.values()
        yield from self._idle.values()

    @property
    def active(self) -> Collection[Account]:
        """The accounts of identities with a request that has not ended."""
        return self._active.values()

    def account(self, identity: str) -> Account | None:
        """The identity's account; None if there is none."""
        return self._active.get(identity) or self._idle.get(identity)

    def enter(self, request: Request, running: SequenceQueue) -> Account:
        """Count a new request on its identity's account and return it; raise its counter if it was idle."""
        account = self._active.get(request.identity)
        if account is None:
            account = self._idle.pop(request.identity, None) or Account(request.identity)
            if self._active:
                self.settle(running)
            self._ranks += 1
            account.rank = self._ranks
            first = self.first()
            account.counter = max(account.counter, self._floor if first is None else first.counter)
            self._active[request.identity] = account
            self._queues[account] = SequenceQueue()
        else:
            self._weight -= account.weight
        account.weight = request.weight
        self._weight += account.weight
        account.requests += 1
        account.taken += 1
        return account

    def leave(self, account: Account) -> None:
        """Count the end of one of the account's requests."""
        account.requests -= 1
        if account.requests:
            return
        del self._active[account.identity], self._queues[account]
        self._weight = self._weight - account.weight if self._active else 0.0
        self._idle[account.identity] = account
        if len(self._idle) > MAX_IDLE:
            del self._idle[next(iter(self._idle))]

    def share(self, account: Account, places: int) -> int:
        """The account's share of `places` running sequences: by weight among active accounts, rounded up."""
        return max(1, ceil(places * account.weight / self._weight - 1e-9))

    def is_below_share(self, identity: str, weight: float, places: int) -> bool:
        """Whether the identity's running sequences and queued requests are fewer than its share of `places`.

        If so, a new request of it need not wait for others to end: sequences of others are preempted for it.
        """
        account = self._active.get(identity)
        held = 0 if account is None else account.running + account.queued_requests
        return held < int(places * weight / self.weight_with(identity, weight))

    def weight_with(self, identity: str, weight: float) -> float:
        """Sum of the active identities' weights, as if this one were active with its weight."""
        account = self._active.get(identity)
        return self._weight - (0.0 if account is None else account.weight) + weight

    # -- turns -----------------------------------------------------------------------------------

    def first(self) -> Account | None:
        """The account to admit from next; None if no sequence is queued."""
        turns = self._turns
        while turns:
            counter, _, _, version, account = turns[0]
            if version != account.version:
                heappop(turns)
            elif counter < account.counter:
                heapreplace(turns, _turn(account))
            else:
                return account
        return None

    def first_sequence(self) -> LiveSequence | None:
        """The first sequence of the account to admit from next; None if none is queued."""
        account = self.first()
        return None if account is None else self._queues[account][0]

    def queue_of(self, account: Account) -> SequenceQueue:
        """The queued sequences of an active account, in their order."""
        return self._queues[account]

    def next_sequence(self, passed: Collection[bytes]) -> LiveSequence | None:
        """The sequence to admit next; None if none is queued whose adapter is not one of `passed`."""
        account = self.first()
        if account is None or not passed:
            return None if account is None else self._queues[account][0]
        if (sequence := self._queues[account].first(passed)) is not None:
            return sequence
        firsts = [one for queue in self._queues.values() if (one := queue.first(passed)) is not None]
        return min(firsts, key=lambda one: _turn(one.live.account), default=None)

    def admitted(self, sequence: LiveSequence) -> None:
        """Take a sequence that got a cache out of the queue, and charge its prompt."""
        account = sequence.live.account
        self._floor = max(self._floor, account.counter)
        account.running += 1
        self._waits.admitted_at = self._waits.now
        self.remove(sequence)
        self.settle((sequence,))

    def settle(self, sequences: Iterable[LiveSequence]) -> None:
        """Charge the sequences' tokens since they were last charged to their accounts."""
        for sequence in sequences:
            cost = OUTPUT_COST * len(sequence.tokens) - (OUTPUT_COST - 1) * sequence.input_length
            cost -= sequence.cached or 0
            if cost == sequence.charged:
                continue
            account = sequence.live.account
            added = cost - sequence.charged
            sequence.charged = cost
            account.tokens += added
            account.counter += added / account.weight
            if added < 0 and self._queues.get(account):
                self._queue(account)

    def in_turn(self, running: SequenceQueue) -> list[LiveSequence]:
        """The running sequences by their accounts' counters, then by key: the last is preempted first.

        The first of `running` stays the first whatever its counter is, so that at least one sequence always
        makes progress.
        """
        ordered = list(running)
        if self.contested:
            self.settle(ordered)
            ordered[1:] = sorted(ordered[1:], key=lambda s: (s.live.account.counter, s.key))
        return ordered

    # -- the queue -------------------------------------------------------------------------------

    def add(self, sequence: LiveSequence) -> None:
        """Queue a sequence."""
        account = sequence.live.account
        queue = self._queues[account]
        queue.add(sequence)
        self._waits.queue(sequence, queue[0], queue[1] if len(queue) > 1 else None)
        self._count += 1
        self.queued_tokens += len(sequence.tokens)
        if len(queue) == 1:
            self._queue(account)

    def remove(self, sequence: LiveSequence) -> None:
        """Take a sequence out of the queue. Raises KeyError if it is not queued."""
        self._waits.leave(sequence, *self._take_out(sequence))

    def hold(self, sequence: LiveSequence) -> None:
        """Take a sequence out of the queue that goes on waiting, for what another one computes."""
        self._waits.hold_back(sequence, *self._take_out(sequence))

    def _take_out(self, sequence: LiveSequence) -> tuple[SequenceQueue, bool]:
        """The rest of its account's queue, and whether it was the first there."""
        account = sequence.live.account
        queue = self._queues[account]
        was_first = queue[0] is sequence if queue else False
        queue.remove(sequence)
        self._count -= 1
        self.queued_tokens -= len(sequence.tokens)
        if not queue:
            account.version += 1
        return queue, was_first

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[LiveSequence]:
        for queue in self._queues.values():
            yield from queue

    def _queue(self, account: Account) -> None:
        account.version += 1
        heappush(self._turns, _turn(account))
        if len(self._turns) > 2 * len(self._active) + 64:  # void entries below the first would stay
            self._turns = [turn for turn in self._turns if turn[3] == turn[4].version]
            heapify(self._turns)

    def check_integrity(self, running: SequenceQueue) -> None:
        """Raises AssertionError."""
        sequences = list(self)
        assert self._count == len(sequences), "queued sequences are miscounted"
        assert self.queued_tokens == sum(len(s.tokens) for s in sequences), "queued tokens are miscounted"
        with_turn = [a for _, _, _, version, a in self._turns if version == a.version and self._queues.get(a)]
        assert len(with_turn) == len(set(with_turn)), "an identity has two turns"
        for account in self.active:
            assert bool(self._queues[account]) == (account in with_turn), f"{account.identity!r} has no turn"
            assert account.requests > 0, f"{account.identity!r} is active without a request"
            held = sum(s.live.account is account for s in running)
            assert account.running == held, f"{account.identity!r} runs {held}, counted {account.running}"
        assert not any(a.running or a.requests for a in self._idle.values()), "busy and idle"
        assert list(self._queues) == list(self._active.values()), "a queue of an idle identity"
