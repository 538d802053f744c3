"""Protobuf requests from Python arguments. Pure; shared by the blocking and the asyncio client."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from paceline.chat import MessageLike, ToolChoice, ToolLike
from paceline.conversations import CHAT_OPTIONS, chat_messages, set_chat_option
from paceline.errors import InvalidRequest
from paceline.fields import set_field
from paceline.grammars import GRAMMARS, set_grammar
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.schemas import SchemaLike
from paceline.types import Drafter, Speculation


class Options(TypedDict, total=False):
    """Keyword arguments of `generate`, `complete`, `completions` and `chat`.

    An option that is left out has the model's default. The service checks ranges; scheduler.proto
    lists them.
    """

    temperature: float  # 0: greedy
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]  # token id to the value added to its logit
    seed: int  # uint64; the same seed gives the same tokens
    logprobs: int  # return each token's logprob and those of this many most likely ids
    max_tokens: int  # default: as many as fit
    min_tokens: int
    stop: str | Sequence[str]  # stop strings; by default not part of the returned text
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_string: bool  # the returned text includes the stop string that ended it
    n: int  # number of completions, of `generate` and `completions`
    priority: int  # higher is served first
    labels: Mapping[str, str]  # names and texts for the scheduler's log
    cache_salt: str  # prompts share cached prefixes only under the same salt
    affinity_key: (
        str  # requests with the same one go to the same scheduler; default: by the prompt's beginning
    )
    request_id: str  # default: a random one
    model: str  # the served model, the default, or an adapter
    return_prompt_token_ids: bool  # see Started.prompt_token_ids
    prompt_logprobs: int  # of `generate`: the prompt's logprobs, see Generation.prompt_logprobs
    returns: Literal["both", "text", "token_ids"]  # contents of the deltas
    template_arguments: Mapping[str, Any]  # chat template variables, such as enable_thinking; needs messages
    continue_final_message: bool  # continue the last message instead of opening a new turn; needs messages
    omit_opening: bool  # end the prompt behind the last message, with no opening of an answer; needs messages
    tools: Sequence[ToolLike]  # functions, Tools, or mappings as in OpenAI's API; needs messages
    tool_choice: (
        str | ToolChoice | Mapping[str, Any]
    )  # auto, none, required, or a tool's name; needs messages
    speculation: Speculation | Literal["off", "auto"] | int  # a string or a number sets the mode alone
    # At most one of these; the output then matches it as a whole.
    schema: SchemaLike  # JSON schema: as a mapping, as JSON, or a pydantic model; see Completion.parsed
    regex: str
    choices: Sequence[str]  # one of these texts
    grammar: str  # context-free, in Lark's syntax
    structural_tag: Mapping[str, Any] | str  # free text with tagged parts that must match


_SAMPLING = frozenset(field.name for field in pb.SamplingParams.DESCRIPTOR.fields)
_STOP = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "stop": "strings",
    "stop_token_ids": "token_ids",
    "ignore_eos": "ignore_eos",
    "include_stop_string": "include_stop_string",
}
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
            raise TypeError(f"unknown option {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
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
