"""Which sequences are queued, which run, and which caches are to be released; all moves between them."""

from __future__ import annotations

from scheduler_service.core.adapter_slots import UsedSlots
from scheduler_service.core.fair_queue import FairQueue
from scheduler_service.core.prompt_prefixes import PromptPrefixes
from scheduler_service.core.queue import SequenceQueue
from scheduler_service.core.sequence import LiveRequest, LiveSequence
from scheduler_service.core.states import WITH_CACHE, SequenceState, Trigger
from scheduler_service.core.step_log import StepEvent, StepLog
from scheduler_service.core.wait_ledger import WaitLedger

ISOLATION_LOSSES = 2
"""A sequence runs alone after this many losses of executors with its row in flight, and no token between."""


class SequencePool:
    """All sequences that have not ended, and the caches they hold or held."""

    def __init__(self, release_wait_s: float = 0.0) -> None:
        """release_wait_s: see `CoreConfig`."""
        self._release_wait_s = release_wait_s
        self.waits = WaitLedger()
        self.log = StepLog()
        self.queue = FairQueue(self.waits)
        self.running = SequenceQueue()  # with a cache: in the states OPENING, PREFILLING and RUNNING
        self.isolated = SequenceQueue()  # queued or running ones that must run alone
        self.releases: list[int] = []  # cache ids, for the next plan
        self.release_at = 0.0  # when a step is sent for them alone, if nothing is queued
        self.prefixes = PromptPrefixes()
        self.slots = UsedSlots()  # of the adapters of `running`
        self.preemptions = 0
        self.held = 0  # sequences in state HELD
        self.held_tokens = 0  # their known tokens
        self.speculating = 0  # sequences that want drafts and have not ended
        self._last_cache_id = 0  # an id is never used twice, not even in another session

    def enlist(self, live: LiveRequest) -> None:
        """Queue a new request's sequences, but for those that are held until their leader is prefilled."""
        self.waits.enter(live)
        for sequence in live.sequences:
            if sequence.state is SequenceState.HELD:
                self.held += 1
                self.held_tokens += len(sequence.tokens)
                self.waits.hold(sequence)
            else:
                self.queue.add(sequence)
        self.speculating += sum(s.draft_state is not None for s in live.sequences)

    def open(self, sequence: LiveSequence, now: float) -> int:
        """Move a queued sequence to the running ones, with a new cache id, which is returned."""
        computes = sequence.source is None
        sequence.open(self._last_cache_id + 1, now)
        self._last_cache_id += 1
        if computes:
            self.prefixes.begins(sequence)
        self.queue.admitted(sequence)
        self.running.add(sequence)
        self.slots.hold(sequence.live.request.adapter)
        return sequence.cache_id

    def requeue(self, sequence: LiveSequence) -> None:
        """Take a running sequence's cache away, and queue it again with all its tokens."""
        sequence.happen(Trigger.EVICT)
        self._drop_cache(sequence)
        self.queue.add(sequence)
        self.unhold(sequence)

    def preempt(self, sequence: LiveSequence) -> None:
        """Requeue a running sequence so that others get its pages."""
        computed = sequence.kv
        self.requeue(sequence)
        self.preemptions += 1
        self._note_eviction(sequence, computed)

    def _note_eviction(self, sequence: LiveSequence, computed: int) -> None:
        sequence.count_eviction()
        self.log.note(StepEvent.PREEMPTED, sequence.live, sequence.index, computed)

    def end(self, sequence: LiveSequence) -> None:
        """End a sequence in any state. Those that were held until it is prefilled are queued."""
        if sequence.state is SequenceState.ENDED:
            return
        if sequence.cache_id:
            self._drop_cache(sequence)
        elif sequence.state is SequenceState.QUEUED:
            self.queue.remove(sequence)
        elif sequence.state is SequenceState.HELD:
            self._count_out(sequence)
        self.isolated.discard(sequence)
        if sequence.draft_state is not None:
            self.speculating -= 1
        sequence.happen(Trigger.END)
        sequence.wait.course.end(self.waits.now)
        self.unhold(sequence)

    def hold(self, sequence: LiveSequence, leader: LiveSequence, tokens: int) -> None:
        """Take a sequence out of the queue until the leader has computed `tokens` that both begin with."""
        self.queue.hold(sequence)
        sequence.await_beginning(leader, tokens)
        self.held += 1
        self.held_tokens += len(sequence.tokens)

    def prefilled(self, sequence: LiveSequence) -> None:
        """All of a running sequence's known tokens are computed."""
        self.prefixes.ends(sequence, computed=True)
        self.unhold(sequence)

    def unhold(self, leader: LiveSequence) -> None:
        """Queue those that are held and need not wait for their leader any longer."""
        if not leader.followers:
            return
        held = [one for one in leader.followers if one.state is SequenceState.HELD]
        leader.followers = [one for one in held if one.needs(leader)]
        for sequence in held:
            if not sequence.needs(leader):
                self._count_out(sequence)
                sequence.unhold()
                self.queue.add(sequence)

    def lose_all(self) -> None:
        """Requeue all running sequences: their caches are lost with the executor, so none is released."""
        self.prefixes.forget()
        for sequence in list(self.running):
            computed = sequence.kv
            self.requeue(sequence)
            sequence.wait.course.lost()
            self._note_eviction(sequence, computed)
        self.releases.clear()

    def isolate(self, sequence: LiveSequence) -> None:
        """Let it run alone from now on, until `end_isolation`."""
        if sequence not in self.isolated:
            self.isolated.add(sequence)

    def end_isolation(self, sequence: LiveSequence) -> None:
        """Let it run beside others again: it has a new token."""
        sequence.forget_losses()
        self.isolated.discard(sequence)

    def last_in_turn(self) -> LiveSequence:
        """The sequence to preempt first: the last in the order of turns, an isolated one only if all are."""
        ordered = self.queue.in_turn(self.running)
        others = (s for s in reversed(ordered) if s not in self.isolated)
        return next(others, ordered[-1])

    def take_releases(self) -> tuple[int, ...]:
        """Remove and return the cache ids that the next plan has to release."""
        releases = tuple(self.releases)
        self.releases.clear()
        return releases

    def _count_out(self, sequence: LiveSequence) -> None:
        self.held -= 1
        self.held_tokens -= len(sequence.tokens)
        self.waits.release(sequence)

    def _drop_cache(self, sequence: LiveSequence) -> None:
        """Release a running sequence's cache with the next step, and charge its identity up to now.

        Charging looks at running sequences alone, so this is the last time. The caller sets the state.
        """
        self.queue.settle((sequence,))
        self.prefixes.ends(sequence, computed=False)
        sequence.live.account.running -= 1
        self.running.remove(sequence)
        self.slots.drop(sequence.live.request.adapter)
        if not self.releases:
            self.release_at = self.waits.now + self._release_wait_s
        self.releases.append(sequence.cache_id)
        sequence.drop_cache()

    def check_integrity(self, sequences: list[LiveSequence]) -> None:
        """Compare with `sequences`, those of all live requests. Raises AssertionError."""
        queued, running = set(self.queue), set(self.running)
        assert len(queued) == len(self.queue), "a sequence is queued twice"
        assert len(running) == len(self.running), "a sequence runs twice"
        self.queue.check_integrity(self.running)
        self.slots.check_integrity(s.live.request.adapter for s in self.running)
        computing = (SequenceState.OPENING, SequenceState.PREFILLING)
        self.prefixes.check_integrity({s.cache_id for s in running if s.state in computing})
        held = [s for s in sequences if s.state is SequenceState.HELD]
        assert self.held == len(held), "held sequences are miscounted"
        assert self.held_tokens == sum(len(s.tokens) for s in held), "held tokens are miscounted"
        for queue in (self.running, self.isolated):
            keys = [s.key for s in queue]
            assert keys == sorted(set(keys)), "a queue is out of order"
        for s in sequences:
            assert (s in queued) == (s.state is SequenceState.QUEUED), f"{s.key} is queued, or should be"
            assert (s in running) == (s.state in WITH_CACHE) == (s.cache_id > 0), f"{s.key} runs, or should"
            isolated = s.state is not SequenceState.ENDED and s.losses >= ISOLATION_LOSSES
            assert (s in self.isolated) == isolated, f"{s.key} is isolated, or should be"
            assert s.kv < len(s.tokens), f"{s.key} has more computed than known tokens"
            assert s.cache_id or not s.kv, f"{s.key} has computed something and holds no cache"
            if s.state is SequenceState.RUNNING:
                assert s.kv == len(s.tokens) - 1, f"{s.key} runs with more than one token to compute"
        live = {s for s in sequences if s.state is not SequenceState.ENDED}
        speculating = sum(s.draft_state is not None for s in live)
        assert self.speculating == speculating, "sequences that want drafts are miscounted"
        assert queued | running | set(self.isolated) <= live, "an ended sequence is still queued"
        caches = [s.cache_id for s in running] + self.releases
        assert len(caches) == len(set(caches)), "a cache is held twice, or held and released"
        assert all(c <= self._last_cache_id for c in caches), "a cache id that was never given"
