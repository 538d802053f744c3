"""A request after the RPC layer has checked its limits, before its prompt is tokenized."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from service_kit.identity import Identity

from scheduler_service.chat.argument_texts import TextArguments
from scheduler_service.chat.tools import CallRules, SentTool
from scheduler_service.core.request import DraftingWish, OutputGrammar, Phases, Request, SamplingSettings
from scheduler_service.model import ServedAdapter
from scheduler_service.streams.continuation import Continuation


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that is tokenized without a template. Not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, all within the vocabulary. Not empty."""

    ids: array[int]  # typecode I


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the chat template. Not empty."""

    messages: tuple[Mapping[str, object], ...]  # each with its role and content
    arguments: Mapping[str, object] = field(default_factory=dict)  # further variables of the template
    continues: bool = False  # the completion continues the last message, instead of beginning a new one
    opens: bool = True  # the prompt ends with the opening of an answer, unless it continues one
    tools: tuple[SentTool, ...] = ()  # that the model may call
    texts: Mapping[str, TextArguments] = field(default_factory=dict)  # of tools, where the format is typed
    calls: CallRules | None = None  # None: the output may have any calls, or none


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Which parts of the output the client wants."""

    ids: bool = True  # with their logprobs
    text: bool = True
    include_stop_string: bool = False
    prompt_ids: bool = False  # with the first message


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request whose fields are all within their limits."""

    id: str  # the caller's, or a random one
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
    adapter: ServedAdapter | None
    speculation: DraftingWish
    output: StreamOptions
    continuation: Continuation | None
    digest: bytes  # of the request's bytes; empty with a random id, under which no resend can come
    warnings: tuple[str, ...] = ()  # parts of the request that have no effect
    prompt_logprobs: int | None = None  # set: the prompt's tokens are scored, with this many alternatives
    labels: Mapping[str, str] = field(default_factory=dict)  # for the log, and for who asks why it waits

    @property
    def grammar_field(self) -> str:
        """The field of the request that its grammar is, or was made of."""
        is_of_calls = isinstance(self.prompt, ChatPrompt) and self.prompt.calls is not None
        return "messages.tools" if is_of_calls else "grammar"

    @property
    def terminators(self) -> frozenset[int]:
        """The token ids that end a completion."""
        return self.eos_token_ids | self.stop_token_ids

    def with_grammar(self, grammar: OutputGrammar) -> CheckedRequest:
        """The request with this grammar of its output."""
        return replace(self, sampling=replace(self.sampling, grammar=grammar))

    def to_core(
        self,
        prompt: Sequence[int],
        caller: Identity,
        *,
        arrival: float,
        deadline: float | None,
        phases: Phases = (),
    ) -> Request:
        """The core's request. `prompt`: its token ids, not copied; times in seconds on the core's clock."""
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
            adapter=self.adapter.fingerprint if self.adapter else b"",
            speculation=self.speculation,
            continued=self.continuation.completions if self.continuation else (),
            identity=caller.name,
            weight=caller.weight,
            prompt_logprobs=self.prompt_logprobs,
            phases=phases,
            labels=self.labels,
        )


def scoped_id(identity: str, request_id: str) -> str:
    """The core's id of an identity's request. Request ids have no spaces, so no two of these are equal."""
    return f"{identity} {request_id}"
