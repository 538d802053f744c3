"""A continuation: the output that a client received of a stream, which this scheduler is to continue."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_service.core.packed import packed_ids
from scheduler_service.core.request import Continued
from scheduler_service.errors import mismatch


@dataclass(frozen=True, slots=True)
class Continuation:
    """The output received, and the digest of the prompt's token ids on the scheduler that sent it."""

    completions: tuple[Continued, ...]
    text_bytes: tuple[int, ...]  # UTF-8 bytes of text received of each of `completions`
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
