"""Who waits, who holds a cache, and which caches are to be released: the only place that moves a sequence."""

from __future__ import annotations

from scheduler_service.core.fairness import FairQueue
from scheduler_service.core.queue import SequenceQueue
from scheduler_service.core.sequence import LiveRequest, Sequence
from scheduler_service.core.states import WITH_CACHE, State, Trigger

SUSPECT_LOSSES = 2
"""In flight at so many executor losses without getting on in between: retried alone."""


class Roster:
    """All sequences that have not ended, and the caches they hold or held."""

    def __init__(self) -> None:
        self.waiting = FairQueue()
        self.running = SequenceQueue()  # all that hold a cache: opening, prefilling, running
        self.suspects = SequenceQueue()  # those of both that must run alone
        self.releases: list[int] = []  # for the next plan
        self.preemptions = 0
        self.held = 0  # siblings that wait for the first completion's prompt
        self.held_tokens = 0  # theirs, all known ones
        self.speculating = 0  # sequences that want drafts and have not ended
        self._last_cache_id = 0  # never used twice, whatever the session

    def enlist(self, live: LiveRequest) -> None:
        """Queue a new request's first sequence; the others are held until it is prefilled."""
        self.waiting.add(live.sequences[0])
        self.held += len(live.sequences) - 1
        self.held_tokens += sum(len(s.tokens) for s in live.sequences[1:])
        self.speculating += sum(s.draft_state is not None for s in live.sequences)

    def open(self, sequence: Sequence, now: float) -> int:
        """Give it a new cache id."""
        sequence.open(self._last_cache_id + 1, now)
        self._last_cache_id += 1
        self.waiting.admitted(sequence)
        self.running.add(sequence)
        return sequence.cache_id

    def requeue(self, sequence: Sequence) -> None:
        """Take its cache away; it returns to its place in the queue with all its tokens."""
        sequence.happen(Trigger.EVICT)
        self._drop_cache(sequence)
        self.waiting.add(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Requeue it for the sake of others."""
        self.requeue(sequence)
        sequence.count_eviction()
        self.preemptions += 1

    def end(self, sequence: Sequence) -> None:
        """Let go of it, and of the held siblings' reason to wait for it."""
        if sequence.state is State.ENDED:
            return
        if sequence.cache_id:
            self._drop_cache(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.HELD:
            self._let_go(sequence)
        self.suspects.discard(sequence)
        if sequence.draft_state is not None:
            self.speculating -= 1
            sequence.draft_state.retire()
        sequence.happen(Trigger.END)
        if sequence.index == 0:
            self.unhold(sequence.live)

    def unhold(self, live: LiveRequest) -> None:
        """Queue the siblings that were held back."""
        for sequence in live.sequences[1:]:
            if sequence.state is State.HELD:
                self._let_go(sequence)
                sequence.happen(Trigger.QUEUE)
                self.waiting.add(sequence)

    def lose_all(self) -> None:
        """The executor is gone, and all caches with it: everything waits again, nothing is released."""
        for sequence in list(self.running):
            self.requeue(sequence)
            sequence.count_eviction()
        self.releases.clear()

    def suspect(self, sequence: Sequence) -> None:
        """From now on it runs alone, until `clear`."""
        if sequence not in self.suspects:
            self.suspects.add(sequence)

    def clear(self, sequence: Sequence) -> None:
        """It got on: the losses were not its doing."""
        sequence.forget_losses()
        self.suspects.discard(sequence)

    def last_in_turn(self) -> Sequence:
        """Whom to preempt first: the last of the most served identity; a suspect only when it is alone."""
        ordered = self.waiting.in_turn(self.running)
        innocent = (s for s in reversed(ordered) if s not in self.suspects)
        return next(innocent, ordered[-1])

    def take_releases(self) -> tuple[int, ...]:
        """What the plan being made must release."""
        releases = tuple(self.releases)
        self.releases.clear()
        return releases

    def _let_go(self, sequence: Sequence) -> None:
        self.held -= 1
        self.held_tokens -= len(sequence.tokens)

    def _drop_cache(self, sequence: Sequence) -> None:
        self.waiting.settle((sequence,))
        sequence.live.account.running -= 1
        self.running.remove(sequence)
        self.releases.append(sequence.cache_id)
        sequence.drop_cache()

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Compare with all sequences of all live requests. Raises AssertionError."""
        waiting, running = set(self.waiting), set(self.running)
        assert len(waiting) == len(self.waiting), "a sequence waits twice"
        assert len(running) == len(self.running), "a sequence runs twice"
        self.waiting.check_integrity(self.running)
        held = [s for s in sequences if s.state is State.HELD]
        assert self.held == len(held), "held siblings are miscounted"
        assert self.held_tokens == sum(len(s.tokens) for s in held), "held tokens are miscounted"
        for queue in (self.running, self.suspects):
            keys = [s.key for s in queue]
            assert keys == sorted(set(keys)), "a queue is out of order"
        for s in sequences:
            assert (s in waiting) == (s.state is State.WAITING), f"{s.key} waits, or should"
            assert (s in running) == (s.state in WITH_CACHE) == (s.cache_id > 0), f"{s.key} runs, or should"
            suspect = s.state is not State.ENDED and s.losses >= SUSPECT_LOSSES
            assert (s in self.suspects) == suspect, f"{s.key} is suspect, or should be"
            assert s.kv < len(s.tokens), f"{s.key} has computed more than it knows"
            assert s.cache_id or not s.kv, f"{s.key} has computed something and holds no cache"
            if s.state is State.RUNNING:
                assert s.kv == len(s.tokens) - 1, f"{s.key} runs with more than one token to compute"
        live = {s for s in sequences if s.state is not State.ENDED}
        speculating = sum(s.draft_state is not None for s in live)
        assert self.speculating == speculating, "those who want drafts are miscounted"
        assert waiting | running | set(self.suspects) <= live, "an ended sequence is still queued"
        caches = [s.cache_id for s in running] + self.releases
        assert len(caches) == len(set(caches)), "a cache is held twice, or held and released"
        assert all(c <= self._last_cache_id for c in caches), "a cache id from nowhere"
