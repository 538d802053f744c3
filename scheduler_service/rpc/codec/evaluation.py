"""What Score, Embed and Rerank have in common: fields that all calls have, and limits of their inputs."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from paceline.channel import PUBLIC_MESSAGE_BYTES
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.core.evaluation import Evaluation
from scheduler_service.errors import invalid
from scheduler_service.model import ServedModel
from scheduler_service.rpc.codec.adapters import AdapterNames, find_adapter
from scheduler_service.rpc.codec.checks import check_size
from scheduler_service.rpc.codec.requests import check_labels, check_request_id, check_salt, check_token_ids
from scheduler_service.streams.evaluation import EvaluatedInput, EvaluationCall
from scheduler_service.text.items import PlainItem, TextItem

EvaluationRequest: TypeAlias = pb.ScoreRequest | pb.EmbedRequest | pb.RerankRequest


class EvaluationTask(Protocol):
    """A checked call, from its texts to its reply."""

    @property
    def call(self) -> EvaluationCall:
        """What all evaluations have."""

    @property
    def items(self) -> Sequence[TextItem]:
        """What is to be tokenized."""

    @property
    def field(self) -> str:
        """The field of the request that has the inputs."""

    @property
    def alternatives(self) -> int:
        """To each scored token."""

    @property
    def min_tokens(self) -> int:
        """The least number of tokens that will be computed."""

    def evaluation(self, ids: Sequence[array[int]], max_tokens: int) -> Evaluation | None:
        """What the core has to do, given the token ids of `items`; None: nothing.

        Raises ServiceError for an input of more than `max_tokens`, and for a reply that would be too large.
        """

    def response(self, results: Sequence[EvaluatedInput], usage: pb.InputUsage) -> Iterator[bytes]:
        """The reply, encoded in parts to be concatenated. `results`: of the evaluation's inputs."""


def check_call(message: EvaluationRequest, model: ServedModel, adapters: AdapterNames) -> EvaluationCall:
    """The fields that all evaluations have. Raises ServiceError."""
    check_size("request", message.ByteSize(), PUBLIC_MESSAGE_BYTES, "bytes")
    labels = check_labels(message.labels)
    adapter = find_adapter(message.model, model, adapters)
    request_id = check_request_id(message.request_id)
    digest = b""
    if message.request_id:
        content = message.DESCRIPTOR.name.encode() + message.SerializeToString(deterministic=True)
        digest = hashlib.sha256(content).digest()
    return EvaluationCall(
        request_id,
        message.priority,
        check_salt(message.cache_salt),
        digest,
        adapter,
        method=message.DESCRIPTOR.name.removesuffix("Request"),
        model=model.name if adapter is None else adapter.name,
        labels=labels,
    )


def check_count(field: str, count: int, model: ServedModel) -> None:
    """Raises ServiceError for no inputs, and for too many."""
    if not count:
        raise invalid(field, "must not be empty")
    check_size(field, count, model.limits.max_inputs, field)


def check_text(field: str, text: str, model: ServedModel, *, begins: bool = True) -> PlainItem:
    """Text to be tokenized. Raises ServiceError if it is empty or too long."""
    if not text:
        raise invalid(field, "must not be empty")
    check_size(field, len(text.encode()), model.limits.max_prompt_bytes, "bytes")
    return PlainItem(field, text, begins)


def check_ids(field: str, given: pb.TokenIds, model: ServedModel) -> array[int]:
    """Token ids of an input. Raises ServiceError if there are none, too many, or unknown ones."""
    ids = given.ids
    if not ids:
        raise invalid(field, "must not be empty")
    check_size(field, len(ids), model.context_length, "ids")
    check_token_ids(field, ids, model)
    return array("I", np.array(ids, np.uint32).tobytes())


def check_length(field: str, tokens: int, max_tokens: int) -> None:
    """Raises ServiceError for an input that does not fit into the context."""
    if tokens > max_tokens:
        raise invalid(field, f"makes {tokens} tokens; at most {max_tokens} fit")
