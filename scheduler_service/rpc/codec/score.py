"""Score: from the request to its reply."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.core.evaluation import Evaluation, EvaluationInput
from scheduler_service.errors import ErrorReason, ServiceError, invalid
from scheduler_service.model import ServedModel
from scheduler_service.rpc.codec.adapters import NO_ADAPTERS, AdapterNames
from scheduler_service.rpc.codec.chat import check_chat
from scheduler_service.rpc.codec.checks import check_range, check_size
from scheduler_service.rpc.codec.evaluation import (
    check_call,
    check_count,
    check_ids,
    check_length,
    check_text,
)
from scheduler_service.rpc.codec.requests import check_samples
from scheduler_service.rpc.codec.scores import MAX_REPLY_BYTES, scored_token_bytes, token_logprobs
from scheduler_service.streams.evaluation import EvaluatedInput
from scheduler_service.text.items import ChatItem, TextItem

MAX_CHAT_MESSAGES = 4096
"""In the prompts of all inputs together: checking one takes microseconds, on the event loop."""
MAX_ARGUMENT_BYTES = 64 << 10
"""Of template arguments of all inputs together."""
TOKENS_AT_ONCE = 512
"""Scored tokens encoded in one part of a reply."""

_Part: TypeAlias = "array[int] | int"
"""Token ids, or the index of the text that makes them."""


class ScoreTask:
    """A checked ScoreRequest."""

    field = "inputs"

    def __init__(
        self, message: pb.ScoreRequest, model: ServedModel, adapters: AdapterNames = NO_ADAPTERS
    ) -> None:
        """Raises ServiceError."""
        check_samples(model)
        if not model.can_score:
            raise ServiceError(ErrorReason.UNSUPPORTED, "the executor does not score prompts")
        self.call = check_call(message, model, adapters)
        if message.HasField("top_logprobs"):
            check_range("top_logprobs", message.top_logprobs, 0, model.limits.max_logprobs)
        self.alternatives = message.top_logprobs
        check_count("inputs", len(message.inputs), model)
        _check_chats(message.inputs)
        self.items: list[TextItem] = []
        self._model = model
        self._parts = [self._input(f"inputs[{i}]", one) for i, one in enumerate(message.inputs)]
        self.min_tokens = sum(1 if isinstance(part, int) else len(part) for _, part in self._parts)
        self._inputs: list[EvaluationInput] = []

    def _input(self, field: str, given: pb.ScoreInput) -> tuple[_Part | None, _Part]:
        """The prompt, and what is scored after it."""
        prompt: _Part | None = None
        match given.WhichOneof("prompt"):
            case "prompt_text":
                text = check_text(f"{field}.prompt_text", given.prompt_text, self._model)
                prompt = self._item(text)
            case "prompt_token_ids":
                prompt = check_ids(f"{field}.prompt_token_ids", given.prompt_token_ids, self._model)
            case "prompt_messages":
                prompt = self._item(_chat(f"{field}.prompt_messages", given.prompt_messages, self._model))
        match given.WhichOneof("scored"):
            case "text":
                scored = check_text(f"{field}.text", given.text, self._model, begins=prompt is None)
                return prompt, self._item(scored)
            case "token_ids":
                return prompt, check_ids(f"{field}.token_ids", given.token_ids, self._model)
        raise invalid(field, "has neither text nor token_ids to be scored")

    def _item(self, item: TextItem) -> int:
        self.items.append(item)
        return len(self.items) - 1

    def evaluation(self, ids: Sequence[array[int]], max_tokens: int) -> Evaluation | None:
        """See `EvaluationTask`."""
        self._inputs.clear()
        for index, (prompt, scored) in enumerate(self._parts):
            before = array("I") if prompt is None else _ids(prompt, ids)
            tokens = before + _ids(scored, ids)
            check_length(f"inputs[{index}]", len(tokens), max_tokens)
            self._inputs.append(EvaluationInput(tokens, max(1, len(before))))
        size = sum(len(one.tokens) - one.scored_from for one in self._inputs)
        size = size * scored_token_bytes(self.alternatives) + 64 * len(self._inputs)
        check_size("inputs", size, MAX_REPLY_BYTES, "bytes of scores")
        to_score = tuple(one for one in self._inputs if len(one.tokens) > one.scored_from)
        return Evaluation(to_score) if to_score else None

    def response(self, results: Sequence[EvaluatedInput], usage: pb.InputUsage) -> Iterator[bytes]:
        """See `EvaluationTask`. A single token without a prompt has no score."""
        usage.prompt_tokens = sum(len(one.tokens) for one in self._inputs)
        yield pb.ScoreResponse(request_id=self.call.id, usage=usage).SerializeToString()
        left = iter(results)
        for one in self._inputs:
            found = next(left) if len(one.tokens) > one.scored_from else EvaluatedInput()
            logprobs = found.logprobs
            total = math.fsum(logprobs)
            message = pb.Score(
                token_ids=one.tokens[one.scored_from :],
                logprob=total,
                perplexity=perplexity(total, len(logprobs)),
            )
            for part in found.scores:
                for piece in part.parts(TOKENS_AT_ONCE):
                    message.logprobs.extend(token_logprobs(piece))
                    yield b""
            yield pb.ScoreResponse(scores=[message]).SerializeToString()


def perplexity(logprob: float, tokens: int) -> float:
    """exp(-logprob / tokens); 1 without tokens, inf where a double can't hold it."""
    exponent = -logprob / tokens if tokens else 0.0
    return math.exp(exponent) if exponent < 709 else math.inf


def _ids(part: _Part, ids: Sequence[array[int]]) -> array[int]:
    return ids[part] if isinstance(part, int) else part


def _check_chats(inputs: Sequence[pb.ScoreInput]) -> None:
    chats = [one.prompt_messages for one in inputs if one.HasField("prompt_messages")]
    check_size("inputs", sum(len(chat.messages) for chat in chats), MAX_CHAT_MESSAGES, "messages in all")
    size = sum(chat.template_arguments.ByteSize() for chat in chats)
    check_size("inputs", size, MAX_ARGUMENT_BYTES, "bytes of template arguments in all")


def _chat(field: str, messages: pb.Messages, model: ServedModel) -> ChatItem:
    if messages.HasField("tool_choice"):
        raise invalid(f"{field}.tool_choice", "nothing is generated")
    try:
        chat = check_chat(messages, model)
    except ServiceError as error:
        if not error.field.startswith("messages"):
            raise
        problem = error.message.removeprefix(f"{error.field}: ")
        raise invalid(field + error.field.removeprefix("messages"), problem) from error
    return ChatItem(field, chat.messages, chat.arguments, chat.tools, chat.continues, chat.opens)
