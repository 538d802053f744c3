"""`GrammarConditions`: counts what happened to sequences with a grammar, so that no test of it is empty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler_service.core.request import DraftSource
from scheduler_service.core.schedule import ScheduledFork, ScheduledOpening, ScheduledRow
from scheduler_service.core.step import (
    CacheFork,
    CacheOpening,
    CacheRow,
    PlannedStep,
    RefusalCause,
    StepAnswer,
)
from tests.unit.scheduler.harness import Harness, parts

PLAIN = (
    "completions",
    "preempted",
    "prompts in chunks",
    "outputs replayed",
    "refused until their output was read",
    "forks",
    "lost amid the output",
)
"""What befalls sequences with a grammar in any schedules with losses and small pools."""
AHEAD = "rows sent behind an unanswered one"
TRUNCATED = "draft caches truncated"
REJECTED_FORCED = f"{DraftSource.GRAMMAR.value} drafts rejected"
"""Never: what a grammar forces is what is sampled."""
DRAFTED = tuple(
    name
    for source in DraftSource
    for end in ("accepted", "rejected")
    if (name := f"{source.value} drafts {end}") != REJECTED_FORCED
)


class GrammarConditions:
    """Of one run of a harness; `counts` by the names above."""

    def __init__(self, harness: Harness) -> None:
        self.counts: Counter[str] = Counter()
        self._harness = harness
        self._caches: set[int] = set()  # of sequences with a grammar; ids are never used twice
        self._draft_caches: set[int] = set()  # the same on the draft executor
        self._opened: set[tuple[str, int]] = set()  # sequences that had a cache since the last loss
        self._sources: dict[tuple[int, int], DraftSource] = {}  # by step and cache, of the drafts in flight

    def sent(self, plan: PlannedStep, unanswered: Iterable[PlannedStep]) -> None:
        """A step goes out behind those that are not answered yet."""
        for opening in plan.openings:
            if opening.sampling.grammar is not None:
                self._open(opening)
                self.counts["prompts in chunks"] += opening.limit < opening.prompt_length
                self.counts["outputs replayed"] += len(opening.tokens) > opening.prompt_length
        for fork in plan.forks:
            if fork.sampling.grammar is not None:
                self._open(fork)
                self.counts["forks"] += 1
        ahead = {part.cache_id for step in unanswered for part in parts(step)}
        for row in plan.rows:
            if row.cache_id in self._caches:
                self.counts[AHEAD] += row.cache_id in ahead
                if row.drafts:
                    self._sources[plan.number, row.cache_id] = _source(row)

    def _open(self, cache: CacheOpening | CacheFork) -> None:
        assert isinstance(cache, ScheduledOpening | ScheduledFork)
        self._caches.add(cache.cache_id)
        key = cache.sequence.live.request.id, cache.sequence.index
        self.counts["preempted"] += key in self._opened
        self._opened.add(key)

    def answered(self, plan: PlannedStep, answer: StepAnswer) -> None:
        """The oldest step is answered."""
        behind = sum(row.cause is RefusalCause.GRAMMAR_BEHIND for row in answer.rows)
        self.counts["refused until their output was read"] += behind
        for row, result in zip(plan.rows, answer.rows, strict=False):
            source = self._sources.pop((plan.number, row.cache_id), None)
            if source is not None and result.tokens:
                accepted = len(result.tokens) - 1
                self.counts[f"{source.value} drafts accepted"] += accepted
                self.counts[f"{source.value} drafts rejected"] += len(row.drafts) - accepted

    def sent_to_draft(self, plan: PlannedStep) -> None:
        """A step goes to the draft executor."""
        self._draft_caches |= {one.cache_id for one in plan.openings if one.sampling.grammar is not None}
        self.counts[TRUNCATED] += sum(cut.cache_id in self._draft_caches for cut in plan.truncates)

    def losing(self) -> None:
        """The executor is about to be lost."""
        for sequence in self._harness.core._pool.running:
            has_output = len(sequence.tokens) > sequence.prompt_length
            self.counts["lost amid the output"] += has_output and sequence.cache_id in self._caches
        self._opened.clear()

    def ended(self) -> None:
        """The run has ended."""
        for request_id, _ in self._harness.finished:
            constrained = self._harness.requests[request_id].sampling.grammar is not None
            self.counts["completions"] += constrained


def _source(row: CacheRow) -> DraftSource:
    assert isinstance(row, ScheduledRow)
    assert row.source is not None
    return row.source
