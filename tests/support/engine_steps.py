"""Steps of an engine without a worker: begun, and finished when the test says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from executor_service.contract.plan import (
    Forwards,
    PlannedRows,
    Refusal,
    Row,
    RowResult,
    RowResults,
    StepPlan,
    StepResult,
)
from executor_service.steps.engine import Engine
from executor_service.steps.pipeline import Pipeline
from executor_service.steps.step_in_flight import StepRequest

T = TypeVar("T")


class BegunStep:
    """A step that may be in flight; `result` is None until it is finished."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._result: StepResult | None = None

    @property
    def result(self) -> StepResult | None:
        for step in self._pipeline.take_finished():
            begun = step.request.reply_to
            assert isinstance(begun, BegunStep)
            assert begun._result is None, "answered twice"
            begun._result = step.result
        return self._result

    def finish(self) -> StepResult:
        """Finish the steps in flight up to this one."""
        while (result := self.result) is None:
            self._pipeline.finish_oldest()
        return result


def begin(
    engine: Engine,
    plan: StepPlan,
    is_wanted: Callable[[], bool] = lambda: True,
    *,
    abandonable: bool = False,
    caller: str = "",
) -> BegunStep:
    """Begin a step that arrives now. If it takes several forwards, `is_wanted` is called before each."""
    step = BegunStep(engine.pipeline)
    request = StepRequest(plan, step, time.perf_counter(), caller, abandonable)
    run(engine.pipeline.begin(request), is_wanted)
    return step


def run(forwards: Forwards[T], is_wanted: Callable[[], bool] = lambda: True) -> T:
    """Run work of several forwards to its end; `is_wanted` is called before each."""
    try:
        next(forwards)
        while True:
            forwards.send(is_wanted())
    except StopIteration as end:
        result: T = end.value
        return result


def execute(engine: Engine, plan: StepPlan) -> StepResult:
    """Begin a step and finish it."""
    return begin(engine, plan).finish()


def planned(rows: Iterable[Row | Refusal]) -> PlannedRows:
    """The rows of a plan, as the codec makes them of a message."""
    rows = list(rows)
    return PlannedRows(
        [0 if isinstance(row, Refusal) else row.cache_id for row in rows],
        [0 if isinstance(row, Refusal) else row.kv_length for row in rows],
        {i: row for i, row in enumerate(rows) if isinstance(row, Refusal) or not row.only_decodes},
    )


def answered(results: Sequence[RowResult]) -> RowResults:
    """The rows of an answer, as a commit sets those that have more than a length and tokens."""
    table = RowResults(len(results))
    for index, result in enumerate(results):
        table[index] = result
    return table
