"""Rerank: from the request to its reply.

With YES_NO the model reads the prompt of Qwen3-Reranker (arXiv:2506.05176, and the model's card) through its
own chat template. "yes" and "no" are scored after it, as two inputs; the second one finds the first one's
prompt in the prefix cache. A model with a classification head reads the same prompt, and its head scores it.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator, Sequence

from paceline.channel import PUBLIC_MESSAGE_BYTES
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.core.evaluation import Evaluation, EvaluationInput, HiddenPooling
from scheduler_service.errors import ErrorReason, ServiceError, invalid, unsupported
from scheduler_service.model import ServedModel
from scheduler_service.rpc.codec.adapters import NO_ADAPTERS, AdapterNames
from scheduler_service.rpc.codec.checks import check_size
from scheduler_service.rpc.codec.evaluation import check_call, check_count, check_length, check_text
from scheduler_service.streams.evaluation import EvaluatedInput
from scheduler_service.text.items import ChatItem, PlainItem, TextItem

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Of a request without one."""
ANSWERS = ("yes", "no")
_NO_THINKING = {"enable_thinking": False}


class RerankTask:
    """A checked RerankRequest."""

    field = "documents"
    alternatives = 0

    def __init__(
        self, message: pb.RerankRequest, model: ServedModel, adapters: AdapterNames = NO_ADAPTERS
    ) -> None:
        """Raises ServiceError."""
        self._by_head = not model.can_sample
        if self._by_head:
            _check_head(message, model)
        elif not model.can_score:
            raise ServiceError(ErrorReason.UNSUPPORTED, "the executor does not score prompts")
        self.call = check_call(message, model, adapters)
        if message.method not in pb.RerankMethod.values():
            raise invalid("method", f"unknown method {message.method}")
        plain = message.method == pb.RERANK_METHOD_LIKELIHOOD
        self._asks = not plain and not self._by_head
        check_count("documents", len(message.documents), model)
        query = check_text("query", message.query, model, begins=False)
        if message.instruction:
            check_text("instruction", message.instruction, model)
        self._empty = [index for index, text in enumerate(message.documents) if not text]
        self._scored = [index for index, text in enumerate(message.documents) if text]
        documents = [check_text(f"documents[{i}]", message.documents[i], model) for i in self._scored]
        repeated = len(message.query.encode()) + len(message.instruction.encode()) + len(JUDGE)
        size = repeated * len(documents) + sum(len(text.encode()) for text in message.documents)
        check_size("documents", size, PUBLIC_MESSAGE_BYTES, "bytes with the query beside each")
        self.items: Sequence[TextItem] = ()
        if documents:
            self.items = (self._contexts if plain else self._questions)(documents, query, message)
        self.min_tokens = len(documents)
        self._top_n = message.top_n or len(message.documents)
        self._tokens = 0

    def _questions(
        self, documents: Sequence[PlainItem], query: PlainItem, message: pb.RerankRequest
    ) -> list[TextItem]:
        """A chat for each document, and both answers unless a head judges."""
        about = f"<Instruct>: {message.instruction or INSTRUCTION}\n<Query>: {query.text}\n<Document>: "
        system = {"role": "system", "content": JUDGE}
        chats = [
            ChatItem(one.field, (system, {"role": "user", "content": about + one.text}), _NO_THINKING)
            for one in documents
        ]
        answers = ANSWERS if self._asks else ()
        return [*chats, *(PlainItem("method", answer, begins=False) for answer in answers)]

    @staticmethod
    def _contexts(
        documents: Sequence[PlainItem], query: PlainItem, message: pb.RerankRequest
    ) -> list[TextItem]:
        """What comes before the query, for each document; and the query."""
        ending = f"\n\n{message.instruction}\n\n" if message.instruction else "\n\n"
        return [*(PlainItem(one.field, one.text + ending) for one in documents), query]

    def evaluation(self, ids: Sequence[array[int]], max_tokens: int) -> Evaluation | None:
        """See `EvaluationTask`."""
        if not self._scored:
            return None
        if self._by_head:
            prompts, answers = ids, [array("I")]
        elif self._asks:
            prompts, answers = ids[:-2], [array("I", one[:1]) for one in ids[-2:]]
            if answers[0] == answers[1]:
                raise unsupported("method", "the tokenizer has no tokens that tell yes from no")
        else:
            prompts, answers = ids[:-1], [ids[-1]]
        for index, prompt in zip(self._scored, prompts, strict=True):
            check_length(f"documents[{index}]", len(prompt) + len(answers[0]), max_tokens)
        self._tokens = sum(len(prompt) + len(answers[0]) for prompt in prompts)
        if self._by_head:
            return Evaluation(tuple(map(EvaluationInput, prompts)), HiddenPooling.LAST)
        return Evaluation(
            tuple(EvaluationInput(prompt + answer, len(prompt)) for prompt in prompts for answer in answers)
        )

    def response(self, results: Sequence[EvaluatedInput], usage: pb.InputUsage) -> Iterator[bytes]:
        """See `EvaluationTask`."""
        usage.prompt_tokens = self._tokens
        if self._asks:  # each document counts once, not once with each answer
            usage.cached_tokens = sum(one.usage.cached_tokens for one in results[::2] if one.usage)
        logprobs = [result.logprobs for result in results]
        if self._by_head:
            scores = [sigmoid(struct.unpack("<f", result.vector)[0]) for result in results]
        elif self._asks:
            pairs = zip(logprobs[::2], logprobs[1::2], strict=True)
            scores = [share_of_yes(yes[0], no[0]) for yes, no in pairs]
        else:
            scores = [math.fsum(each) / len(each) for each in logprobs]
        best = sorted(zip(self._scored, scores, strict=True), key=lambda found: (-found[1], found[0]))
        ranked = [pb.RankedDocument(index=index, score=score) for index, score in best]
        ranked += (pb.RankedDocument(index=index, empty=True) for index in self._empty)
        answer = pb.RerankResponse(request_id=self.call.id, results=ranked[: self._top_n], usage=usage)
        yield answer.SerializeToString()


def share_of_yes(yes: float, no: float) -> float:
    """The probability of "yes" among both, by their logprobs."""
    return sigmoid(yes - no)


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)); 0 where exp(-x) is no double."""
    return 1 / (1 + math.exp(-x)) if x > -709 else 0.0


def _check_head(message: pb.RerankRequest, model: ServedModel) -> None:
    """Raises ServiceError where the model's classification head can't rank so."""
    if not model.ranks_by_head:
        size = model.embedding_size
        raise ServiceError(
            ErrorReason.UNSUPPORTED,
            f"the model's classification head has {size} scores, and Rerank needs one",
        )
    if message.method == pb.RERANK_METHOD_LIKELIHOOD:
        raise unsupported("method", "the model has a classification head in place of an output layer")
