"""Fills one step with rows and openings, within the bounds on sequences, tokens and pages.

Page counts are conservative: a row's need follows from its KV length and the page size, and a prefix hit only
lowers it. Released pages count as free once an answer of the executor has counted them.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from scheduler_service.core.account import Account
from scheduler_service.core.adapter_slots import SlotTurns
from scheduler_service.core.admission import Admission, Start
from scheduler_service.core.in_flight import StepsInFlight, can_go_ahead
from scheduler_service.core.joint_limits import JointLimits
from scheduler_service.core.preemption import victims_for_pages, victims_for_share
from scheduler_service.core.prompt_budget import PromptBudget
from scheduler_service.core.queue import SequenceQueue
from scheduler_service.core.schedule import Schedule, ScheduledFork, ScheduledOpening, ScheduledRow
from scheduler_service.core.sequence import Key, LiveSequence
from scheduler_service.core.sequence_pool import SequencePool
from scheduler_service.core.speculation.step_time import StepTime
from scheduler_service.core.states import SequenceState
from scheduler_service.core.waiting.reasons import WaitReason

MAX_HELD = 64
"""Sequences that a plan holds back at most: however many wait for one beginning, a plan takes no longer."""
_RANK = {
    WaitReason.SEATS: 1,
    WaitReason.OTHER_STEP_SHARE: 2,
    WaitReason.DEADLINES: 2,
    WaitReason.PAGES: 3,
    WaitReason.PAGES_IN_FLIGHT: 3,
}
"""The order in which `_admit` finds what a sequence lacks; 0: the reasons that it finds first."""


class StepBuilder:
    """Fills one step, by `fill` or by `fill_alone`; the result is `schedule`."""

    def __init__(
        self,
        pool: SequencePool,
        limits: JointLimits,
        pages: int,
        in_flight: StepsInFlight,
        admission: Admission,
        give_up: Callable[[LiveSequence], None],
        step_time: StepTime,
        now: float,
        *,
        may_ask: bool,
        may_take_slots: bool,
    ) -> None:
        """pages: available, and not promised to steps in flight. may_ask: the executor may be asked to open.
        may_take_slots: likewise, for adapters that no sequence with a cache has.
        give_up: fails the request of a queued sequence that can't meet its deadline any more.
        """
        self._pool = pool
        self._limits = limits
        self._in_flight = in_flight
        self._may_ask = may_ask
        self._admission = admission
        self._give_up = give_up
        self._now = now
        slots = limits.adapter_slots if may_take_slots else len(pool.slots)
        self._slots = SlotTurns(pool.slots, slots)
        self._prefilling: list[LiveSequence] = []  # with a cache, and more than one token to compute
        self._max_pace_s: float | None = None
        self._drafts_to_come = False  # some sequence gets no row, since it waits for drafts
        self.schedule = Schedule(limits.step_tokens, pages, limits.output_bytes)
        self._prompts = PromptBudget(self.schedule, limits, step_time)
        self.reserve = 0  # pages kept for the prompts and the next token of running sequences
        self.stalled: list[LiveSequence] = []  # with a cache, and without pages for their next row
        self._held = 0  # in this step
        self._feeds_prompt = False  # a prompt that had begun has tokens in the step
        # Why no further sequence is started, which is next, and how much it needs and finds of what it lacks.
        self.reason = WaitReason.NONE
        self.head: LiveSequence | None = None
        self.needed = self.available = 0

    def fill(self) -> None:
        """Schedule the running sequences; then preempt if some lack pages, else start queued ones.

        No sequence is preempted for pages while steps in flight release some; for a place it may be.
        """
        pool = self._pool
        self._feed(pool.running)
        chunks = self._prefilling
        if chunks or (self._may_ask and len(pool.queue)):
            self._prompts.bound(pool.running)
        if pool.queue.contested:
            pool.queue.settle(pool.running)
            chunks = self._feed_in_turn(chunks)
        for sequence in chunks:
            self._feed_chunk(sequence)
        if self.stalled and not self._in_flight.bring_pages:
            self._make_room()
        if not self._may_ask:
            return
        nothing_comes = not (self._in_flight or self.schedule.rows or pool.releases or self._drafts_to_come)
        if not self.stalled:
            self._admit(force=nothing_comes)
            return
        self._block(pool.queue.first_sequence(), WaitReason.RUNNING_PAGES, len(self.stalled))
        if nothing_comes:
            self._force(self.stalled[0])

    def fill_alone(self, isolated: LiveSequence) -> None:
        """Schedule one sequence alone. The others keep their caches unless it needs their pages or places."""
        pool = self._pool
        others = len(pool.running) - (isolated.cache_id > 0)
        nothing_to_free = not (others or pool.releases)
        if isolated.cache_id:
            self._feed([isolated])
            for sequence in self._prefilling:
                self._feed_chunk(sequence)
            if self.stalled and nothing_to_free and self._may_ask:
                self._force(isolated)
        elif (
            self._may_ask
            and self._has_place(isolated)
            and not self._start(isolated, force=nothing_to_free)  # even if it may miss its deadline
        ):
            self._block_for_pages(isolated)
        if isolated.cache_id:
            self._block(pool.queue.first_sequence(), WaitReason.ALONE)
        if self.schedule.empty and others and self._may_ask and not pool.releases:
            pool.preempt(pool.last_in_turn())  # one in each step, until there is room

    def _has_place(self, isolated: LiveSequence) -> bool:
        """Whether it may have a place and a slot; if not, it is blocked by what it lacks."""
        if not self._slots.admits(isolated.live.request.adapter):
            self._block(isolated, WaitReason.ADAPTER_SLOT, 1)
        elif len(self._pool.running) >= self._limits.max_sequences:
            self._block(isolated, WaitReason.SEATS, 1)
        else:
            return True
        return False

    def _block(
        self, head: LiveSequence | None, reason: WaitReason, needed: int = 0, available: int = 0
    ) -> None:
        """Record why no further sequence is started, and what the next one, `head`, needs and finds."""
        if head is not None and head is self.head and _RANK.get(reason, 0) < _RANK.get(self.reason, 0):
            return  # it came further before: what it lacked then is what would have started it
        self.head, self.needed, self.available = head, needed, available
        self.reason = WaitReason.NONE if head is None and not len(self._pool.queue) else reason

    def _block_for_pages(self, head: LiveSequence) -> None:
        """Record that the next sequence, `head`, lacks pages."""
        comes_back = self._in_flight.bring_pages or self._pool.releases
        reason = WaitReason.PAGES_IN_FLIGHT if comes_back else WaitReason.PAGES
        available = max(0, self.schedule.pages_left - self.reserve)
        self._block(head, reason, self._limits.pages(len(head.tokens) + 1), available)

    def _block_for_step(self, head: LiveSequence) -> None:
        """Record that the step has no tokens, time or bytes for the next sequence, `head`."""
        if self._prompts.answerable(head) < 1:
            size = head.score_bytes or self._limits.vector_bytes
            self._block(head, WaitReason.ANSWER_BYTES, size, self.schedule.bytes_left)
        elif self._feeds_prompt:
            self._block(head, WaitReason.OTHER_PROMPT)
        elif len(self._pool.running) >= self._limits.max_sequences and not self._pool.queue.contested:
            self._block(head, WaitReason.SEATS, 1)  # the rows of all places take all tokens
        else:
            self._block(head, WaitReason.STEP_BUDGET)

    @property
    def passed(self) -> Set[bytes]:
        """Adapters of which the step starts no sequence, since they wait for slots."""
        return self._slots.passed

    def _feed(self, running: SequenceQueue | list[LiveSequence]) -> None:
        """Schedule a decode for each sequence that can have one; collect those with a prompt to compute."""
        page_size = self._limits.page_size
        schedule = self.schedule
        rows, pages = schedule.rows, schedule.pages_left
        prefilling = self._prefilling
        decoding = SequenceState.RUNNING
        for sequence in running:
            kv = sequence.kv
            if sequence.in_flight:
                if not can_go_ahead(sequence):
                    continue
                if sequence.ahead > sequence.in_flight:
                    pages -= self._feed_behind_drafts(sequence, pages)
                    continue
                kv += sequence.in_flight
            elif sequence.awaits_drafts:
                self._drafts_to_come = True
                continue
            elif sequence.state is not decoding:
                prefilling.append(sequence)
                continue
            if kv % page_size and not sequence.tail_shared:
                rows.append(ScheduledRow(sequence, kv, 0))
            elif pages:
                pages -= 1
                rows.append(ScheduledRow(sequence, kv, 1))
            else:
                self.stalled.append(sequence)
        schedule.tokens_left -= len(rows)
        schedule.pages_left = pages
        limits = self._limits
        self.reserve = len(running)
        for sequence in prefilling:
            self.reserve += limits.pages(len(sequence.tokens)) - limits.pages(sequence.kv)

    def _feed_behind_drafts(self, sequence: LiveSequence, pages: int) -> int:
        """Schedule a decode after unanswered drafts, if there is a page for it; returns the pages it takes.

        Without one it waits: the answer may show that it needs none.
        """
        kv = sequence.kv + sequence.ahead
        needed = int(kv % self._limits.page_size == 0 or sequence.tail_shared)
        if needed > pages:
            return 0
        row = ScheduledRow(sequence, kv, needed)
        row.is_bound = True
        self.schedule.rows.append(row)
        return needed

    def _feed_in_turn(self, prefilling: list[LiveSequence]) -> list[LiveSequence]:
        """Schedule chunks and start queued sequences in the order of turns; returns the chunks left.

        So the prompt of an identity that was served more takes no tokens from a request whose turn is first.
        Half of the step is kept for the first running sequence, so that it always makes progress.
        """
        first = self._pool.running[0] if prefilling else None
        prefilling.sort(key=lambda s: (s is not first, s.live.account.counter, s.key))
        for at, sequence in enumerate(prefilling):
            if self._may_ask and not self.stalled:
                kept = self._prompts.keep_half() if sequence is first else None
                self._admit(force=False, ahead_of=sequence.live.account)
                if kept is not None:
                    self._prompts.give_back(kept)
            if sequence.cache_id:  # else it was preempted for an identity below its share
                self._feed_chunk(sequence)
            if self.stalled:
                return [s for s in prefilling[at + 1 :] if s.cache_id]
        return []

    def _feed_chunk(self, sequence: LiveSequence) -> None:
        """Schedule a prompt's next chunk, as far as step and pages allow; without pages it is stalled."""
        limits, schedule, kv = self._limits, self.schedule, sequence.kv
        held = limits.pages(kv)
        room = (held + schedule.pages_left) * limits.page_size - kv  # tokens that the pages allow
        chunk = self._prompts.chunk(sequence, kv)
        if chunk and not room:
            self.stalled.append(sequence)
        elif chunk:
            chunk = min(chunk, room)
            pages = limits.pages(kv + chunk) - held
            schedule.add_row(ScheduledRow(sequence, kv, pages, limit=chunk, mode=sequence.mode))
            self._prompts.spend(sequence, kv, chunk)
            self.reserve -= pages
            self._feeds_prompt = True

    def _make_room(self) -> None:
        """Preempt for stalled sequences; the next answer of the executor counts the pages that came free.

        Not those that this step opens: it may have started some before a prompt stalled (`_feed_in_turn`).
        """
        ordered = self._pool.queue.in_turn(self._pool.running)
        needy = self.stalled[0]
        if self._pool.queue.contested:
            needy = next(sequence for sequence in ordered if sequence in self.stalled)
        ordered = [sequence for sequence in ordered if not self.schedule.opens_or_copies(sequence)]
        self._preempt(list(victims_for_pages(ordered, needy, len(self.stalled), self._limits)))

    def _make_way(self, account: Account, pages: int = 0) -> bool:
        """Preempt sequences of other identities, to free `pages` or one place for a sequence of `account`.

        Spared are the first running sequence, so that it ends whoever comes, isolated ones, and those that
        this step opens or copies. Returns whether any sequence was preempted.
        """
        queue, isolated = self._pool.queue, self._pool.isolated
        if not queue.contested:
            return False

        def is_spared(sequence: LiveSequence) -> bool:
            return sequence in isolated or self.schedule.opens_or_copies(sequence)

        candidates = queue.in_turn(self._pool.running)[1:]
        chosen = victims_for_share(candidates, account, pages, is_spared, self._limits)
        self._preempt(chosen)
        return bool(chosen)

    def _preempt(self, sequences: list[LiveSequence]) -> None:
        """Take sequences out of this step, release their caches and queue them again."""
        self.schedule.drop(set(sequences))
        for sequence in sequences:
            self._pool.preempt(sequence)

    def _force(self, sequence: LiveSequence) -> None:
        """Schedule a row although no pages are counted as free: the executor may have some by now."""
        limit = 0
        if sequence.state is not SequenceState.RUNNING:
            limit = min(self._prompts.answerable(sequence), self._limits.chunk_tokens)
        self.schedule.add_row(ScheduledRow(sequence, sequence.kv, 0, limit=limit, mode=sequence.mode))

    def _admit(self, *, force: bool, ahead_of: Account | None = None) -> None:
        """Start queued sequences in the order of turns, until one does not fit; none may overtake it.

        A sequence that waits for its adapter's slot may be overtaken (`adapter_slots.py`).

        force: try the first one whatever the page count says, since nothing else could free pages.
        ahead_of: start only sequences of identities that were served less than this one.
        """
        pool = self._pool
        while (sequence := pool.queue.next_sequence(self._slots.passed)) is not None:
            account = sequence.live.account
            if ahead_of is not None and (account is ahead_of or account.counter > ahead_of.counter):
                return
            if self.schedule.tokens_left < 1:
                self._block_for_step(sequence)
                return
            if not self._slots.admits(sequence.live.request.adapter):
                continue
            if not force and (awaited := self._awaited(sequence)) is not None:
                if self._held == MAX_HELD:
                    self._block(sequence, WaitReason.PREFIX)
                    return
                self._held += 1
                pool.hold(sequence, *awaited)
                continue
            if not self._fits_step(sequence):
                self._block_for_step(sequence)
                return
            if len(pool.running) >= self._limits.max_sequences and not self._make_way(account):
                self._block(sequence, WaitReason.SEATS, 1)
                return
            if len(pool.running):
                start = self._may_start(sequence)
                if start is Start.NEVER:
                    self._give_up(sequence)
                    continue
                if start is Start.OTHERS_SHARE:
                    self._block(sequence, WaitReason.OTHER_STEP_SHARE)
                    return
                if start is Start.DEADLINES:
                    self._block(sequence, WaitReason.DEADLINES)
                    return
            if not self._start(sequence, force=force):
                if not self._in_flight.bring_pages and not pool.releases:
                    need = self._limits.pages(len(sequence.tokens) + 1)
                    self._make_way(account, need - max(0, self.schedule.pages_left - self.reserve))
                self._block_for_pages(sequence)
                return
            self._slots.started(sequence.live.request.adapter)
            force = False
        self._block(None, WaitReason.ADAPTER_SLOT, 1)

    def _awaited(self, sequence: LiveSequence) -> tuple[LiveSequence, int] | None:
        """One before it in turn that computes the beginning of its prompt, and how many tokens of that."""
        if sequence.is_behind or sequence.source is not None:
            return None
        found = self._pool.prefixes.awaited(sequence, self._limits.page_size)
        return None if found is None or _turn(sequence) < _turn(found[0]) else found

    def _fits_step(self, sequence: LiveSequence) -> bool:
        """Whether the step has tokens, time and room in its answer for a part of a queued sequence."""
        if sequence.source:
            return self._prompts.answerable(sequence) > 0  # a fork feeds one token
        return self._prompts.chunk(sequence, self._hit(sequence)) > 0

    def _hit(self, sequence: LiveSequence) -> int:
        """Tokens that its opening is likely to find in the prefix cache: whole pages."""
        return sequence.expected_hit // self._limits.page_size * self._limits.page_size

    def _may_start(self, sequence: LiveSequence) -> Start:
        if self._max_pace_s is None:
            self._max_pace_s = self._admission.max_pace_s(self._now)
        return self._admission.may_start(sequence, self._limits, self._max_pace_s, self._now)

    def _start(self, sequence: LiveSequence, *, force: bool) -> bool:
        """Schedule the sequence's opening, or a fork of its request's first one. False if it does not fit."""
        return self._fork(sequence, sequence.source) if sequence.source else self._open(sequence, force=force)

    def _open(self, sequence: LiveSequence, *, force: bool) -> bool:
        """Schedule an opening with all known tokens, and reserve pages for them and the next token.

        One token is computed where the sequence's grammar may still have to read its output: the opening is
        likely to be refused, and takes nothing from those after it meanwhile.
        """
        schedule, evaluation = self.schedule, sequence.live.request.evaluation
        need = self._limits.pages(sequence.end_kv or len(sequence.tokens) + 1)
        if need > schedule.pages_left - self.reserve and not force:
            return False
        # With a smaller hit than expected, the rest is computed in further chunks.
        hit = self._hit(sequence)
        limit = 1 if sequence.is_behind else self._prompts.chunk(sequence, hit)
        opening = ScheduledOpening(
            cache_id=self._pool.open(sequence, self._now),
            tokens=tuple(sequence.tokens),
            prompt_length=sequence.prompt_length,
            limit=limit,
            sampling=sequence.opening_sampling,
            stop_token_ids=sequence.live.stop_token_ids,
            min_tokens=sequence.live.request.min_tokens,
            salt=sequence.live.request.salt,
            adapter=sequence.live.request.adapter,
            mode=sequence.mode,
            scored_from=sequence.next_score if sequence.next_score < sequence.prompt_length else 0,
            pooling=None if evaluation is None else evaluation.pooling,
            sequence=sequence,
        )
        schedule.add_opening(opening, need)
        self._prompts.spend(sequence, hit, limit)
        return True

    def _fork(self, sequence: LiveSequence, source: LiveSequence) -> bool:
        """Schedule a copy of the source's prompt without its last token, and a row that feeds that token.

        The copy's first write takes a page: a new one, or a copy of the partial page that both share. If that
        page is still the source's last one, the source's next write copies it as well.
        """
        length = sequence.prompt_length - 1
        page_size = self._limits.page_size
        partial = length % page_size > 0 and source.kv % page_size > 0
        shares_tail = partial and source.kv // page_size == length // page_size
        need = 2 if shares_tail else 1
        if need > self.schedule.pages_left - self.reserve:
            return False
        self.reserve += 1
        cache_id = self._pool.open(sequence, self._now)
        sequence.fork(source, length, shares_tail=shares_tail)
        fork = ScheduledFork(
            source_id=source.cache_id,
            cache_id=cache_id,
            length=length,
            sampling=sequence.sampling,
            stop_token_ids=sequence.live.stop_token_ids,
            min_tokens=sequence.live.request.min_tokens,
            sequence=sequence,
        )
        row = ScheduledRow(sequence, length, need, tokens=(sequence.tokens[length],))
        self.schedule.add_fork(fork, source, row)
        return True


def _turn(sequence: LiveSequence) -> tuple[float, Key]:
    """Whose prompt gets tokens of a step first: the one with the lowest."""
    return sequence.live.account.counter, sequence.key
