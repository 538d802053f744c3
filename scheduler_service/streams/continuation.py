"""Output of an interrupted stream that is to go on here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_service.core.packed import packed_ids
from scheduler_service.core.request import Continued
from scheduler_service.errors import mismatch


@dataclass(frozen=True, slots=True)
class Continuation:
    """What was received before the interruption, and what it was made by."""

    completions: tuple[Continued, ...]
    text_bytes: tuple[int, ...]  # UTF-8 bytes of text received; one for each of `completions`
    prompt_digest: bytes

    @property
    def tokens(self) -> int:
        """All completions' together."""
        return sum(len(one.ids) for one in self.completions)

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raises ServiceError if the prompt's token ids are others than where it began."""
        if prompt_digest(prompt) != self.prompt_digest:
            raise mismatch("continuation.prompt_digest", "the prompt has other token ids here")


def prompt_digest(prompt: Sequence[int]) -> bytes:
    """SHA-256 of token ids, each as 4 bytes, little-endian."""
    return hashlib.sha256(packed_ids(prompt)).digest()
