"""The order of ops: caught by test_ops.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_service.steps.pipeline import Pipeline
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def ops_out_of_order() -> None:
    """a step's ops are applied last to first"""

    def begin(original: Any, self: Pipeline, request: Any) -> Any:
        plan = replace(request.plan, ops=request.plan.ops[::-1])
        return original(self, request._replace(plan=plan))

    def take_finished(original: Any, self: Pipeline) -> Any:
        return [
            step._replace(result=replace(step.result, ops=step.result.ops[::-1])) for step in original(self)
        ]

    wrap(Pipeline, "begin", begin)
    wrap(Pipeline, "take_finished", take_finished)
