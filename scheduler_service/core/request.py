"""What the front end hands to the core: an admitted request, checked and tokenized."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How a sequence is sampled. The core reads none of them but `seed` and passes them on."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # uint64, always drawn by then
    logprobs: int | None = None

    def with_seed(self, seed: int) -> SamplingSettings:
        """The same parameters under another seed."""
        return replace(self, seed=seed)


class DraftSource(enum.Enum):
    """Who proposes the tokens that a verification checks."""

    NGRAM = "ngram"  # the longest suffix match in the sequence itself; no model
    EXECUTOR = "draft-executor"  # a second executor with a smaller model of the same vocabulary


@dataclass(frozen=True, slots=True)
class DraftingWish:
    """How a request wants its tokens drafted. It never changes which tokens come out."""

    drafters: frozenset[DraftSource] = frozenset()  # empty: off; several: the one that promises more
    length: int | None = None  # drafts per verification, at least 1; None: the controller decides


@dataclass(frozen=True, slots=True)
class Continued:
    """Output of one completion that was produced elsewhere, and is to be continued."""

    index: int
    ids: tuple[int, ...]
    finished: bool = False  # it has ended there: nothing is left to do


@dataclass(frozen=True, slots=True)
class Request:
    """One Generate call. Times are the caller's clock in seconds; lengths are tokens."""

    id: str  # unique among live requests
    prompt: Sequence[int]  # token ids; never changed
    sampling: SamplingSettings
    max_tokens: int | None = None  # None: what fits
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()  # empty with ignore_eos
    stop_token_ids: frozenset[int] = frozenset()
    n: int = 1
    priority: int = 0  # higher first, among those of one identity
    arrival: float = 0.0
    deadline: float | None = None
    salt: bytes = b""
    speculation: DraftingWish = DraftingWish()
    identity: str = ""  # whose it is: the unit of fairness and of the queue's bounds
    weight: float = 1.0  # of that identity: its share of service beside others
    continued: tuple[Continued, ...] = ()  # at most one for each index

    @property
    def input_tokens(self) -> int:
        """Tokens that the queue is charged for: the prompt, and what is continued."""
        return len(self.prompt) + sum(len(one.ids) for one in self.continued)
