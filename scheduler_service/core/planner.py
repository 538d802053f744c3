"""One step in the making: who computes what, within the bounds on sequences, tokens and pages.

The page arithmetic is conservative: a row's need is known from its KV length and the page size, a
prefix hit only makes it cheaper, and pages on their way back count once the executor has said so.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler_service.core.account import Account
from scheduler_service.core.admission import Admission, Start
from scheduler_service.core.drafting.speculator import Speculator
from scheduler_service.core.in_flight import StepsInFlight
from scheduler_service.core.policy import JointLimits, can_go_ahead, pages_back, victims
from scheduler_service.core.queue import SequenceQueue
from scheduler_service.core.schedule import Schedule, ScheduledFork, ScheduledOpening, ScheduledRow
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.sequence_pool import SequencePool
from scheduler_service.core.states import SequenceState

LEAD = 1024
"""Virtual tokens by which an identity must have been served more than another to give way within its share:
so many that two of them do not take turns at preempting each other."""


class StepBuilder:
    """Fills one step, by `fill` or `fill_alone`: what is in it is its `schedule`."""

    def __init__(
        self,
        pool: SequencePool,
        limits: JointLimits,
        pages: int,
        in_flight: StepsInFlight,
        admission: Admission,
        give_up: Callable[[LiveSequence], None],
        now: float,
        *,
        may_ask: bool,
    ) -> None:
        """pages: that are not promised to steps in flight. give_up: ends the request of a waiting sequence,
        which can't meet its deadline any more. may_ask: the executor takes openings and was not short of
        anything just now.
        """
        self._pool = pool
        self._limits = limits
        self._in_flight = in_flight
        self._may_ask = may_ask
        self._admission = admission
        self._give_up = give_up
        self._now = now
        self._prefilling: list[LiveSequence] = []  # hold a cache, and part of their tokens is not computed
        self._spare_pace_s: float | None = None
        self._drafts_to_come = False  # some sequence has no row because its drafts are being made
        self.schedule = Schedule(limits.step_tokens, pages)
        self._reserve = 0  # pages that running sequences will need soon
        self.stalled: list[LiveSequence] = []  # hold a cache, and there are no pages for their next row

    def fill(self) -> None:
        """Schedule the running sequences; then preempt if they lack pages, or else admit from the queue.

        No sequence is preempted while the answers of steps in flight will bring pages.
        """
        pool = self._pool
        self._feed(pool.running)
        chunks = self._prefilling
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
        elif nothing_comes:
            self._force(self.stalled[0])

    def attach_drafts(self, speculator: Speculator) -> None:
        """Give the tokens and pages that are left to drafts; none while a sequence lacks pages."""
        if self.stalled:
            return
        speculator.attach(self.schedule, self._reserve, self._limits.page_size)

    def fill_alone(self, isolated: LiveSequence) -> None:
        """Compute one sequence alone; the others keep their caches as long as it has room beside them."""
        pool = self._pool
        others = len(pool.running) - (isolated.cache_id > 0)
        last_hope = not others and not pool.releases
        if isolated.cache_id:
            self._feed([isolated])
            for sequence in self._prefilling:
                self._feed_chunk(sequence)
            if self.stalled and last_hope and self._may_ask:
                self._force(isolated)
        elif self._may_ask and len(pool.running) < self._limits.max_sequences:
            self._start(isolated, force=last_hope)  # even if it may miss its deadline
        if self.schedule.empty and others and self._may_ask and not pool.releases:
            pool.preempt(pool.last_in_turn())  # one in each step, until there is room

    def _feed(self, running: SequenceQueue | list[LiveSequence]) -> None:
        """Schedule a decode of each sequence that can have one; those with prompt left: `_prefilling`."""
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
        self._reserve = len(running)
        for sequence in prefilling:
            self._reserve += limits.pages(len(sequence.tokens)) - limits.pages(sequence.kv)

    def _feed_in_turn(self, prefilling: list[LiveSequence]) -> list[LiveSequence]:
        """Schedule chunks and admit in the order of turns, while there are both; returns the chunks left.

        So a prompt of an identity that was served more takes no tokens from a request whose turn it is. The
        first of the running sequences has half of the tokens to itself, so that it gets on, whoever comes.
        """
        first = self._pool.running[0] if prefilling else None
        prefilling.sort(key=lambda s: (s is not first, s.live.account.counter, s.key))
        for at, sequence in enumerate(prefilling):
            if self._may_ask and not self.stalled:
                kept = self.schedule.tokens_left // 2 if sequence is first else 0
                self.schedule.tokens_left -= kept
                self._admit(force=False, ahead_of=sequence.live.account)
                self.schedule.tokens_left += kept
            if sequence.cache_id:  # else it was preempted for an identity below its share
                self._feed_chunk(sequence)
            if self.stalled:
                return [s for s in prefilling[at + 1 :] if s.cache_id]
        return []

    def _feed_chunk(self, sequence: LiveSequence) -> None:
        limits, schedule = self._limits, self.schedule
        kv, known = sequence.kv, len(sequence.tokens)
        held = limits.pages(kv)
        room = (held + schedule.pages_left) * limits.page_size - kv  # tokens that the pages allow
        chunk = min(known - kv, limits.chunk_tokens, schedule.tokens_left)
        if chunk and not room:
            self.stalled.append(sequence)
        elif chunk:
            chunk = min(chunk, room)
            pages = limits.pages(kv + chunk) - held
            schedule.add_row(ScheduledRow(sequence, kv, pages, limit=chunk))
            self._reserve -= pages

    def _make_room(self) -> None:
        """Preempt for stalled sequences; the executor's next answer says which pages came free."""
        ordered = self._pool.queue.in_turn(self._pool.running)
        needy = self.stalled[0]
        if self._pool.queue.contested:
            needy = next(sequence for sequence in ordered if sequence in self.stalled)
            ordered = [sequence for sequence in ordered if not self.schedule.opens_or_copies(sequence)]
        self._preempt(list(victims(ordered, needy, len(self.stalled), self._limits)))

    def _make_way(self, account: Account, pages: int = 0) -> bool:
        """Preempt sequences of other identities for `account`: for `pages`, or to run one more sequence.

        It takes from an identity that will still run as many by weight, and, if it was served much less
        (LEAD), from any that runs several. The first of the running sequences is left alone: so it ends, even
        if identities come and go. True if there are victims.
        """
        queue, running = self._pool.queue, self._pool.running
        if not queue.contested:
            return False
        gained = (account.running + 1) / account.weight
        victims: list[LiveSequence] = []
        left: dict[str, int] = {}
        for sequence in reversed(queue.in_turn(running)[1:]):
            other = sequence.live.account
            if other.counter < account.counter or (victims and pages <= 0):
                break
            kept = left.get(other.identity, other.running) - 1
            leads = other.counter - account.counter > LEAD and kept
            if (kept / other.weight < gained and not leads) or sequence in self._pool.isolated:
                continue
            if self.schedule.opens_or_copies(sequence):
                continue
            left[other.identity] = kept
            pages -= pages_back(sequence, self._limits)
            victims.append(sequence)
        if pages > 0:
            return False  # it would not be enough
        self._preempt(victims)
        return bool(victims)

    def _preempt(self, sequences: list[LiveSequence]) -> None:
        self.schedule.drop(set(sequences))
        for sequence in sequences:
            self._pool.preempt(sequence)

    def _force(self, sequence: LiveSequence) -> None:
        """Schedule a row for which no pages are known to be free: the executor may have some by now."""
        pending = len(sequence.tokens) - sequence.kv
        limit = 0 if sequence.state is SequenceState.RUNNING else min(pending, self._limits.chunk_tokens)
        self.schedule.add_row(ScheduledRow(sequence, sequence.kv, 0, limit=limit))

    def _admit(self, *, force: bool, ahead_of: Account | None = None) -> None:
        """Open caches in the order of turns, until one does not fit; those behind it wait as well.

        With `force` the first is tried whatever the page count says: nothing else could free pages.
        Identities that were served more than `ahead_of` are left out.
        """
        pool = self._pool
        while (account := pool.queue.first()) is not None:
            if ahead_of is not None and (account is ahead_of or account.counter > ahead_of.counter):
                return
            if self.schedule.tokens_left < 1:
                return
            if len(pool.running) >= self._limits.max_sequences and not self._make_way(account):
                return
            sequence = account.waiting[0]
            if len(pool.running):
                start = self._may_start(sequence)
                if start is Start.NEVER:
                    self._give_up(sequence)
                    continue
                if start is Start.LATER:
                    return
            if not self._start(sequence, force=force):
                if not self._in_flight.bring_pages and not pool.releases:
                    need = self._limits.pages(len(sequence.tokens) + 1)
                    self._make_way(account, need - max(0, self.schedule.pages_left - self._reserve))
                return
            force = False

    def _may_start(self, sequence: LiveSequence) -> Start:
        if self._spare_pace_s is None:
            self._spare_pace_s = self._admission.spare_pace_s(self._now)
        return self._admission.may_start(sequence, self._limits, self._spare_pace_s, self._now)

    def _start(self, sequence: LiveSequence, *, force: bool) -> bool:
        """Schedule its opening, or a fork of its request's first completion. False if it does not fit."""
        source = sequence.source
        return self._fork(sequence, source) if source else self._open(sequence, force=force)

    def _open(self, sequence: LiveSequence, *, force: bool) -> bool:
        """Open with all known tokens; room for them and the next is set aside at once."""
        schedule = self.schedule
        need = self._limits.pages(len(sequence.tokens) + 1)
        if need > schedule.pages_left - self._reserve and not force:
            return False
        request = sequence.live.request
        opening = ScheduledOpening(
            cache_id=self._pool.open(sequence, self._now),
            tokens=tuple(sequence.tokens),
            prompt_length=sequence.prompt_length,
            limit=min(len(sequence.tokens), self._limits.chunk_tokens, schedule.tokens_left),
            sampling=sequence.sampling,
            stop_token_ids=sequence.live.stop_token_ids,
            min_tokens=request.min_tokens,
            salt=request.salt,
            sequence=sequence,
        )
        schedule.add_opening(opening, need)
        return True

    def _fork(self, sequence: LiveSequence, source: LiveSequence) -> bool:
        """Copy the prompt but its last token from `source`, and feed that one under its own seed.

        Its first write takes a page: a new one, or a copy of the partial page that it shares. The
        source's next write copies that page too, if it still is the source's last.
        """
        length = sequence.prompt_length - 1
        page_size = self._limits.page_size
        shares_tail = length % page_size > 0 and source.kv % page_size > 0
        shares_tail = shares_tail and source.kv // page_size == length // page_size
        need = 2 if shares_tail else 1
        if need > self.schedule.pages_left - self._reserve:
            return False
        self._reserve += 1
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
