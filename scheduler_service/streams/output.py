"""The outputs of a stream, as plain data: a start, then deltas of its completions, and an end of each.

Logprobs of the prompt stand between the start and the first delta.

The RPC layer encodes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_service.chat.events import CallPiece
from scheduler_service.core.events import CompletionEnded
from scheduler_service.core.request import Request
from scheduler_service.core.step import ScoredTokens, TopLogprobs
from scheduler_service.model import ServedAdapter, ServedModel


@dataclass(frozen=True, slots=True)
class OutputStart:
    """A stream's first output: all that is needed to continue the request on another scheduler."""

    request_id: str  # the caller's
    request: Request  # with defaults filled in
    model: ServedModel
    adapter: ServedAdapter | None
    max_tokens: int  # of each completion
    cached_tokens: int  # prefix hit of the prompt
    warnings: Sequence[str]  # parts of the request that have no effect
    returns_prompt: bool = False  # the client wants the prompt's token ids


@dataclass(slots=True)
class OutputDelta:
    """New ids, text, reasoning and calls of one completion; not all of them are empty.

    Never changed, but not frozen: making a frozen instance takes four times as long.
    """

    index: int  # of the completion
    ids: Sequence[int]
    text: str
    logprobs: Sequence[TopLogprobs]  # one per id if the request asks for logprobs, else empty
    elapsed_s: float  # from the request's arrival to the last of these tokens
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """One completion has finished."""

    index: int  # of the completion
    finished: CompletionEnded
    stop_string: str | None  # the one found in its text
    reasoning_tokens: int = 0  # before the answer


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """Logprobs of tokens of the prompt, between the start and the first delta."""

    scores: ScoredTokens


Output = OutputStart | PromptOutput | OutputDelta | OutputEnd
