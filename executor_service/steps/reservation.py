"""`RowReservation`: checks the rows of a step against their sequences, and reserves their pages."""

from __future__ import annotations

from collections import Counter

import numpy as np

from executor_service.backends.base import Backend
from executor_service.cache.block_table import BlockTable
from executor_service.cache.kv_cache import OutOfPages
from executor_service.cache.sequence import CachedSequence
from executor_service.cache.sequence_store import SequenceStore
from executor_service.cache.session import ClientSession
from executor_service.contract.plan import (
    Opening,
    OutputMode,
    PoolingKind,
    Reason,
    Refusal,
    Row,
    RowResult,
    RowResults,
    Sampling,
    StepPlan,
)
from executor_service.steps.accepted_row import AcceptedRow, scored_by
from executor_service.steps.masking import constrain_opening, constrain_row
from executor_service.steps.step_rows import StepRows, unexpected_length, unknown_cache

_NONE, _HIDDEN, _MEAN = OutputMode.NONE, OutputMode.HIDDEN, PoolingKind.MEAN
_ALTERNATIVE_BYTES = 9  # an id of up to 5 bytes, and its logprob


class RowReservation:
    """Reserves the rows of one step, all or nothing for each row; used once.

    `ahead` are the rows of the newest step in flight. A row after one of them starts at the KV length that
    this one leaves if all its drafts are accepted; what is reserved for it is enough if they are not
    (`overlap.py` says which rows can be reserved so).

    Device memory follows the order of launches: a page released here may still be written by an earlier
    launch; its next owner's launch comes later and overwrites that.
    """

    def __init__(
        self,
        session: ClientSession,
        plan: StepPlan,
        store: SequenceStore,
        backend: Backend,
        now_s: float,
        ahead: StepRows | None = None,
    ) -> None:
        self._session, self._plan, self._store, self._backend = session, plan, store, backend
        self._pages, self._limits, self._now_s, self._ahead = store.pages, store.limits, now_s, ahead
        self._places = {} if ahead is None else ahead.places
        self._budget = self._limits.max_step_tokens
        self._score_bytes = self._limits.max_full_logits_bytes  # of scores that the reply has room for
        self._quota = session.quota
        self._quota_pages = session.quota.pages_left if session.quota is not None else 0
        self._planned = plan.rows
        self._rows = StepRows(session, plan, [], RowResults(len(plan.rows) + len(plan.openings)))

    def reserve(self) -> StepRows:
        """Check and reserve every row, rows first, then openings."""
        planned, openings, duplicates = self._planned, self._plan.openings, self._duplicates()
        decoding = self._decoding(duplicates)
        index = 0
        while (index := self._reserve_decodes(index, decoding)) < len(planned):
            row = planned[index]
            if isinstance(row, Refusal):
                self._add(index, row)
            elif row.cache_id in duplicates:
                self._add(index, _duplicate(f"rows.cache_ids[{index}]", row.cache_id))
            else:
                self._add(index, self._continue(index, row))
            index += 1
        for place, opening in enumerate(openings, start=len(planned)):
            index = place - len(planned)
            if isinstance(opening, Refusal):
                self._add(place, opening)
            elif opening.cache_id in duplicates:
                self._add(place, _duplicate(f"openings[{index}].cache_id", opening.cache_id))
            else:
                self._add(place, self._no_room(index) or self._open(index, opening))
        self._rows.tokens = self._limits.max_step_tokens - self._budget
        return self._rows

    def _add(self, place: int, row: AcceptedRow | Refusal) -> None:
        """Add a row, as accepted or with its refusal as its result; `place`: among the results."""
        if isinstance(row, Refusal):
            self._rows.results[place] = RowResult(refusal=row)
        else:
            self._rows.accepted.append(row)

    def _duplicates(self) -> set[int]:
        """Cache ids that are in more than one row of the step."""
        opened = [item.cache_id for item in self._plan.openings if not isinstance(item, Refusal)]
        ids = self._planned.cache_ids + opened
        if len(set(ids)) == len(ids):
            return set()
        items = (*self._planned, *self._plan.openings)
        counts = Counter(item.cache_id for item in items if not isinstance(item, Refusal))
        return {cache_id for cache_id, count in counts.items() if count > 1}

    def _decoding(self, duplicates: set[int]) -> list[CachedSequence | None]:
        """For each row its sequence, where the row only decodes; None for other rows and for duplicates."""
        ids = self._planned.cache_ids
        sequences = list(map(self._session.caches.get, ids))
        for index in self._planned.others:
            sequences[index] = None
        if duplicates:
            return [None if i in duplicates else sequence for i, sequence in zip(ids, sequences, strict=True)]
        return sequences

    def _no_room(self, index: int) -> Refusal | None:
        """The refusal of any opening, whatever its prompt; None: a sequence can be opened."""
        store, limit = self._store, self._limits.max_sequences
        if store.draining:
            return Refusal(Reason.DRAINING, "draining: no sequences are opened any more")
        if store.count >= limit:
            return Refusal(Reason.SEQUENCES, f"all {limit} sequences are in use")
        if self._quota is not None and self._quota.caches_left < 1:
            return Refusal(Reason.QUOTA, f"openings[{index}]: {self._quota.no_cache()}")
        return None

    def _reserve_decodes(self, first: int, decoding: list[CachedSequence | None]) -> int:
        """Reserve the rows from `first` on that only decode, as some of `StepRows.decodes`.

        Returns the index of the first row that is another one, or can't be reserved without a further check;
        nothing has changed for it. `decoding`: what `_decoding` returns.
        """
        lengths, ahead, place_of = self._planned.kv_lengths, self._ahead, self._places.get
        starts_ahead = [] if ahead is None else ahead.decodes.starts
        context, now_s = self._limits.context_length, self._now_s
        sequences: list[CachedSequence] = []
        starts: list[int] = []
        follows: list[int] = []
        for index in range(first, min(len(decoding), first + self._budget)):
            sequence = decoding[index]
            if sequence is None or not sequence.only_draws:
                break
            place = place_of(sequence, -1)
            if 0 <= place < len(starts_ahead):
                start = starts_ahead[place] + 1
            elif ahead is not None and place >= 0:
                former = ahead.row_at(place)
                if not former.outputs:
                    break  # it computes the rest of a prompt
                start = former.end
            elif sequence.sampled:
                start = sequence.length
            else:
                break
            if lengths[index] != start or start >= context:
                break
            if start >= sequence.table.private_end and not self._reserve_page(sequence, start):
                break
            sequence.renewed_s = now_s
            if start + 2 > len(sequence.ids):
                sequence.make_room(start + 2)
            sequences.append(sequence)
            starts.append(start)
            follows.append(place)
        self._budget -= len(starts)
        self._rows.decodes.extend(first, sequences, starts, follows)
        return first + len(starts)

    def _reserve_page(self, sequence: CachedSequence, start: int) -> bool:
        """Make position `start` of a sequence writable. False: it needs a further check; nothing changed."""
        if self._quota is not None:
            return False
        try:
            copy = self._pages.reserve(sequence.table, start, start + 1)
        except OutOfPages:
            return False
        if copy:
            self._backend.copy_page(*copy)
        return True

    def _continue(self, index: int, row: Row) -> AcceptedRow | Refusal:
        """Check a row against its sequence, reserve its pages and write its tokens into the sequence."""
        sequence = self._session.caches.get(row.cache_id)
        if sequence is None:
            return unknown_cache(index, row)
        sequence.renewed_s = self._now_s
        start, known, follows, slack = sequence.length, sequence.known, -1, 0
        if self._ahead is not None and (place := self._places.get(sequence, -1)) >= 0:
            ahead = self._ahead.row_at(place)
            start, known = ahead.end, ahead.max_known
            if ahead.outputs:
                follows, slack = place, ahead.open_drafts
        if row.kv_length != start and not (row.is_bound and start < row.kv_length):
            return unexpected_length(index, row, start)
        given, drafts, steps = len(row.tokens), len(row.drafts), row.steps
        if given:
            if known > start and not sequence.sampled:
                return _invalid(f"rows.tokens[{index}]: {known - start} tokens of the prompt are pending")
            pending = given
        else:
            pending = known - start
            if not pending:
                return _invalid(f"rows.tokens[{index}]: required, nothing is pending")
        feeds, to_verify, masks = pending, row.drafts, None
        masked_later = follows >= 0 and sequence.automaton is not None and row.output is OutputMode.SAMPLE
        if (sequence.automaton is not None or row.masks is not None) and not masked_later:
            samples = not 0 < row.limit < pending
            constrained = constrain_row(index, row, sequence, start + pending, samples=samples)
            if isinstance(constrained, Refusal):
                return constrained
            to_verify, masks = constrained
            drafts = len(to_verify)
        if 0 < row.limit < pending:
            feeds = row.limit
            if drafts or steps > 1:
                return _invalid(
                    f"rows.limits[{index}]: {feeds} of {pending} pending, drafts and steps need all"
                )
        fed = feeds + drafts
        end = start + fed + steps - 1
        if end > self._limits.context_length:
            return _invalid(
                f"rows.kv_lengths[{index}]: {start} and {end - start} more tokens exceed the context length "
                f"{self._limits.context_length}"
            )
        if end - start > self._budget:
            return self._over_budget(f"rows.limits[{index}]", end - start)
        # After a row in flight that samples, all tokens of the opening are computed.
        if (
            row.output is _HIDDEN
            and sequence.pooling is _MEAN
            and (sequence.hidden_sum is None or follows >= 0)
        ):
            return _invalid(
                f"rows.outputs[{index}]: POOLING_MEAN has no vector after the opening's tokens, or after a "
                "truncation"
            )
        score_bytes = 0
        if sequence.scored:
            score_bytes = _score_bytes(scored_by(sequence.scored, start, start + fed), sequence.sampling)
            if over := self._over_scores(score_bytes):
                return Refusal(Reason.TOO_LARGE, f"rows.limits[{index}]: {over}")
        quota_pages = self._pages_of_quota(sequence.table, 0, end)
        if quota_pages > self._quota_pages:
            return self._over_quota(f"rows.cache_ids[{index}]", quota_pages)
        try:
            copy = self._pages.reserve(sequence.table, start, end)
        except OutOfPages as error:
            return Refusal(Reason.PAGES, f"rows.cache_ids[{index}]: {error}")
        if copy:
            self._backend.copy_page(*copy)
        self._budget -= end - start
        self._score_bytes -= score_bytes
        self._quota_pages -= quota_pages
        if steps > self._rows.steps:
            self._rows.steps = steps
        accepted = AcceptedRow(index, sequence, start, fed, end, start + pending, row.output, row.top_k)
        accepted.follows, accepted.slack, accepted.masked_later = follows, slack, masked_later
        self._rows.masked_later |= masked_later
        sequence.make_room(start + pending + drafts + steps)
        if given:
            if sequence.sampled:
                accepted.overwritten = sequence.ids.item(start)
            sequence.ids[start : start + given] = row.tokens
        if drafts:
            accepted.drafts = to_verify
            sequence.ids[start + pending : start + pending + drafts] = to_verify
        if feeds == pending and row.output is not _NONE:
            accepted.outputs = drafts + 1
            accepted.left = steps
            accepted.masks = masks
        return accepted

    def _open(self, index: int, opening: Opening) -> AcceptedRow | Refusal:
        """Check an opening, share its published prefix, reserve the rest, and add its sequence."""
        session, cache_id = self._session, opening.cache_id
        if session.used(cache_id):
            return Refusal(
                Reason.CACHE_ID_USED,
                f"openings[{index}].cache_id: {cache_id} was used before in this session",
            )
        adapters = self._store.adapters
        adapter = adapters.find(opening.adapter) if opening.adapter else None
        if opening.adapter and adapter is None:
            return Refusal(
                Reason.ADAPTER, f"openings[{index}].adapter: {opening.adapter.hex()[:16]}... is not loaded"
            )
        total = len(opening.tokens)
        table, hit = self._pages.open(opening.salt, opening.tokens[: opening.max_hit + 1], opening.adapter)
        pending = total - hit
        fed = min(opening.limit, pending) if opening.limit else pending
        grammar = opening.sampling.grammar
        automaton = None
        if grammar is not None:
            output = opening.tokens[opening.prompt_length :]
            automaton = self._store.replays.automaton(session, grammar, output)
        samples = fed == pending and opening.output is OutputMode.SAMPLE
        constrained = constrain_opening(index, opening, automaton, samples=samples)
        scored = range(opening.scored_from, total) if opening.scored_from else range(0)
        score_bytes = _score_bytes(scored_by(scored, hit, hit + fed), opening.sampling)
        quota_pages = self._pages_of_quota(table, table.count, hit + fed)
        refusal: Refusal | None = None
        if isinstance(constrained, Refusal):
            refusal = constrained
        elif fed > self._budget:
            refusal = self._over_budget(f"openings[{index}].limit", fed)
        elif over := self._over_scores(score_bytes):
            refusal = Refusal(Reason.TOO_LARGE, f"openings[{index}].scored_from: {over}")
        elif quota_pages > self._quota_pages:
            refusal = self._over_quota(f"openings[{index}]", quota_pages)
        elif not adapters.has_room(adapter):
            refusal = Refusal(
                Reason.ADAPTER_SLOTS,
                f"openings[{index}].adapter: all {self._limits.max_adapter_slots} slots "
                "(max_adapter_slots) hold adapters of live caches",
            )
        else:
            try:
                self._pages.reserve(table, hit, hit + fed)
                adapters.hold(adapter)
            except OutOfPages as error:
                refusal = Refusal(Reason.PAGES, f"openings[{index}]: {error}")
        if refusal:
            self._pages.cut(table, 0)
            return refusal
        self._budget -= fed
        self._score_bytes -= score_bytes
        self._quota_pages -= quota_pages
        sequence = CachedSequence(
            table,
            np.array(opening.tokens, np.int32),
            length=hit,
            prompt_length=opening.prompt_length,
            sampling=opening.sampling,
            salt=opening.salt,
            renewed_s=self._now_s,
            automaton=automaton,
            adapter=adapter,
            pooling=opening.pooling,
            hidden_sum=np.zeros(self._limits.hidden_size) if opening.pooling is _MEAN else None,
            scored=scored,
        )
        self._store.add(session, cache_id, sequence)
        index += len(self._plan.rows)
        accepted = AcceptedRow(index, sequence, hit, fed, hit + fed, total, opening.output, opening.top_k)
        accepted.opened, accepted.hit = cache_id, hit
        if fed == pending and opening.output is not _NONE:
            accepted.outputs = 1
            accepted.masks = None if isinstance(constrained, Refusal) else constrained
        sequence.make_room(total + 1)
        return accepted

    def _over_scores(self, needed: int) -> str:
        """The error message if scores of this many bytes make the reply too large; else ""."""
        if needed <= self._score_bytes:
            return ""
        return (
            f"{needed} bytes of scores, but only {self._score_bytes} of the step's "
            f"{self._limits.max_full_logits_bytes} (max_full_logits_bytes) are left"
        )

    def _pages_of_quota(self, table: BlockTable, held: int, end: int) -> int:
        """How many pages up to token `end` the session's quota does not count yet; 0 if it has none.

        `held`: how many of the table's own pages these are.
        """
        if self._quota is None:
            return 0
        return held + max(self._pages.pages_for(end) - table.count, 0)

    def _over_quota(self, field: str, needed: int) -> Refusal:
        assert self._quota is not None
        return Refusal(Reason.QUOTA, f"{field}: {self._quota.no_page(needed, self._quota_pages)}")

    def _over_budget(self, field: str, tokens: int) -> Refusal:
        return Refusal(
            Reason.TOO_LARGE,
            f"{field}: {tokens} tokens to compute, but only {self._budget} of the step's "
            f"{self._limits.max_step_tokens} (max_step_tokens) are left",
        )


def _score_bytes(tokens: range, sampling: Sampling) -> int:
    """The maximum size of these tokens' scores in a reply."""
    return len(tokens) * (4 + _ALTERNATIVE_BYTES * (sampling.logprobs or 0))


def _duplicate(field: str, cache_id: int) -> Refusal:
    return _invalid(f"{field}: cache {cache_id} has more than one row in the step")


def _invalid(message: str) -> Refusal:
    return Refusal(Reason.INVALID, message)
