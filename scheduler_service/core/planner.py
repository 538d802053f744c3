"""One step in the making: who computes what, within seats, tokens and pages.

The page arithmetic is conservative: a row's need is known from its KV length and the page size, a
prefix hit only makes it cheaper, and pages on their way back count once the executor has said so.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_service.core.policy import Limits, can_go_ahead, can_start_in_time, victims
from scheduler_service.core.roster import Roster
from scheduler_service.core.sequence import Sequence
from scheduler_service.core.speculation.speculator import Speculator
from scheduler_service.core.states import State
from scheduler_service.core.step import Fork, Opening, Row


class StepBuilder:
    """Fills one step, by `fill` or `fill_alone`; `rows`, `openings` and `forks` are its parts."""

    def __init__(self, roster: Roster, limits: Limits, pages: int, step_s: float, now: float) -> None:
        self._roster = roster
        self._limits = limits
        self._step_s = step_s
        self._now = now
        self.tokens_left = limits.step_tokens
        self.pages_left = pages
        self._reserve = 0  # pages that those who hold a cache will want soon
        self.stalled: list[Sequence] = []  # hold a cache and want pages that are not there
        self.rows: list[Row] = []
        self.fed: list[Sequence] = []  # parallel to rows
        self.openings: list[Opening] = []
        self.opened: list[Sequence] = []  # parallel to openings
        self.forks: list[Fork] = []
        self.forked: list[Sequence] = []  # parallel to forks; their rows are in rows

    @property
    def empty(self) -> bool:
        """Nothing is computed by it."""
        return not self.rows and not self.openings

    def fill(self, may_ask: bool, idle: bool, returning: bool, drafting: bool = False) -> None:
        """Feed those that hold a cache, make room if they lack pages, else admit from the queue.

        may_ask: the executor was not short of anything just now. idle: no step is in flight.
        returning: pages are on their way back, so nobody is preempted for some. drafting: somebody
        waits for drafts, and will be in a step without being forced.
        """
        roster = self._roster
        self._feed(roster.running)
        if self.stalled and not returning:
            self._make_room()
        last_hope = idle and not self.rows and not roster.releases and not drafting
        if not may_ask:
            return
        if not self.stalled:
            self._admit(list(roster.waiting), force=last_hope)
        elif last_hope:
            self._force(self.stalled[0])

    def attach_drafts(self, speculator: Speculator) -> None:
        """What tokens and pages are left go to drafts; none while somebody lacks pages."""
        if self.stalled:
            return
        pages = max(0, self.pages_left - self._reserve)
        tokens, taken = speculator.attach(
            self.rows, self.fed, self.tokens_left, pages, self._limits.page_size
        )
        self.tokens_left -= tokens
        self.pages_left -= taken

    def fill_alone(self, suspect: Sequence, may_ask: bool) -> None:
        """Nobody but `suspect`; the others keep their caches as long as it has room beside them."""
        roster = self._roster
        others = len(roster.running) - (suspect.cache_id > 0)
        last_hope = not others and not roster.releases
        if suspect.cache_id:
            self._feed([suspect])
            if self.stalled and last_hope and may_ask:
                self._force(suspect)
        elif may_ask:
            self._step_s = 0.0  # it waits for nobody: start it even if it may come late
            self._admit([suspect], force=last_hope)
        if self.empty and others and may_ask and not roster.releases:
            roster.preempt(roster.youngest())  # one a step, until it has room

    def _feed(self, running: Iterable[Sequence]) -> None:
        """Decodes first, then chunks of prompts that are on their way; each in order."""
        page_size = self._limits.page_size
        pages = self.pages_left
        rows, fed = self.rows, self.fed
        prefilling: list[Sequence] = []
        decoding = State.RUNNING
        reserve = 0
        for sequence in running:
            reserve += 1
            kv = sequence.kv
            if sequence.in_flight:
                if not can_go_ahead(sequence):
                    continue
                kv += sequence.in_flight
            elif sequence.waiting:
                continue
            elif sequence.state is not decoding:
                prefilling.append(sequence)
                continue
            if not kv % page_size or sequence.tail_shared:
                if not pages:
                    self.stalled.append(sequence)
                    continue
                pages -= 1
            sequence.in_flight += 1
            sequence.foreseen = True
            rows.append(Row(sequence.cache_id, kv))
            fed.append(sequence)
        self.tokens_left -= len(rows)
        self.pages_left = pages
        self._reserve = reserve
        for sequence in prefilling:
            self._feed_chunk(sequence)

    def _feed_chunk(self, sequence: Sequence) -> None:
        limits = self._limits
        kv, known = sequence.kv, len(sequence.tokens)
        held = limits.pages(kv)
        room = (held + self.pages_left) * limits.page_size - kv  # tokens that the pages allow
        chunk = min(known - kv, limits.chunk_tokens, self.tokens_left)
        if chunk and not room:
            self.stalled.append(sequence)
        elif chunk:
            chunk = min(chunk, room)
            self.pages_left -= limits.pages(kv + chunk) - held
            self.tokens_left -= chunk
            self._add_row(sequence, Row(sequence.cache_id, kv, limit=chunk))
            kv += chunk
        self._reserve += limits.pages(known) - limits.pages(kv)

    def _make_room(self) -> None:
        """Preempt for those who are stalled: the pages come with the next reply."""
        first = self.stalled[0]
        for victim in list(victims(self._roster.running, first, len(self.stalled), self._limits)):
            self._drop(victim)
            self._roster.preempt(victim)

    def _drop(self, sequence: Sequence) -> None:
        """Take its row out of the step again."""
        if sequence in self.fed:
            at = self.fed.index(sequence)
            del self.fed[at], self.rows[at]

    def _force(self, sequence: Sequence) -> None:
        """Ask the executor all the same: it may have more pages than it last said."""
        self.stalled.remove(sequence)
        self.tokens_left = 0  # nothing rides along, drafts least of all
        pending = len(sequence.tokens) - sequence.kv
        limit = 0 if sequence.state is State.RUNNING else min(pending, self._limits.chunk_tokens)
        self._add_row(sequence, Row(sequence.cache_id, sequence.kv, limit=limit))

    def _add_row(self, sequence: Sequence, row: Row) -> None:
        sequence.in_flight = 1
        self.rows.append(row)
        self.fed.append(sequence)

    def _admit(self, waiting: Iterable[Sequence], force: bool) -> None:
        """Open caches in order, until one does not fit: nobody overtakes it, so that it can't starve.

        With `force` the first is tried whatever the page count says: nothing else could free pages.
        """
        for sequence in waiting:
            if len(self._roster.running) >= self._limits.seats or self.tokens_left < 1:
                return
            if len(self._roster.running) and not can_start_in_time(
                sequence, self._limits, self._step_s, self._now
            ):
                continue  # not started; should nothing change it ends at its deadline
            source = sequence.source
            fits = self._fork(sequence, source) if source else self._open(sequence, force)
            if not fits:
                return
            force = False

    def _open(self, sequence: Sequence, force: bool) -> bool:
        """Open with all known tokens; room for them and the next is set aside at once."""
        need = self._limits.pages(len(sequence.tokens) + 1)
        if need > self.pages_left - self._reserve and not force:
            return False
        limit = min(len(sequence.tokens), self._limits.chunk_tokens, self.tokens_left)
        self.pages_left -= need
        self.tokens_left -= limit
        request = sequence.live.request
        self.openings.append(
            Opening(
                cache_id=self._roster.open(sequence, self._now),
                tokens=tuple(sequence.tokens),
                prompt_length=sequence.prompt_length,
                limit=limit,
                sampling=sequence.sampling,
                stop_token_ids=sequence.live.stop_token_ids,
                min_tokens=request.min_tokens,
                salt=request.salt,
            )
        )
        self.opened.append(sequence)
        return True

    def _fork(self, sequence: Sequence, source: Sequence) -> bool:
        """Copy the prompt but its last token from `source`, and feed that one under its own seed.

        Its first write takes a page: a new one, or a copy of the partial page that it shares. The
        source's next write copies that page too, if it still is the source's last.
        """
        length = sequence.prompt_length - 1
        page_size = self._limits.page_size
        shares_tail = length % page_size > 0 and source.kv % page_size > 0
        shares_tail = shares_tail and source.kv // page_size == length // page_size
        need = 2 if shares_tail else 1
        if need > self.pages_left - self._reserve:
            return False
        self.pages_left -= need
        self.tokens_left -= 1
        self._reserve += 1
        cache_id = self._roster.open(sequence, self._now)
        sequence.kv = length
        sequence.shared_tokens = length
        source.tail_shared = source.tail_shared or shares_tail
        self.forks.append(
            Fork(
                source_id=source.cache_id,
                cache_id=cache_id,
                length=length,
                sampling=sequence.sampling,
                stop_token_ids=sequence.live.stop_token_ids,
                min_tokens=sequence.live.request.min_tokens,
            )
        )
        self.forked.append(sequence)
        self._add_row(sequence, Row(cache_id, length, tokens=(sequence.tokens[length],)))
        return True
