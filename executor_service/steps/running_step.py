"""`RunningStep`: what the device computes now, for status."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from executor_service.steps.step_rows import StepRows


class StepKind(enum.Enum):
    """What the rows of a step do."""

    PREFILL = "prefill"  # all compute prompt tokens
    DECODE = "decode"  # all feed one token, or one after another
    VERIFY = "verify"  # all have drafts
    MIXED = "mixed"
    OPS = "ops"  # there are no rows
    FORWARD = "forward"  # the RPC Forward


class RunningStep(NamedTuple):
    """A step that has begun and is not answered."""

    kind: StepKind
    rows: int  # of Forward: inputs
    tokens: int  # fed in it


def running_step(rows: StepRows) -> RunningStep:
    """The description of a step by its rows. Any thread: the rows may be changed meanwhile."""
    decodes, accepted = len(rows.decodes), list(rows.accepted)
    kinds = set(_kinds(rows)) | ({StepKind.DECODE} if decodes else set())
    tokens = decodes + sum(row.end - row.begin for row in accepted)
    kind = StepKind.OPS if not kinds else kinds.pop() if len(kinds) == 1 else StepKind.MIXED
    return RunningStep(kind, decodes + len(accepted), tokens)


def _kinds(rows: StepRows) -> Iterator[StepKind]:
    for row in list(rows.accepted):
        if len(row.drafts):
            yield StepKind.VERIFY
        else:
            yield StepKind.PREFILL if row.in_prompt else StepKind.DECODE
