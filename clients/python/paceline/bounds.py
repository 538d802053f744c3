"""How much a stream may bring: a scheduler that sends more than it announced is wrong, or lies. Pure.

Without these bounds a caller who collects a stream would keep whatever a scheduler likes to send.
"""

from __future__ import annotations

from paceline.errors import InternalError
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.types import Delta

TEXT_BYTES_PER_TOKEN = 4096
"""UTF-8 bytes of text, reasoning and tool calls for each token of a completion, on average: see Delta."""

UNANNOUNCED_TOKENS = 1 << 20
"""Of a completion, where neither the request nor the scheduler says how many it may have."""

UNASKED_TOP = 32
"""Likeliest tokens in each place, if the request asks for fewer."""


class Bounds:
    """What the completions of one stream may have, by its request and its Started."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._max_tokens = request.stop.max_tokens or UNANNOUNCED_TOKENS
        self._is_announced = request.stop.max_tokens > 0
        self._top = max(request.sampling.logprobs, UNASKED_TOP)

    def announce(self, started: pb.Started) -> None:
        """Take the scheduler's word for max_tokens, unless it exceeds the request's."""
        if started.max_tokens:
            asked = self._max_tokens if self._is_announced else started.max_tokens
            self._max_tokens, self._is_announced = min(asked, started.max_tokens), True

    def check(self, delta: Delta, tokens: int, text_bytes: int) -> None:
        """Check a delta, after which its completion has `tokens` and `text_bytes`. Raises InternalError."""
        name = f"completion {delta.index}"
        if tokens > self._max_tokens:
            raise InternalError(f"{name} has more than the {self._max_tokens} tokens that were announced")
        if text_bytes > TEXT_BYTES_PER_TOKEN * max(tokens, 1):
            raise InternalError(
                f"{name} has {text_bytes} bytes of text in {tokens} tokens, "
                f"more than {TEXT_BYTES_PER_TOKEN} a token"
            )
        if len(delta.logprobs) > len(delta.token_ids):
            raise InternalError(f"{name} has {len(delta.logprobs)} logprobs in {len(delta.token_ids)} tokens")
        most = max((len(one.top) for one in delta.logprobs), default=0)
        if most > self._top:
            raise InternalError(f"{name} has {most} likeliest tokens in one place, more than {self._top}")
