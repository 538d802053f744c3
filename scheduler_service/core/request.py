"""A request as the front end hands it to the core: checked and tokenized."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from scheduler_service.core.evaluation import Evaluation
from scheduler_service.core.waiting.reasons import WaitReason

Phases = tuple[tuple[WaitReason, float], ...]
"""What a request waited for before it was queued, and from when on. The first begins at its `arrival`, each
ends with the next one, the last when the request is queued."""


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """What an output must match, as the client wrote it; `text` is empty where there are `choices`."""

    kind: str  # json_schema, regex, choices, lark or structural_tag
    text: str = ""
    choices: tuple[str, ...] = ()
    begins_after: int | None = None  # a token id: the grammar of the output after the first such token


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How a sequence is sampled. The core passes them on to executors; it reads only `seed`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # uint64; the front end draws it where the client sends none
    logprobs: int | None = None
    grammar: OutputGrammar | None = None

    def with_seed(self, seed: int) -> SamplingSettings:
        """The same parameters under another seed."""
        return self if seed == self.seed else replace(self, seed=seed)


class DraftSource(enum.Enum):
    """Where the drafts that a row verifies come from."""

    NGRAM = "ngram"  # the longest suffix match in the sequence itself; no model
    EXECUTOR = "draft-executor"  # a second executor with a smaller model of the same vocabulary
    GRAMMAR = "grammar"  # what the request's grammar forces, as the target's answers tell


@dataclass(frozen=True, slots=True)
class DraftingWish:
    """How a request wants its tokens drafted. The sampled tokens do not depend on it."""

    drafters: frozenset[DraftSource] = frozenset()  # empty: no drafts; several: the one that promises more
    length: int | None = None  # drafts per row, at least 1; None: the controller decides


@dataclass(frozen=True, slots=True)
class Continued:
    """Output of one completion that another scheduler emitted, and that is to be continued."""

    index: int
    ids: tuple[int, ...]
    finished: bool = False  # the completion has finished there


@dataclass(frozen=True, slots=True)
class Request:
    """One call that generates or evaluates. Times are in seconds on the caller's clock; lengths are tokens.

    With an `evaluation` there is no prompt and no output, `n` is the number of inputs, and `prompt_logprobs`
    is the number of alternatives of each score.
    """

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
    adapter: bytes = b""  # fingerprint of the one that changes the model; empty: none
    speculation: DraftingWish = DraftingWish()
    identity: str = ""  # of the caller: the unit of fairness and of the queue's bounds
    weight: float = 1.0  # of that identity: it gets service in proportion to it
    continued: tuple[Continued, ...] = ()  # at most one for each index
    prompt_logprobs: int | None = None  # set: the prompt's tokens are scored, with this many alternatives
    evaluation: Evaluation | None = None
    phases: Phases = ()
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)  # the client's, for WaitReport

    @property
    def drafters(self) -> frozenset[DraftSource]:
        """Those of its wish that can have drafts for it."""
        wished = self.speculation.drafters
        return wished if self.sampling.grammar is not None else wished - {DraftSource.GRAMMAR}

    @property
    def input_tokens(self) -> int:
        """Tokens that count for the queue's bounds: the prompt, and continued output; or all inputs."""
        return self.prompt_tokens + sum(len(one.ids) for one in self.continued)

    @property
    def prompt_tokens(self) -> int:
        """Tokens that it brings to be computed; continued output not counted."""
        return len(self.prompt) if self.evaluation is None else self.evaluation.tokens

    @property
    def expected_tokens(self) -> int | None:
        """For predictions: the most output tokens, at least 1; None: what fits."""
        return self.max_tokens if self.evaluation is None else 1


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """SplitMix64's output function on a uint64 (Steele, Lea, Flood 2014; executor.proto)."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def index_seed(seed: int, index: int) -> int:
    """The seed of completion `index`, as scheduler.proto defines it: the request's own for index 0."""
    return seed if index == 0 else mix64(seed ^ mix64(_GOLDEN * index))


_UINT32_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """From `low` to `high`, both included unless `open_low`."""

    low: float
    high: float
    open_low: bool = False

    def __contains__(self, number: float) -> bool:
        """Whether the number lies within; NaN never does."""
        return self.low <= number <= self.high and not (self.open_low and number == self.low)

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"


RANGES: Mapping[str, Range] = {
    "temperature": Range(0, 100),
    "top_k": Range(0, _UINT32_MAX),
    "top_p": Range(0, 1, open_low=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 100, open_low=True),
    "presence_penalty": Range(-100, 100),
    "frequency_penalty": Range(-100, 100),
}
"""By the name of the field."""
