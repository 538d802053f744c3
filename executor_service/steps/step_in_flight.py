"""The three forms of a step in the pipeline: requested, in flight, finished."""

from __future__ import annotations

from typing import Any, NamedTuple

from executor_service.backends.base import PendingForward
from executor_service.cache.session import ClientSession
from executor_service.contract.plan import OpResult, StepPlan, StepResult
from executor_service.steps.step_rows import StepRows


class StepRequest(NamedTuple):
    """A step and who asks for it."""

    plan: StepPlan
    reply_to: Any  # opaque to the pipeline, which returns it with the result
    arrived_s: float  # by `time.perf_counter`
    caller: str = ""  # name of the caller's identity
    abandonable: bool = False  # undone as a whole when no client waits any more, if it takes several forwards


class StepInFlight(NamedTuple):
    """A step whose forward was launched and whose rows are not committed."""

    request: StepRequest
    session: ClientSession
    ops: list[OpResult]
    rows: StepRows
    forward: PendingForward
    began_s: float  # by `time.perf_counter`
    free_pages: int  # when the step had begun, less the net change by all commits until then
    cached_pages: int


class FinishedStep(NamedTuple):
    """A step with its result, which for a replay is the stored one."""

    request: StepRequest
    result: StepResult
