"""Which sequences wait, which run, and which caches are to be released. Sequences change places only here."""

from __future__ import annotations

from scheduler_service.core.fairness import FairQueue
from scheduler_service.core.queue import SequenceQueue
from scheduler_service.core.sequence import LiveRequest, LiveSequence
from scheduler_service.core.states import WITH_CACHE, SequenceState, Trigger

ISOLATION_LOSSES = 2
"""A sequence runs alone after so many executor losses with a row of it in flight and no new token between."""


class SequencePool:
    """All sequences that have not ended, and the caches they hold or held."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.running = SequenceQueue()  # all that hold a cache: opening, prefilling, running
        self.isolated = SequenceQueue()  # of both: those that must run alone
        self.releases: list[int] = []  # for the next plan
        self.preemptions = 0
        self.held = 0  # completions in state HELD
        self.held_tokens = 0  # their known tokens
        self.speculating = 0  # sequences that want drafts and have not ended
        self._last_cache_id = 0  # never used twice, whatever the session

    def enlist(self, live: LiveRequest) -> None:
        """Queue a new request's first sequence; the others are held until it is prefilled."""
        self.queue.add(live.sequences[0])
        self.held += len(live.sequences) - 1
        self.held_tokens += sum(len(s.tokens) for s in live.sequences[1:])
        self.speculating += sum(s.draft_state is not None for s in live.sequences)

    def open(self, sequence: LiveSequence, now: float) -> int:
        """Give it a new cache id."""
        sequence.open(self._last_cache_id + 1, now)
        self._last_cache_id += 1
        self.queue.admitted(sequence)
        self.running.add(sequence)
        return sequence.cache_id

    def requeue(self, sequence: LiveSequence) -> None:
        """Take its cache away; it returns to its place in the queue with all its tokens."""
        sequence.happen(Trigger.EVICT)
        self._drop_cache(sequence)
        self.queue.add(sequence)

    def preempt(self, sequence: LiveSequence) -> None:
        """Requeue it to give its pages to others."""
        self.requeue(sequence)
        sequence.count_eviction()
        self.preemptions += 1

    def end(self, sequence: LiveSequence) -> None:
        """End it, in whatever state. Completions that were held for it are queued."""
        if sequence.state is SequenceState.ENDED:
            return
        if sequence.cache_id:
            self._drop_cache(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.queue.remove(sequence)
        elif sequence.state is SequenceState.HELD:
            self._let_go(sequence)
        self.isolated.discard(sequence)
        if sequence.draft_state is not None:
            self.speculating -= 1
        sequence.happen(Trigger.END)
        if sequence.index == 0:
            self.unhold(sequence.live)

    def unhold(self, live: LiveRequest) -> None:
        """Queue the other completions: the first has computed their prompt, or has ended."""
        for sequence in live.sequences[1:]:
            if sequence.state is SequenceState.HELD:
                self._let_go(sequence)
                sequence.happen(Trigger.QUEUE)
                self.queue.add(sequence)

    def lose_all(self) -> None:
        """The executor is gone, and all caches with it: everything waits again, nothing is released."""
        for sequence in list(self.running):
            self.requeue(sequence)
            sequence.count_eviction()
        self.releases.clear()

    def isolate(self, sequence: LiveSequence) -> None:
        """Let it run alone from now on, until `end_isolation`."""
        if sequence not in self.isolated:
            self.isolated.add(sequence)

    def end_isolation(self, sequence: LiveSequence) -> None:
        """It has a new token: the losses are not held against it."""
        sequence.forget_losses()
        self.isolated.discard(sequence)

    def last_in_turn(self) -> LiveSequence:
        """The sequence to preempt first: the last of the most served identity, isolated ones last."""
        ordered = self.queue.in_turn(self.running)
        others = (s for s in reversed(ordered) if s not in self.isolated)
        return next(others, ordered[-1])

    def take_releases(self) -> tuple[int, ...]:
        """Cache ids for the plan that is being made to release; they are forgotten here."""
        releases = tuple(self.releases)
        self.releases.clear()
        return releases

    def _let_go(self, sequence: LiveSequence) -> None:
        self.held -= 1
        self.held_tokens -= len(sequence.tokens)

    def _drop_cache(self, sequence: LiveSequence) -> None:
        self.queue.settle((sequence,))
        sequence.live.account.running -= 1
        self.running.remove(sequence)
        self.releases.append(sequence.cache_id)
        sequence.drop_cache()

    def check_integrity(self, sequences: list[LiveSequence]) -> None:
        """Compare with all sequences of all live requests. Raises AssertionError."""
        waiting, running = set(self.queue), set(self.running)
        assert len(waiting) == len(self.queue), "a sequence waits twice"
        assert len(running) == len(self.running), "a sequence runs twice"
        self.queue.check_integrity(self.running)
        held = [s for s in sequences if s.state is SequenceState.HELD]
        assert self.held == len(held), "held siblings are miscounted"
        assert self.held_tokens == sum(len(s.tokens) for s in held), "held tokens are miscounted"
        for queue in (self.running, self.isolated):
            keys = [s.key for s in queue]
            assert keys == sorted(set(keys)), "a queue is out of order"
        for s in sequences:
            assert (s in waiting) == (s.state is SequenceState.WAITING), f"{s.key} waits, or should"
            assert (s in running) == (s.state in WITH_CACHE) == (s.cache_id > 0), f"{s.key} runs, or should"
            isolated = s.state is not SequenceState.ENDED and s.losses >= ISOLATION_LOSSES
            assert (s in self.isolated) == isolated, f"{s.key} is isolated, or should be"
            assert s.kv < len(s.tokens), f"{s.key} has computed more than it knows"
            assert s.cache_id or not s.kv, f"{s.key} has computed something and holds no cache"
            if s.state is SequenceState.RUNNING:
                assert s.kv == len(s.tokens) - 1, f"{s.key} runs with more than one token to compute"
        live = {s for s in sequences if s.state is not SequenceState.ENDED}
        speculating = sum(s.draft_state is not None for s in live)
        assert self.speculating == speculating, "those who want drafts are miscounted"
        assert waiting | running | set(self.isolated) <= live, "an ended sequence is still queued"
        caches = [s.cache_id for s in running] + self.releases
        assert len(caches) == len(set(caches)), "a cache is held twice, or held and released"
        assert all(c <= self._last_cache_id for c in caches), "a cache id from nowhere"
