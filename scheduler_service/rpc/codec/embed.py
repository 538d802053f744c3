"""Embed: from the request to its reply."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from paceline.channel import PUBLIC_MESSAGE_BYTES
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.core.evaluation import Evaluation, EvaluationInput, HiddenPooling
from scheduler_service.errors import ErrorReason, ServiceError, invalid
from scheduler_service.model import ServedModel, TextPooling
from scheduler_service.rpc.codec.adapters import NO_ADAPTERS, AdapterNames
from scheduler_service.rpc.codec.checks import check_range, check_size
from scheduler_service.rpc.codec.evaluation import (
    check_call,
    check_count,
    check_ids,
    check_length,
    check_text,
)
from scheduler_service.rpc.codec.scores import MAX_REPLY_BYTES
from scheduler_service.streams.evaluation import EvaluatedInput
from scheduler_service.text.items import WholeItem

POOLINGS = {
    pb.POOLING_LAST: TextPooling.LAST,
    pb.POOLING_MEAN: TextPooling.MEAN,
    pb.POOLING_CLS: TextPooling.CLS,
}
_FRAME_BYTES = 32  # of an Embedding, beside its values


class EmbedTask:
    """A checked EmbedRequest."""

    field = "inputs"
    alternatives = 0

    def __init__(
        self, message: pb.EmbedRequest, model: ServedModel, adapters: AdapterNames = NO_ADAPTERS
    ) -> None:
        """Raises ServiceError."""
        if not model.embedding_size:
            raise ServiceError(ErrorReason.UNSUPPORTED, "the executor gives no vectors of prompts")
        self.call = check_call(message, model, adapters)
        if message.pooling and message.pooling not in POOLINGS:
            raise invalid("pooling", f"unknown kind {message.pooling}")
        self._pooling = POOLINGS.get(message.pooling, model.embedding.pooling)
        self._prompt = _prompt(message, model)
        check_range("dimensions", message.dimensions, 0, model.embedding_size)
        self._dimensions = message.dimensions or model.embedding_size
        self._normalize = message.normalize if message.HasField("normalize") else model.embedding.normalize
        check_count("inputs", len(message.inputs), model)
        size = len(message.inputs) * (4 * self._dimensions + _FRAME_BYTES)
        check_size("inputs", size, MAX_REPLY_BYTES, "bytes of vectors")
        texts = sum(one.WhichOneof("input") == "text" for one in message.inputs)
        repeated = texts * len(self._prompt.encode())
        check_size("inputs", repeated, PUBLIC_MESSAGE_BYTES, "bytes of prompts before them")
        self.items: list[WholeItem] = []
        self._given: list[array[int] | None] = []  # None: the next of `items`
        for index, one in enumerate(message.inputs):
            self._given.append(self._input(f"inputs[{index}]", one, model))
        if not self.items and (prompt := message.WhichOneof("prompt")):
            raise invalid(prompt, "precedes texts, and all inputs are token ids")
        self.min_tokens = sum(1 if ids is None else len(ids) for ids in self._given)
        self._counts: list[int] = []

    def _input(self, field: str, given: pb.EmbedInput, model: ServedModel) -> array[int] | None:
        match given.WhichOneof("input"):
            case "text":
                field = f"{field}.text"
                check_text(field, given.text, model)
                text = self._prompt + given.text
                check_size(field, len(text.encode()), model.limits.max_prompt_bytes, "bytes with its prompt")
                self.items.append(WholeItem(field, text, varies=self._pooling is TextPooling.CLS))
                return None
            case "token_ids":
                return check_ids(f"{field}.token_ids", given.token_ids, model)
        raise invalid(field, "has neither text nor token_ids")

    def evaluation(self, ids: Sequence[array[int]], max_tokens: int) -> Evaluation | None:
        """See `EvaluationTask`."""
        made = iter(ids)
        inputs = [next(made) if one is None else one for one in self._given]
        self._counts = [len(tokens) for tokens in inputs]
        for index, count in enumerate(self._counts):
            check_length(f"inputs[{index}]", count, max_tokens)
        if self._pooling is TextPooling.CLS:  # the first token's state depends on no other one
            inputs = [tokens[:1] for tokens in inputs]
        kind = HiddenPooling.MEAN if self._pooling is TextPooling.MEAN else HiddenPooling.LAST
        return Evaluation(tuple(EvaluationInput(tokens) for tokens in inputs), kind)

    def response(self, results: Sequence[EvaluatedInput], usage: pb.InputUsage) -> Iterator[bytes]:
        """See `EvaluationTask`."""
        usage.prompt_tokens = sum(self._counts)
        yield pb.EmbedResponse(request_id=self.call.id, usage=usage).SerializeToString()
        for values, tokens in self.vectors(results):
            embedding = pb.Embedding(values=values.tolist(), tokens=tokens)
            yield pb.EmbedResponse(embeddings=[embedding]).SerializeToString()

    def vectors(self, results: Sequence[EvaluatedInput]) -> Iterator[tuple[npt.NDArray[np.float32], int]]:
        """Each input's vector [dimensions], and its number of tokens."""
        for result, count in zip(results, self._counts, strict=True):
            vector = np.frombuffer(result.vector, "<f4")
            yield cut_vector(vector, self._dimensions, normalize=self._normalize), count


def _prompt(message: pb.EmbedRequest, model: ServedModel) -> str:
    """What precedes each text. Raises ServiceError for a name that the model does not have."""
    if message.WhichOneof("prompt") == "prompt_text":
        return message.prompt_text
    prompts, name = model.embedding.prompts, model.embedding.default_prompt
    if message.WhichOneof("prompt") == "prompt_name":
        name = message.prompt_name
        if name not in prompts:
            known = ", ".join(f"'{one}'" for one in sorted(prompts)) or "none"
            raise invalid("prompt_name", f"the model has no prompt of this name; it has: {known}"[:500])
    return prompts.get(name, "")


def cut_vector(
    vector: npt.NDArray[np.float32], dimensions: int, *, normalize: bool
) -> npt.NDArray[np.float32]:
    """The first `dimensions` values [hidden], of length 1 if that is asked for; a zero vector stays one."""
    kept = vector[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(kept))
    if normalize and length > 0:
        kept /= length
    return kept.astype(np.float32)
