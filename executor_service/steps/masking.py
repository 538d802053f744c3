"""What the tokens of a row may be: by its sequence's grammar, and by masks of its own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from executor_service.backends.base import PendingForward
from executor_service.cache.sequence import CachedSequence
from executor_service.cache.sequence_store import SequenceStore
from executor_service.contract.grammar import GrammarStuck, ReplayUnfinished
from executor_service.contract.masks import Masks
from executor_service.contract.plan import Opening, OutputMode, Reason, Refusal, Row, TokenIds
from executor_service.grammar.automaton import Automaton
from executor_service.steps.step_rows import StepRows


class Constrained(NamedTuple):
    """The drafts of a row that are worth verifying, and masks [1 + drafts, bytes]; None: anything goes."""

    drafts: TokenIds
    masks: Masks | None


def constrain_row(
    index: int, row: Row, sequence: CachedSequence, end: int, *, samples: bool
) -> Constrained | Refusal:
    """The constraints of a row after which `end` tokens are known, and its refusal if it can't meet them.

    Drafts end before one that is not allowed, or after which nothing is: it would not be accepted.
    """
    automaton, drafts, masks = sequence.automaton, row.drafts, row.masks
    samples = samples and row.output is OutputMode.SAMPLE
    if automaton is not None and (samples or len(row.tokens)):
        try:
            if why := automaton.why_not(_output_behind(row, sequence, end)):
                return Refusal(Reason.GRAMMAR, f"rows.tokens[{index}]: {why}")
            own = _masks_along(automaton, drafts) if samples else None
        except (GrammarStuck, ReplayUnfinished) as error:
            return _refusal(f"rows.cache_ids[{index}]", error)
        if own is not None:
            drafts = drafts[: len(own) - 1]
            masks = own if masks is None else own & masks[: len(own)]
    if masks is None or not samples:
        return Constrained(drafts, None)
    if row.masks is None:  # what a grammar allows is never nothing
        return Constrained(drafts, masks)
    if not masks[0].any():
        return Refusal(Reason.GRAMMAR, f"rows.masks[{index}]: it and the grammar have no token in common")
    return _without_dead_ends(drafts, masks)


def constrain_opening(
    index: int, opening: Opening, automaton: Automaton | None, *, samples: bool
) -> Masks | Refusal | None:
    """The masks [1, bytes] of an opening, or its refusal; `automaton`: one of its grammar."""
    masks = opening.mask if samples else None
    if automaton is None:
        return masks
    try:
        if why := automaton.why_not(opening.tokens[opening.prompt_length :]):
            return Refusal(Reason.GRAMMAR, f"openings[{index}].tokens: {why}")
        if not samples:
            return None
        own = automaton.mask()[None]
    except (GrammarStuck, ReplayUnfinished) as error:
        return _refusal(f"openings[{index}].sampling.grammar", error)
    masks = own if masks is None else own & masks
    if not masks.any():
        return Refusal(Reason.GRAMMAR, f"openings[{index}].mask: it and the grammar have no token in common")
    return masks


def prepare_mask(sequence: CachedSequence) -> None:
    """Compute the mask after a sequence's known tokens, for its next row."""
    if sequence.automaton is not None and sequence.table.count:
        masks_behind(sequence, sequence.known)


def bring_masks(rows: StepRows, forward: PendingForward, store: SequenceStore) -> None:
    """Bring the masks of a step in flight, now that the rows are committed that its rows follow.

    A row after which its grammar allows nothing is refused, and drafts that it does not allow are dropped,
    as they would have been at its reservation.
    """
    if not rows.masked_later:
        return
    masks: dict[int, Masks | None] = {}
    for place, row in enumerate(rows.accepted, start=len(rows.decodes)):
        if not row.masked_later:
            continue
        masks[place] = None
        if row.sequence in rows.mispredicted:
            continue
        sequence = row.sequence
        assert sequence.automaton is not None
        try:
            sequence.automaton.follow(sequence.ids[sequence.prompt_length : sequence.known])
            masks[place] = own = _masks_along(sequence.automaton, row.drafts)
        except (GrammarStuck, ReplayUnfinished) as error:
            rows.refuse_late(row, _refusal(f"rows.cache_ids[{row.index}]", error), store)
            continue
        if len(own) <= len(row.drafts):
            row.drop_drafts(len(own) - 1)
            store.pages.cut(sequence.table, row.end)
    forward.constrain(masks)


def masks_behind(sequence: CachedSequence, end: int) -> Masks | None:
    """The mask [1, bytes] after `end` tokens of a sequence with a grammar.

    None: nothing is allowed, or finding out takes a replay that is unfinished.
    """
    assert sequence.automaton is not None
    try:
        sequence.automaton.follow(sequence.ids[sequence.prompt_length : end])
        return sequence.automaton.mask()[None]
    except (GrammarStuck, ReplayUnfinished):
        return None


def forced_behind(sequence: CachedSequence, max_tokens: int) -> list[int]:
    """The tokens, `max_tokens` at most, that a sequence's grammar forces after its known ones."""
    assert sequence.automaton is not None
    try:
        sequence.automaton.follow(sequence.ids[sequence.prompt_length : sequence.known])
        return sequence.automaton.forced()[:max_tokens]
    except (GrammarStuck, ReplayUnfinished):
        return []


def _refusal(field: str, error: GrammarStuck | ReplayUnfinished) -> Refusal:
    unfinished = isinstance(error, ReplayUnfinished)
    return Refusal(Reason.GRAMMAR_BEHIND if unfinished else Reason.GRAMMAR, f"{field}: {error}")


def _output_behind(row: Row, sequence: CachedSequence, end: int) -> TokenIds:
    """The output of a sequence once a row is fed after which `end` tokens are known, drafts excluded."""
    known = sequence.ids[:end]
    if given := len(row.tokens):
        known = np.concatenate([known[: end - given], row.tokens])
    return known[sequence.prompt_length :]


def _masks_along(automaton: Automaton, drafts: TokenIds) -> Masks:
    """The mask here and after each draft, as far as these are allowed and something is after them.

    Raises GrammarStuck if nothing is allowed here, and ReplayUnfinished.
    """
    masks = [automaton.mask()]
    if not len(drafts):
        return masks[0][None]
    for draft in drafts.tolist():
        if not masks[-1][draft >> 3] >> (draft & 7) & 1:
            break
        try:
            if not automaton.push(draft):
                break
            masks.append(automaton.mask())
        except (GrammarStuck, ReplayUnfinished):
            break
    return np.stack(masks)


def _without_dead_ends(drafts: TokenIds, masks: Masks) -> Constrained:
    """Drafts and masks up to the first mask that allows no token; the first one does.

    That position would have no token to sample, so the draft that leads to it must not be accepted.
    """
    some = masks.any(axis=1)
    if some.all():
        return Constrained(drafts, masks)
    end = int(some.argmin())
    return Constrained(drafts[: end - 1], masks[:end])
