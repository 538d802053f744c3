"""How fast the executor computes, and so how long a call of the kit may take."""

from __future__ import annotations

import secrets
import time

from tests.conformance.kit.client import MIN_DEADLINE_S, NONE, Executor

_PROBE_TOKENS = 256
_MARGIN = 8.0  # a busy machine, and steps of rows rather than of one prompt


def measured_deadline_s(executor: Executor) -> float:
    """Seconds that the largest step may take, from the time that a prompt takes; at least the minimum."""
    limits, context = executor.limits, executor.info.model.context_length
    count = max(
        1, min(_PROBE_TOKENS, context - 1, limits.max_step_tokens, limits.total_pages * executor.page // 2)
    )
    tokens = [secrets.randbelow(executor.vocab) for _ in range(count)]  # which no prefix cache has
    session = executor.open_session()
    try:
        session.open(tokens[:1], output=NONE)  # whatever happens at first
        began = time.monotonic()
        session.open(tokens, output=NONE)
        elapsed_s = time.monotonic() - began
    finally:
        session.close()
    return max(MIN_DEADLINE_S, _MARGIN * elapsed_s * limits.max_step_tokens / count)
