"""Token ids as texts and bytes, for logprobs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from paceline import ModelInfo
from paceline.aio import Client

_MAX_KEPT = 8


class Vocabulary:
    """The bytes of a model's tokens, asked of its schedulers once and kept for as long as they serve it."""

    def __init__(self) -> None:
        self._fingerprint: bytes | None = None
        self._tokens: tuple[bytes, ...] = ()
        self._learning = asyncio.Lock()

    async def learn(self, client: Client, info: ModelInfo) -> None:
        """Ask for the tokens, unless they are known. Raises `paceline.errors`."""
        if info.vocabulary_fingerprint == self._fingerprint:
            return
        async with self._learning:
            if info.vocabulary_fingerprint != self._fingerprint:
                self._tokens = await client.vocabulary()
                self._fingerprint = info.vocabulary_fingerprint

    def bytes_of(self, token: int) -> bytes:
        """What a token adds to a text, nothing for an id without a token; only after `learn`."""
        return self._tokens[token] if token < len(self._tokens) else b""

    def text_of(self, token: int) -> str:
        """The same as text; an incomplete character is U+FFFD."""
        return self.bytes_of(token).decode(errors="replace")


class Vocabularies:
    """The vocabularies of the models that were asked for last."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Vocabulary] = OrderedDict()

    def of(self, info: ModelInfo) -> Vocabulary:
        """A model's own: two models' calls never share one."""
        found = self._known.setdefault(info.vocabulary_fingerprint, Vocabulary())
        self._known.move_to_end(info.vocabulary_fingerprint)
        if len(self._known) > _MAX_KEPT:
            self._known.popitem(last=False)
        return found
