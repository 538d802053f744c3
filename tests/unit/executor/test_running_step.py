"""What the device computes is told while it does, by the rows of the step."""

from __future__ import annotations

from executor_service.backends.base import PendingForward
from executor_service.backends.forward_rows import ForwardRows
from executor_service.steps.running_step import RunningStep, StepKind
from tests.unit.executor.fakes import FakeBackend, ids
from tests.unit.executor.harness import Harness, opening, row


class Watched(FakeBackend):
    """Notes what the engine says while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[RunningStep | None] = []
        self.harness: Harness | None = None

    def launch(self, rows: ForwardRows) -> PendingForward:
        assert self.harness is not None
        self.seen.append(self.harness.engine.running_step)
        return super().launch(rows)


def test_a_step_is_described_by_its_rows() -> None:
    backend = Watched()
    harness = backend.harness = Harness(backend=backend)
    first = harness.step(opening(1, [1, 2, 3, 4, 5]), opening(2, [7])).rows
    (two,) = first[1].tokens
    harness.step(row(1, 5), row(2, 1))
    harness.step(row(2, 2, drafts=[two, two, two]))
    harness.step(row(1, 6), opening(3, [1, 2, 3]))
    harness.step(row(1, 7, tokens=[4, 4]))
    harness.step()
    assert backend.seen == [
        RunningStep(StepKind.PREFILL, 2, 6),
        RunningStep(StepKind.DECODE, 2, 2),
        RunningStep(StepKind.VERIFY, 1, 4),
        RunningStep(StepKind.MIXED, 2, 4),
        RunningStep(StepKind.DECODE, 1, 2),
    ]
    assert harness.engine.running_step is None


def test_forward_is_described_by_its_inputs() -> None:
    harness = Harness()
    forwards = harness.engine.forward_once([ids(1, 2, 3), ids(4)], frozenset({"hidden"}))
    next(forwards)
    assert harness.engine.running_step == RunningStep(StepKind.FORWARD, 2, 4)
    forwards.send(True)
    forwards.close()
    assert harness.engine.running_step is None
