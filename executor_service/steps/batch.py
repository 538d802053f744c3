"""The rows of one step: check and reserve each, launch all side by side, commit each.

A row that is refused, before the forward or after it, leaves its sequence as it was.

A batch may be prepared and launched while the one before it, `ahead`, is under way. A sequence's lengths
change only when its row is committed; until then a row behind it goes by what its `Job` foresees
(`overlap.py` says which rows can be foreseen). Device memory follows the order of launches: pages that are
let go of here may be written by what was launched before, and whoever gets them writes them later.

A batch that takes several forwards, because it has many tokens or rows of several steps, has the device for
itself: all of them are computed before anything is committed, so that it can be given up between two.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from executor_service.backends.base import Backend, Flight, ForwardRow, Landed, RowOutput
from executor_service.cache.kv_cache import BlockTable, KvCache, OutOfPages
from executor_service.cache.sequence import Sequence
from executor_service.cache.session import Session
from executor_service.contract.limits import Limits
from executor_service.contract.plan import (
    Opening,
    OutputMode,
    Reason,
    Refusal,
    Row,
    RowResult,
    StepPlan,
    Wanted,
)
from executor_service.steps.job import Job
from executor_service.steps.pieces import cut

_SAMPLE, _NONE = OutputMode.SAMPLE, OutputMode.NONE
_UNANSWERED = RowResult()  # holds an accepted row's place until it is committed or abandoned
_PER_POSITION = ("logprobs", "top_ids", "top_logprobs", "logits")
_NO_JOBS: frozenset[Job] = frozenset()


class Tally(NamedTuple):
    """What a step did, for the counters."""

    tokens_computed: int
    tokens_sampled: int
    drafts_verified: int
    drafts_accepted: int


class Batch:
    """One step's rows. `prepare`, `launch` or `compute`, `commit`; `results` then has one entry per row."""

    def __init__(
        self,
        session: Session,
        plan: StepPlan,
        cache: KvCache,
        backend: Backend,
        limits: Limits,
        now_s: float,
        ahead: Batch | None = None,
    ) -> None:
        self._session, self._plan, self._cache, self._backend = session, plan, cache, backend
        self._limits, self._now_s = limits, now_s
        self._budget = limits.max_step_tokens
        self._steps = 1  # of the row that has the most
        self._quota = session.quota
        self._quota_pages = session.quota.pages_left if session.quota is not None else 0
        self._ahead = ahead  # under way, until this one is launched
        self._behind: Batch | None = None  # launched behind this one, which is under way
        self._places: dict[Sequence, int] | None = None  # in `jobs`, once that was asked
        self._lost: frozenset[Job] = _NO_JOBS  # went by what was foreseen and did not come
        self._computed = self._sampled = self._verified = self._accepted = 0
        self.freed_behind = 0  # pages that undoing rows freed beyond theirs; below 0: released before
        self.jobs: list[Job] = []  # accepted rows, in the order of the launch
        self.opened = 0  # sequences that this step added
        self.prefill_rows = self.decode_rows = 0  # committed; prefill: computed prompt tokens
        self.flight: Flight | None = None  # what is under way
        self.results: list[RowResult] = []

    @property
    def refused(self) -> bool:
        """Whether `prepare` refused any row."""
        return len(self.jobs) < len(self.results)

    @property
    def short(self) -> bool:
        """Whether `prepare` refused a row for want of pages, or of a place for its sequence."""
        refusals = (result.refusal for result in self.results)
        return any(r is not None and r.reason in (Reason.PAGES, Reason.SEQUENCES) for r in refusals)

    @property
    def several(self) -> bool:
        """Whether more than one forward is needed."""
        tokens = self._limits.max_step_tokens - self._budget
        return self._steps > 1 or tokens > self._limits.max_piece_tokens

    @property
    def tally(self) -> Tally:
        """What was computed."""
        return Tally(self._computed, self._sampled, self._verified, self._accepted)

    def prepare(self, live: int, draining: bool) -> None:
        """Check all rows and reserve their pages, rows first, then openings; `live` caches exist."""
        plan, accept = self._plan, self.jobs.append
        twice = self._named_twice()
        for index, row in enumerate(plan.rows):
            if isinstance(row, Refusal):
                job: Job | Refusal = row
            elif twice and row.cache_id in twice:
                job = _invalid(
                    f"rows.cache_ids[{index}]: cache {row.cache_id} has more than one row in the step"
                )
            else:
                job = self._continue(index, row)
            if isinstance(job, Refusal):
                self.results.append(RowResult(refusal=job))
            else:
                accept(job)
                self.results.append(_UNANSWERED)
        for index, opening in enumerate(plan.openings):
            if isinstance(opening, Refusal):
                job = opening
            elif opening.cache_id in twice:
                job = _invalid(
                    f"openings[{index}].cache_id: cache {opening.cache_id} has more than one row in the step"
                )
            elif draining:
                job = Refusal(Reason.DRAINING, "draining: no sequences are opened any more")
            elif live + self.opened >= self._limits.max_sequences:
                job = Refusal(Reason.SEQUENCES, f"all {self._limits.max_sequences} sequences are in use")
            elif self._quota is not None and self._quota.caches_left < 1:
                job = Refusal(Reason.QUOTA, f"openings[{index}]: {self._quota.no_cache()}")
            else:
                job = self._open(index, opening)
            if isinstance(job, Refusal):
                self.results.append(RowResult(refusal=job))
            else:
                accept(job)
                self.results.append(_UNANSWERED)

    def cancel(self) -> None:
        """Take back what `prepare` did, and `compute`; nothing is under way."""
        for job in reversed(self.jobs):
            self._undo(job, job.sequence.length if self._ahead is None else job.start)

    def launch(self) -> None:
        """Begin to compute all accepted rows at once."""
        if not self.jobs:
            return
        self.flight = self._backend.launch([self._forward_row(job, job.fed) for job in self.jobs])
        if self._ahead is not None:
            self._ahead._behind = self
            self._ahead = None

    def compute(self, wanted: Wanted) -> bool:
        """Compute all accepted rows, in several forwards; False, and nothing is committed, if given up.

        A forward feeds at most `max_piece_tokens` tokens, but for a row whose outputs are more.
        """
        answers: dict[Job, RowOutput] = {}
        jobs = self.jobs
        while jobs:
            if not wanted():
                return False
            pieces = cut(jobs, self._limits.max_piece_tokens)
            outputs = self._backend.forward([self._forward_row(job, count) for job, count in pieces])
            _check_count(outputs, len(pieces))
            going_on: dict[Job, None] = {}
            for (job, count), output in zip(pieces, outputs, strict=True):
                if count < job.fed and output.finite:
                    self._computed += count
                    job.start, job.fed = job.start + count, job.fed - count
                elif self._goes_on(job, output):
                    going_on[job] = None
                else:
                    answers[job] = output
            # Rows of several steps come first: they ride along with the pieces of the others.
            jobs = [*going_on, *(job for job in jobs if job not in answers and job not in going_on)]
        self.flight = Landed([answers[job] for job in self.jobs])
        return True

    def commit(self) -> None:
        """Wait, answer every row."""
        if self.opened:
            for job in self.jobs[-self.opened :]:
                self._cache.count_hit(job.known, job.hit)
        if self.flight is not None:
            outputs, lost = self.flight.outputs(), self._lost
            _check_count(outputs, len(self.jobs))
            for job, output in zip(self.jobs, outputs, strict=True):
                if job not in lost:
                    self._absorb(job, output)
            self.flight = None

    def job_of(self, sequence: Sequence) -> Job | None:
        """The sequence's row, if it has one."""
        place = self._place_of(sequence)
        return None if place is None else self.jobs[place]

    def lost(self, job: Job) -> bool:
        """Whether a row under way is refused already, as the one that it followed was undone."""
        return job in self._lost

    def new_prefix(self, job: Job) -> int:
        """How long the first prefix is that may become public when the row is committed; 0: none will."""
        end = (len(job.sequence.table.hashes) + 1) * self._cache.page_size
        return end if job.outputs and end <= job.end else 0

    def _place_of(self, sequence: Sequence) -> int | None:
        if self._places is None:
            self._places = {job.sequence: place for place, job in enumerate(self.jobs)}
        return self._places.get(sequence)

    def _named_twice(self) -> set[int]:
        plan = self._plan
        ids = [item.cache_id for item in plan.rows if not isinstance(item, Refusal)]
        ids += [item.cache_id for item in plan.openings if not isinstance(item, Refusal)]
        if len(set(ids)) == len(ids):
            return set()
        return {cache_id for cache_id, count in Counter(ids).items() if count > 1}

    def _continue(self, index: int, row: Row) -> Job | Refusal:
        """Check one row against its sequence, reserve its pages, put its tokens in place."""
        sequence = self._session.caches.get(row.cache_id)
        if sequence is None:
            return _unknown(index, row)
        sequence.renewed_s = self._now_s
        start, known, follows = sequence.length, sequence.known, -1
        if self._ahead is not None and (place := self._ahead._place_of(sequence)) is not None:
            job = self._ahead.jobs[place]
            start, known = job.end, job.foreseen
            if job.outputs:
                follows = place
        if row.kv_length != start and not (row.is_bound and start < row.kv_length):
            return _unexpected(index, row, start)
        given, drafts, steps = len(row.tokens), len(row.drafts), row.steps
        if given:
            if known > start and not sequence.sampled:
                return _invalid(f"rows.tokens[{index}]: {known - start} tokens of the prompt are pending")
            pending = given
        else:
            pending = known - start
            if not pending:
                return _invalid(f"rows.tokens[{index}]: required, nothing is pending")
        feeds = pending
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
        if over := self._over_quota(sequence.table, 0, end):
            return Refusal(Reason.QUOTA, f"rows.cache_ids[{index}]: {over}")
        try:
            copy = self._cache.reserve(sequence.table, start, end)
        except OutOfPages as error:
            return Refusal(Reason.PAGES, f"rows.cache_ids[{index}]: {error}")
        if copy:
            self._backend.copy_page(*copy)
        self._budget -= end - start
        if steps > self._steps:
            self._steps = steps
        job = Job(index, sequence, start, fed, end, start + pending, row.output, row.top_k)
        job.follows = follows
        sequence.make_room(start + pending + drafts + steps)
        if given:
            if sequence.sampled:
                job.overwritten = sequence.ids.item(start)
            sequence.ids[start : start + given] = row.tokens
        if drafts:
            job.drafts = row.drafts
            sequence.ids[start + pending : start + pending + drafts] = row.drafts
        if feeds == pending and row.output is not _NONE:
            job.outputs = drafts + 1
            job.left = steps
        return job

    def _open(self, index: int, opening: Opening) -> Job | Refusal:
        """Check one opening, share its published prefix, reserve, and add its sequence."""
        session, cache_id = self._session, opening.cache_id
        if session.used(cache_id):
            return Refusal(
                Reason.CACHE_ID_USED,
                f"openings[{index}].cache_id: {cache_id} was used before in this session",
            )
        total = len(opening.tokens)
        table, hit = self._cache.open(opening.salt, opening.tokens)
        pending = total - hit
        fed = min(opening.limit, pending) if opening.limit else pending
        refusal: Refusal | None = None
        if fed > self._budget:
            refusal = self._over_budget(f"openings[{index}].limit", fed)
        elif over := self._over_quota(table, table.count, hit + fed):
            refusal = Refusal(Reason.QUOTA, f"openings[{index}]: {over}")
        else:
            try:
                self._cache.reserve(table, hit, hit + fed)
            except OutOfPages as error:
                refusal = Refusal(Reason.PAGES, f"openings[{index}]: {error}")
        if refusal:
            self._cache.cut(table, 0)
            return refusal
        self._budget -= fed
        sequence = Sequence(
            table,
            np.array(opening.tokens, np.int32),
            length=hit,
            prompt_length=opening.prompt_length,
            sampling=opening.sampling,
            salt=opening.salt,
            renewed_s=self._now_s,
        )
        session.caches[cache_id] = sequence
        self.opened += 1
        index += len(self._plan.rows)
        job = Job(index, sequence, hit, fed, hit + fed, total, opening.output, opening.top_k)
        job.opened, job.hit = cache_id, hit
        if fed == pending and opening.output is not _NONE:
            job.outputs = 1
        sequence.make_room(total + 1)
        return job

    def _over_quota(self, table: BlockTable, held: int, end: int) -> str:
        """Why the row may not have pages up to token `end`; "" if it may. `held`: not counted before."""
        if self._quota is None:
            return ""
        needed = held + max(-(-end // self._cache.page_size) - table.count, 0)
        if needed > self._quota_pages:
            return self._quota.no_page(needed, self._quota_pages)
        self._quota_pages -= needed
        return ""

    def _over_budget(self, field: str, tokens: int) -> Refusal:
        return Refusal(
            Reason.TOO_LARGE,
            f"{field}: {tokens} tokens to compute, but only {self._budget} of the step's "
            f"{self._limits.max_step_tokens} (max_step_tokens) are left",
        )

    def _forward_row(self, job: Job, count: int) -> ForwardRow:
        """The next `count` tokens of a row; all that are left bring its outputs back."""
        sequence, start = job.sequence, job.start
        end = start + count
        history = sequence.ids[:end]
        return ForwardRow(
            start,
            history[start:],
            history,
            sequence.prompt_length,
            sequence.table.pages(),
            job.outputs if count == job.fed else 0,
            job.output,
            sequence.sampling,
            job.top_k,
            sequence.salt,
            job.follows,
        )

    def _goes_on(self, job: Job, output: RowOutput) -> bool:
        """Whether a row of several steps feeds what it sampled, which it then is ready for."""
        if job.left == 1 or not output.finite:
            return False
        assert output.tokens is not None
        (token,) = output.tokens.tolist()
        if token in job.sequence.sampling.stop_token_ids:
            return False
        end = job.start + job.fed
        self._computed += job.fed
        job.tokens.append(token)
        job.parts.append(output)
        job.sequence.ids[end] = token
        job.left -= 1
        job.start, job.fed = end, 1
        return True

    def _absorb(self, job: Job, output: RowOutput) -> None:
        """Take a row's last output, and commit it."""
        sequence = job.sequence
        if not output.finite:
            self._abandon(job)
            return
        end = job.start + job.fed
        self._computed += job.fed
        if job.output is not _SAMPLE or not job.outputs:
            sequence.sampled = False
            self._finish(job, end, max(job.known, end), output)
            return
        tokens = output.tokens
        if tokens is None or len(tokens) != job.outputs:
            raise RuntimeError("the backend brought back the wrong number of tokens")
        drafts = len(job.drafts)
        if drafts:
            # Equality is acceptance: t[i] is what the target samples after drafts[:i].
            wrong = np.flatnonzero(tokens[:-1] != job.drafts)
            accepted = int(wrong[0]) if wrong.size else drafts
            self._verified += drafts
            self._accepted += accepted
            end -= drafts - accepted
            emitted = tokens[: accepted + 1].tolist()
            _keep(output, accepted + 1)
        else:
            emitted = tokens.tolist()
        job.tokens += emitted
        sequence.ids[end] = emitted[-1]
        if job.parts:
            output = _joined([*job.parts, output])
        self._sampled += len(job.tokens)
        sequence.sampled = True
        self._finish(job, end, end + 1, output)

    def _finish(self, job: Job, length: int, known: int, output: RowOutput) -> None:
        """Commit a row: `length` tokens have KV, `known` are known."""
        sequence, cache = job.sequence, self._cache
        table = sequence.table
        if job.in_prompt:
            self.prefill_rows += 1
        else:
            self.decode_rows += 1
        sequence.length, sequence.known = length, known
        full = length // cache.page_size
        # Pages become public only behind an output that was finite: it attended to all of them, so
        # a chunk that brings nothing back leaves its pages to the row that does.
        if job.outputs and full > len(table.hashes) and table.count:  # 0: it was released meanwhile
            cache.publish(table, sequence.ids, length)
        if length < job.end:
            cache.cut(table, length)  # reserved for drafts or steps that were not taken
        self.results[job.index] = RowResult(
            length, job.hit, job.tokens, output.logprobs, output.top_ids, output.top_logprobs, output.logits
        )

    def _abandon(self, job: Job) -> None:
        """Undo a row whose logits were not finite, and with it the row that follows it."""
        length, pages_for = job.sequence.length, self._cache.pages_for
        kept = 0 if job.opened else pages_for(length)
        self.freed_behind += max(kept, job.sequence.table.count) - pages_for(job.end)
        self._undo(job, length)
        if self._behind is not None:
            self._behind._lose(job)
        self.results[job.index] = RowResult(
            refusal=Refusal(Reason.NOT_FINITE, "the logits were NaN or infinite")
        )

    def _undo(self, job: Job, length: int) -> None:
        """Make the sequence what it was with `length` tokens cached, before this row."""
        sequence = job.sequence
        if job.overwritten >= 0:
            sequence.ids[length] = job.overwritten
        self._cache.cut(sequence.table, 0 if job.opened else length)
        if job.opened:
            del self._session.caches[job.opened]
            self.opened -= 1

    def _lose(self, undone: Job) -> None:
        """Refuse the row behind one that was undone, if there is one; its pages are gone already."""
        job = self.job_of(undone.sequence)
        if job is None:
            return
        row = self._plan.rows[job.index]
        assert isinstance(row, Row)
        self._lost |= {job}
        if undone.opened:
            refusal = _unknown(job.index, row)
        else:
            refusal = _unexpected(job.index, row, undone.sequence.length)
        self.results[job.index] = RowResult(refusal=refusal)


def _unknown(index: int, row: Row) -> Refusal:
    return Refusal(Reason.CACHE, f"rows.cache_ids[{index}]: unknown or released cache {row.cache_id}")


def _unexpected(index: int, row: Row, length: int) -> Refusal:
    return Refusal(
        Reason.KV_LENGTH, f"rows.kv_lengths[{index}]: expected {row.kv_length}, is {length}", length
    )


def _invalid(message: str) -> Refusal:
    return Refusal(Reason.INVALID, message)


def _check_count(outputs: list[RowOutput], rows: int) -> None:
    if len(outputs) != rows:
        raise RuntimeError(f"the backend answered {len(outputs)} of {rows} rows")


def _keep(output: RowOutput, count: int) -> None:
    """Keep the first `count` output positions."""
    for name in _PER_POSITION:
        array = getattr(output, name)
        if array is not None:
            setattr(output, name, array[:count])


def _joined(parts: list[RowOutput]) -> RowOutput:
    """The outputs of several forwards of one row, one after another."""
    joined = RowOutput()
    for name in _PER_POSITION:
        if getattr(parts[0], name) is not None:
            setattr(joined, name, np.concatenate([getattr(part, name) for part in parts]))
    return joined
