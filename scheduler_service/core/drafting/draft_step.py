"""One step of the draft executor, while it is built and while it is unanswered."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler_service.core.drafting.draft_cache import DraftCache
from scheduler_service.core.joint_limits import JointLimits
from scheduler_service.core.speculation.step_time import Work
from scheduler_service.core.step import CacheOpening, CacheRow, CacheTruncation, PlannedStep


@dataclass(slots=True)
class DraftStep:
    """A step that was sent and is not answered yet."""

    plan: PlannedStep
    parts: list[tuple[DraftCache, int]]  # rows, then openings: the known tokens that each covers
    work: Work
    sent_at: float  # seconds, on the caller's clock


class DraftStepBuilder:
    """Collects rows, openings and truncates of one step, within its rows, tokens and pages."""

    def __init__(self, limits: JointLimits, pages: int) -> None:
        """pages: those that the draft executor has available."""
        self._limits = limits
        self._pages = pages
        self.tokens_left = limits.step_tokens
        self.rows: list[CacheRow] = []
        self.openings: list[CacheOpening] = []
        self.truncates: list[CacheTruncation] = []
        self.fed: list[tuple[DraftCache, int]] = []  # of `rows`, as in `DraftStep.parts`
        self.opened: list[tuple[DraftCache, int]] = []  # of `openings`
        self.work = Work(0, 0)

    @property
    def full(self) -> bool:
        """The step can take no further row or no further token."""
        return self.tokens_left < 1 or len(self.rows) + len(self.openings) >= self._limits.max_sequences

    def feed(self, cache: DraftCache, drafts: int, budget: int) -> bool:
        """Add a row that feeds at most `budget` known tokens and then makes `drafts` drafts.

        A step that has too few tokens left takes less of both; a full one takes nothing, and the sequence is
        asked about again for the next step. Returns False if there are not enough pages.
        """
        if self.full:
            return True
        tokens, valid = cache.sequence.tokens, cache.valid
        known = len(tokens)
        end = min(known, valid + min(budget, self.tokens_left))
        steps = max(1, min(drafts, self.tokens_left - (end - valid) + 1)) if end == known else 1
        computed = end + steps - 1
        page_size = self._limits.page_size
        copies = valid < cache.kv and valid % page_size > 0  # one page: the last one may be shared
        if not self._take(self._limits.pages(computed) - self._limits.pages(valid) + copies):
            return False
        pending = max(0, cache.given - cache.kv)
        if pending and (end < cache.given or end == cache.given == known):
            row = CacheRow(cache.cache_id, valid, limit=end - valid if end < cache.given else 0, steps=steps)
        else:
            if valid < cache.kv or pending:
                self.truncates.append(CacheTruncation(cache.cache_id, valid))
                cache.given = 0
            row = CacheRow(cache.cache_id, valid, tokens=tuple(tokens[valid:end]), steps=steps)
        self.rows.append(row)
        self.fed.append((cache, end))
        self._note(end - valid, computed, steps)
        return True

    def open(self, cache: DraftCache, budget: int) -> bool:
        """Open the cache with all known tokens, and compute at most `budget` of them.

        Returns False if the step is full or there are not enough pages.
        """
        sequence = cache.sequence
        known = len(sequence.tokens)
        if self.full or not self._take(self._limits.pages(known + 1)):
            return False
        fed = min(known, budget, self.tokens_left)
        live = sequence.live
        self.openings.append(
            CacheOpening(
                cache_id=cache.cache_id,
                tokens=tuple(sequence.tokens),
                prompt_length=sequence.prompt_length,
                limit=fed,
                sampling=replace(sequence.sampling, logprobs=None),
                stop_token_ids=live.stop_token_ids,
                min_tokens=live.request.min_tokens,
                salt=live.request.salt,
                adapter=b"",  # drafts come from the draft model as it is
            )
        )
        self.opened.append((cache, known))
        self._note(fed, fed, 1)
        return True

    def _take(self, pages: int) -> bool:
        """Take pages for a row or an opening; False: there are not enough, and none is taken."""
        if pages > self._pages:
            return False
        self._pages -= pages
        return True

    def _note(self, fed: int, context: int, steps: int) -> None:
        """Count a row or an opening in the step's tokens and work."""
        self.tokens_left -= fed + steps - 1
        work = self.work
        work.rows += 1
        work.tokens += fed
        work.context += context
        work.steps = max(work.steps, steps)
