"""The number of a model's stacks as a policy of Serve's autoscaler, whose API is alpha: all of it is here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from paceline_fleet.plan import StackLoad, desired_stacks
from paceline_fleet.spec import Replicas

UP_S, DOWN_S = 5.0, 60.0
"""Time for which more, or fewer, stacks have to be wanted."""


class StackPolicy:
    """Called by Serve's controller, each second or so; `replicas`: the fields of a spec's `replicas`."""

    def __init__(self, **replicas: Any) -> None:
        self._replicas = Replicas(**replicas)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of stacks that is wanted now, and no state."""
        figures: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        stacks = {stack for by_stack in figures.values() for stack in by_stack}

        def of(name: str, stack: object) -> float:
            return figures.get(name, {}).get(stack, 0.0)

        loads = [
            StackLoad(round(of("running", one)), round(of("waiting", one)), of("wait_s", one))
            for one in stacks
        ]
        return desired_stacks(loads, context.target_num_replicas, self._replicas), {}


def autoscaling_config(replicas: Replicas) -> AutoscalingConfig | None:
    """Serve's settings for these replicas; None where their number is fixed."""
    if replicas.min == replicas.max:
        return None
    policy = AutoscalingPolicy(policy_function=StackPolicy, policy_kwargs=replicas.model_dump())
    return AutoscalingConfig(
        min_replicas=replicas.min,
        max_replicas=replicas.max,
        initial_replicas=replicas.min,
        upscale_delay_s=UP_S,
        downscale_delay_s=DOWN_S,
        metrics_interval_s=1.0,
        look_back_period_s=3.0,
        policy=policy,
    )
