"""A step as its client asked for it, while it is in flight, and with its result."""

from __future__ import annotations

from typing import Any, NamedTuple

from executor_service.backends.base import PendingForward
from executor_service.cache.session import ClientSession
from executor_service.contract.plan import OpResult, StepPlan, StepResult
from executor_service.steps.step_rows import StepRows


class StepRequest(NamedTuple):
    """A step and who asks for it."""

    plan: StepPlan
    reply_to: Any  # whatever the caller finds its client by; the pipeline hands it back with the result
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
    free_pages: int  # once the step was begun, without the changes that commits made until then
    cached_pages: int


class FinishedStep(NamedTuple):
    """A step that is done: computed now, or when it was sent first."""

    request: StepRequest
    result: StepResult
