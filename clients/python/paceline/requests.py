"""Protobuf requests from Python arguments. Pure; shared by the blocking and the asyncio client."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypedDict

from paceline.chat import MessageLike, ToolChoice, ToolLike
from paceline.conversations import CHAT_OPTIONS, chat_messages, set_chat_option
from paceline.errors import InvalidRequest
from paceline.fields import refuse, set_field
from paceline.grammars import GRAMMARS, set_grammar
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.schemas import Parsed, SchemaLike
from paceline.types import Drafter, Speculation


class Options(TypedDict, Generic[Parsed], total=False):
    """Keyword arguments of `generate`, `complete`, `completions` and `chat`. All may be left out.

    A sampling option that is left out has the model's default. The scheduler checks the ranges, and an
    InvalidRequest names the option that is out of its own; `ModelInfo.limits` has those that differ by
    server.

    Sampling:
        temperature: 0 to 100; 0 is greedy.
        top_k: of the most likely tokens, how many may be drawn; 0: all.
        top_p: above 0 and up to 1: the most likely tokens that together have this probability may be drawn.
        min_p: 0 to 1: tokens less likely than this share of the most likely one are not drawn.
        repetition_penalty: above 0 and up to 100; divides the positive logits of tokens that were there
            before, and multiplies the negative ones; 1: none.
        presence_penalty: -100 to 100; subtracted from the logit of a token that was generated before.
        frequency_penalty: -100 to 100; likewise, for each time that it was.
        logit_bias: token id to the value added to its logit.
        seed: 0 to 2**64 - 1; the same seed, prompt and options give the same tokens. Default: a random one.
        logprobs: return each token's logprob, and those of this many most likely ids.

    The end:
        max_tokens: tokens to generate at most. Default: as many as fit.
        min_tokens: no end before this many tokens. Default: 0.
        stop: a text or several, at which generation ends; by default not part of the returned text.
        stop_token_ids: ids of tokens that end generation, too.
        ignore_eos: go on after the model's end tokens. Default: False.
        include_stop_string: the returned text includes the stop string that ended it. Default: False.

    The request:
        n: completions, of `generate` and `completions`. Default: 1.
        priority: higher is served first. Default: 0.
        labels: names and texts for the scheduler's log.
        cache_salt: prompts share cached prefixes only under the same one. Default: "".
        affinity_key: requests with the same one go to the same of several schedulers. Default: by the
            prompt's beginning.
        request_id: for `abort` and logs. Default: a random one. DuplicateRequest if it runs already.
        model: the served model, which is the default, or an adapter. NotFound for any other.
        speculation: a Speculation, or its mode: "off", "auto", or the drafts of each step. Tokens are the
            same. Default: the server's.

    The reply:
        returns: "both" (the default), "text" or "token_ids": contents of the deltas.
        return_prompt_token_ids: see `Started.prompt_token_ids`. Default: False.
        prompt_logprobs: of `generate`: see `Generation.prompt_logprobs`.

    Only with messages:
        template_arguments: variables of the chat template, such as enable_thinking.
        continue_final_message: continue the last message in place of opening a new turn. Default: False.
        omit_opening: end the prompt after the last message, with no opening of an answer. Default: False.
        tools: what the model may call: functions, Tools, or mappings as in OpenAI's API.
        tool_choice: "auto", "none", "required", or a tool's name.

    At most one of these, which the output then matches as a whole:
        schema: a JSON schema as a mapping or as JSON, a pydantic model, or a `pydantic.TypeAdapter`; see
            `Completion.parsed`.
        regex: a regular expression.
        choices: texts, of which the output is one.
        grammar: context-free, in Lark's syntax.
        structural_tag: free text with tagged parts that must match.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    logprobs: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_string: bool
    n: int
    priority: int
    labels: Mapping[str, str]
    cache_salt: str
    affinity_key: str
    request_id: str
    model: str
    return_prompt_token_ids: bool
    prompt_logprobs: int
    returns: Literal["both", "text", "token_ids"]
    template_arguments: Mapping[str, Any]
    continue_final_message: bool
    omit_opening: bool
    tools: Sequence[ToolLike]
    tool_choice: str | ToolChoice | Mapping[str, Any]
    speculation: Speculation | Literal["off", "auto"] | int
    schema: SchemaLike[Parsed]
    regex: str
    choices: Sequence[str]
    grammar: str
    structural_tag: Mapping[str, Any] | str


_SAMPLING = frozenset(field.name for field in pb.SamplingParams.DESCRIPTOR.fields)
_STOP = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "stop": "strings",
    "stop_token_ids": "token_ids",
    "ignore_eos": "ignore_eos",
    "include_stop_string": "include_stop_string",
}
_ELSEWHERE = {
    "stream": "`generate` yields an answer while it is written",
    "system": "it is a message: Message('system', ...)",
    "response_format": "say `schema`, a JSON schema or a model of pydantic",
    "max_completion_tokens": "say `max_tokens`",
    "functions": "say `tools`",
    "timeout": "say `timeout_s`, in seconds",
    "best_of": "`completions` returns several answers",
}
"""What other APIs have under such a name."""
_RETURNS = {"both": pb.RETURNS_BOTH, "text": pb.RETURNS_TEXT, "token_ids": pb.RETURNS_TOKEN_IDS}
_REQUEST = frozenset(
    {
        "n",
        "priority",
        "cache_salt",
        "request_id",
        "model",
        "prompt_logprobs",
        "labels",
        "return_prompt_token_ids",
    }
)


def generate_request(
    prompt: str | None,
    messages: Sequence[MessageLike] | None,
    token_ids: Sequence[int] | None,
    options: Mapping[str, Any],
) -> pb.GenerateRequest:
    """The Generate request for exactly one of prompt, messages and token_ids.

    Raises InvalidRequest, naming the argument; TypeError for an unknown option or a wrong type.
    """
    if sum(kind is not None for kind in (prompt, messages, token_ids)) != 1:
        raise InvalidRequest("give exactly one of prompt, messages and token_ids")
    request = pb.GenerateRequest()
    if isinstance(prompt, list | tuple):
        refuse("prompt", "a string (a chat goes into messages=, ids into token_ids=)", prompt)
    if prompt is not None:
        set_field(request, "text", prompt, "prompt")
    elif messages is not None:
        request.messages.CopyFrom(chat_messages(messages))
    else:
        request.token_ids.SetInParent()  # an empty list must reach the service, which refuses it
        set_field(request.token_ids, "ids", token_ids, "token_ids")
    for name, value in options.items():
        if name in _SAMPLING:
            set_field(request.sampling, name, value, name)
        elif name in _STOP:
            several = [value] if name == "stop" and isinstance(value, str) else value
            set_field(request.stop, _STOP[name], several, name)
        elif name in _REQUEST:
            set_field(request, name, value, name)
            if name == "n" and request.n == 0:
                raise InvalidRequest("n: must be at least 1, got 0")
        elif name == "returns":
            if not isinstance(value, str) or value not in _RETURNS:
                raise InvalidRequest(f"returns: expected one of {', '.join(_RETURNS)}, got {value!r}")
            request.returns = _RETURNS[value]
        elif name in CHAT_OPTIONS:
            if messages is None:
                raise InvalidRequest(f"{name}: only with messages")
            set_chat_option(request.messages, name, value)
        elif name in GRAMMARS:
            set_grammar(request, name, value)
        elif name == "affinity_key":
            if not isinstance(value, str):
                raise TypeError(f"affinity_key: expected a text, got {type(value).__name__}")
        elif name == "speculation":
            request.speculation.CopyFrom(speculation(value))
        else:
            near = difflib.get_close_matches(name, Options.__annotations__, n=1)
            more = f"did you mean {near[0]!r}?" if near else ""
            more = _ELSEWHERE.get(name, more)
            raise TypeError(f"unknown option {name!r}{more and '; '}{more}")
    return request


def check_single(options: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if the options ask for several completions."""
    n = options.get("n", 1)
    if isinstance(n, int) and n > 1:
        raise InvalidRequest(f"n: `completions` returns {n}, and `complete` and `chat` one")


_DRAFTERS = {
    None: pb.DRAFTER_UNSPECIFIED,
    Drafter.NGRAM: pb.DRAFTER_NGRAM,
    Drafter.DRAFT_EXECUTOR: pb.DRAFTER_DRAFT_EXECUTOR,
    Drafter.GRAMMAR: pb.DRAFTER_GRAMMAR,
}
_MODES = {
    None: pb.SPECULATION_MODE_UNSPECIFIED,
    "off": pb.SPECULATION_MODE_OFF,
    "auto": pb.SPECULATION_MODE_AUTO,
}


def speculation(given: Speculation | str | int | None) -> pb.Speculation:
    """The protobuf form of a Speculation or of its mode. Raises InvalidRequest, naming the field."""
    chosen = given if isinstance(given, Speculation) else Speculation(given)  # type: ignore[arg-type]
    if not isinstance(chosen.drafter, Drafter | None):
        raise InvalidRequest(f"speculation.drafter: expected a Drafter, got {chosen.drafter!r}")
    wire = pb.Speculation(drafter=_DRAFTERS[chosen.drafter])
    if isinstance(chosen.mode, int) and not isinstance(chosen.mode, bool):
        wire.mode = pb.SPECULATION_MODE_FIXED
        set_field(wire, "draft_tokens", chosen.mode, "speculation.mode")
    elif isinstance(chosen.mode, str | None) and chosen.mode in _MODES:
        wire.mode = _MODES[chosen.mode]
    else:
        raise InvalidRequest(f"speculation.mode: expected off, auto or a number, got {chosen.mode!r}")
    return wire


def tokenize_request(
    text: str | None, messages: Sequence[MessageLike] | None, *, add_special_tokens: bool | None = None
) -> pb.TokenizeRequest:
    """The Tokenize request for exactly one of text and messages.

    Raises InvalidRequest, naming the argument; TypeError for a wrong type.
    """
    if (text is None) == (messages is None):
        raise InvalidRequest("give exactly one of text and messages")
    request = pb.TokenizeRequest()
    if messages is not None:
        request.messages.CopyFrom(chat_messages(messages))
    else:
        set_field(request, "text", text, "text")
    if add_special_tokens is not None:
        set_field(request, "add_special_tokens", add_special_tokens, "add_special_tokens")
    return request


def detokenize_request(token_ids: Sequence[int]) -> pb.DetokenizeRequest:
    """The Detokenize request. Raises InvalidRequest for an id out of range, TypeError for a wrong type."""
    request = pb.DetokenizeRequest()
    set_field(request, "token_ids", token_ids, "token_ids")
    return request


def why_request(request_id: str | None, identity: str, *, all_identities: bool) -> pb.WhyWaitingRequest:
    """The WhyWaiting request: of an id, or of what is slow. Raises TypeError for a wrong type."""
    request = pb.WhyWaitingRequest(all_identities=all_identities)
    set_field(request, "identity", identity, "identity")
    if request_id is None:
        request.slow = True
    else:
        set_field(request, "request_id", request_id, "request_id")
    return request


def steps_request(last_s: float, first_step: int = 0) -> pb.WatchStepsRequest:
    """The WatchSteps request: from a step on, or, if that is 0, from `last_s` seconds ago on."""
    if first_step:
        return pb.WatchStepsRequest(first_step=first_step)
    return pb.WatchStepsRequest(last_us=max(1, round(1e6 * last_s)))
