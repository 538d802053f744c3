"""A request as its door has checked it: plain, within all limits, not tokenized yet."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.service.identity import Identity

from scheduler_service.core.request import DraftingWish, Request, SamplingSettings
from scheduler_service.streams.continuation import Continuation


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text as it is: no template. Not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, all in the vocabulary. Not empty."""

    ids: array[int]  # typecode I


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the chat template, each with its role and content. Not empty."""

    messages: tuple[Mapping[str, object], ...]
    arguments: Mapping[str, object] = field(default_factory=dict)  # variables of the template
    continues: bool = False  # the last message goes on, rather than a new turn beginning


Prompt = TextPrompt | ChatPrompt | TokenPrompt


class Returns(enum.Enum):
    """Which parts of the output the client wants."""

    BOTH = "both"
    TEXT = "text"
    TOKEN_IDS = "token_ids"


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request whose every field is within its limits; its prompt may have to be tokenized yet."""

    id: str
    prompt: Prompt
    sampling: SamplingSettings
    max_tokens: int | None
    min_tokens: int
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    n: int
    priority: int
    salt: bytes
    speculation: DraftingWish
    returns: Returns
    include_stop_string: bool
    continuation: Continuation | None
    digest: bytes  # of the request's bytes; empty: its id was drawn, so that nobody can send it again

    def to_core(
        self, prompt: Sequence[int], caller: Identity, *, arrival: float, deadline: float | None
    ) -> Request:
        """The core's request, with the prompt as token ids, not copied; times on the loop's clock."""
        return Request(
            id=scoped_id(caller.name, self.id),
            prompt=prompt,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            eos_token_ids=self.eos_token_ids,
            stop_token_ids=self.stop_token_ids,
            n=self.n,
            priority=self.priority,
            arrival=arrival,
            deadline=deadline,
            salt=self.salt,
            speculation=self.speculation,
            continued=self.continuation.completions if self.continuation else (),
            identity=caller.name,
            weight=caller.weight,
        )


def scoped_id(identity: str, request_id: str) -> str:
    """An identity's request id as the core knows it: ids have no spaces, so that no two are equal."""
    return f"{identity} {request_id}"
