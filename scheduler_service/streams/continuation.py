"""A continuation: the output that a client received of a stream, which this scheduler is to continue."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_service.chat.events import CallPiece
from scheduler_service.core.evaluation import packed_ids
from scheduler_service.core.request import Continued
from scheduler_service.errors import mismatch
from scheduler_service.text.plain_output import PlainOutput


@dataclass(frozen=True, slots=True)
class ReceivedText:
    """How much of one completion's output a client has received beside its tokens; UTF-8 bytes."""

    text: int = 0
    reasoning: int = 0
    arguments: tuple[int, ...] = ()  # of each call whose beginning was received


@dataclass(frozen=True, slots=True)
class Continuation:
    """The output received, and the digest of the prompt's token ids on the scheduler that sent it."""

    completions: tuple[Continued, ...]
    received: tuple[ReceivedText, ...]  # of each of `completions`
    prompt_digest: bytes

    @property
    def tokens(self) -> int:
        """Number of tokens received of all completions."""
        return sum(len(one.ids) for one in self.completions)

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raises ServiceError if these are not the token ids on the scheduler that began the stream."""
        if prompt_digest(prompt) != self.prompt_digest:
            raise mismatch("continuation.prompt_digest", "the prompt has other token ids here")


def prompt_digest(prompt: Sequence[int]) -> bytes:
    """SHA-256 of token ids, each as 4 bytes, little-endian."""
    return hashlib.sha256(packed_ids(prompt)).digest()


def remove_received(output: PlainOutput, received: ReceivedText) -> None:
    """Leave what is after what was received, of an output that has all of it.

    Raises ValueError if it has less, or what was received ends within a character.
    """
    if _is_short(output, received):  # the client received the end too, before which all is sent
        output.flush()
    output.text = _behind("text", output.text, received.text)
    if received.reasoning or received.arguments:
        output.reasoning = _behind("reasoning", output.reasoning, received.reasoning)
        output.calls = _calls_behind(output.calls, received.arguments)


def _is_short(output: PlainOutput, received: ReceivedText) -> bool:
    return (
        received.text > len(output.text.encode())
        or received.reasoning > len(output.reasoning.encode())
        or len(received.arguments) > len(output.calls)
        or any(
            size > len(call.arguments.encode())
            for size, call in zip(received.arguments, output.calls, strict=False)
        )
    )


def _behind(what: str, text: str, size: int) -> str:
    """The text after its first `size` bytes."""
    whole = text.encode()
    if size > len(whole) or (size < len(whole) and whole[size] & 0xC0 == 0x80):
        raise ValueError(f"has {len(whole)} bytes of {what} here, and {size} is no border in it")
    return whole[size:].decode()


def _calls_behind(calls: Sequence[CallPiece], sizes: tuple[int, ...]) -> list[CallPiece]:
    """What follows the first `sizes` bytes of the arguments of these calls, and the calls after them."""
    if len(sizes) > len(calls):
        raise ValueError(f"has {len(calls)} tool calls here, not {len(sizes)}")
    rests = [_behind("arguments", call.arguments, size) for call, size in zip(calls, sizes, strict=False)]
    begun = [CallPiece(call.index, "", "", rest) for call, rest in zip(calls, rests, strict=False) if rest]
    return [*begun, *calls[len(sizes) :]]
