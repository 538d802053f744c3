"""The sequences that are due for a decision about drafts, and those that rest until a later step."""

from __future__ import annotations

from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.speculation.draft_state import DraftState
from scheduler_service.core.states import SequenceState


class RestCalendar:
    """The sequences that want drafts and hold a cache: each is either awake or resting.

    An awake sequence is looked at by each decision. A resting one decodes plainly and costs a decision
    nothing: it is found again by the number of the step that ends its rest. A sequence gets at most one token
    in a plain step, so a rest of n tokens lasts at least n steps.
    """

    def __init__(self) -> None:
        self._awake: dict[LiveSequence, DraftState] = {}  # in the order of waking
        self._wakes_at: dict[LiveSequence, int] = {}  # of each resting sequence: the step that ends its rest
        self._by_step: dict[int, dict[LiveSequence, DraftState]] = {}  # the same by step
        self.step = 0  # steps of the target that were answered

    @property
    def awake(self) -> list[tuple[LiveSequence, DraftState]]:
        """The awake sequences, in the order of waking."""
        return list(self._awake.items())

    def wake(self, sequence: LiveSequence, state: DraftState) -> None:
        """Make a sequence awake, whether it rests, is new here, or is awake already."""
        if sequence in self._wakes_at:
            self.forget(sequence)
        self._awake[sequence] = state

    def rest(self, sequence: LiveSequence, steps: int) -> None:
        """Let an awake sequence rest until `steps` more steps, at least 1, are answered."""
        self._wakes_at[sequence] = end = self.step + steps
        self._by_step.setdefault(end, {})[sequence] = self._awake.pop(sequence)

    def forget(self, sequence: LiveSequence) -> None:
        """Drop a sequence; does nothing if it is not here."""
        self._awake.pop(sequence, None)
        if (end := self._wakes_at.pop(sequence, None)) is not None:
            resting = self._by_step[end]
            del resting[sequence]
            if not resting:
                del self._by_step[end]

    def step_answered(self) -> None:
        """Count an answered step of the target, and wake the sequences whose rest it ends."""
        self.step += 1
        if resting := self._by_step.pop(self.step, None):
            self._awake.update(resting)
            for sequence in resting:
                del self._wakes_at[sequence]

    def check_integrity(self, running: set[LiveSequence]) -> None:
        """Compare with the sequences that hold a cache. Raises AssertionError."""
        here = self._awake.keys() | self._wakes_at.keys()
        assert len(here) == len(self._awake) + len(self._wakes_at), "a sequence is awake and rests"
        by_step = {s: end for end, resting in self._by_step.items() for s in resting}
        assert by_step == self._wakes_at, "a rest ends at two steps"
        assert all(s.state is not SequenceState.ENDED for s in here), "an ended sequence is kept"
        assert all(end > self.step for end in self._by_step), "a rest is over, and its sequence still rests"
        missing = {s for s in running if s.draft_state is not None} - here
        assert not missing, "a running sequence that wants drafts is neither awake nor rests"
