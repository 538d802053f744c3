"""What a stream's reader takes, in plain types: a start, then deltas of its completions, and an end of each.

The codec of each door writes them in its own protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_service.core.events import CompletionEnded
from scheduler_service.core.request import Request
from scheduler_service.core.step import TopLogprobs
from scheduler_service.model import ServedModel


@dataclass(frozen=True, slots=True)
class OutputStart:
    """Goes before all else: how the request was resolved, so that it can be continued elsewhere."""

    request_id: str  # the caller's
    request: Request
    model: ServedModel
    max_tokens: int  # of each completion
    cached_tokens: int  # of the prompt, found in the prefix cache


@dataclass(slots=True)
class OutputDelta:
    """New ids and text of one completion; one of them may be empty.

    Never changed once made; not frozen, because that would make it four times as slow to make.
    """

    index: int
    ids: Sequence[int]
    text: str
    logprobs: Sequence[TopLogprobs]  # one per id, if asked for
    elapsed_s: float  # from the request's arrival to the last of these tokens


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """The good end of one completion."""

    index: int
    finished: CompletionEnded
    stop_string: str | None  # found in its text


Output = OutputStart | OutputDelta | OutputEnd
