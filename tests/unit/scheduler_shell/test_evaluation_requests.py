"""Score, Embed and Rerank requests: what is refused, by which field, before anything is computed."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.core.evaluation import HiddenPooling
from scheduler_service.core.events import CompletionUsage
from scheduler_service.core.step import ScoredTokens
from scheduler_service.errors import ErrorReason, ServiceError
from scheduler_service.model import EmbeddingDefaults, TextPooling
from scheduler_service.rpc.codec.embed import EmbedTask, cut_vector
from scheduler_service.rpc.codec.rerank import RerankTask, share_of_yes
from scheduler_service.rpc.codec.score import ScoreTask, perplexity
from scheduler_service.rpc.codec.scores import MAX_REPLY_BYTES, scored_token_bytes, token_logprobs
from scheduler_service.streams.evaluation import EvaluatedInput
from scheduler_service.text.items import PlainItem, WholeItem
from tests.unit.scheduler_shell.models_made_here import LIMITS, MODEL

ABLE = replace(
    MODEL,
    can_score=True,
    embedding_size=8,
    embedding=EmbeddingDefaults(TextPooling.MEAN, False, {"query": "Q: ", "long": "é" * 2048}, "query"),
    limits=replace(LIMITS, max_inputs=4),
)
USAGE = CompletionUsage(3, 1, 0, 0, 0, 0, 0.0, 0.0, 0.0)


def ids(*tokens: int) -> pb.TokenIds:
    return pb.TokenIds(ids=tokens)


def score(*inputs: pb.ScoreInput, **fields: Any) -> Callable[[], object]:
    return lambda: ScoreTask(pb.ScoreRequest(inputs=inputs, **fields), ABLE)


def embed(*inputs: pb.EmbedInput, **fields: Any) -> Callable[[], object]:
    return lambda: EmbedTask(pb.EmbedRequest(inputs=inputs, **fields), ABLE)


def rerank(*documents: str, query: str = "q", **fields: Any) -> Callable[[], object]:
    return lambda: RerankTask(pb.RerankRequest(query=query, documents=documents, **fields), ABLE)


TEXT, VECTOR = pb.ScoreInput(text="a"), pb.EmbedInput(text="a")
CHAT = pb.Messages(messages=[pb.Message(role="user", content="")])
TOO_LONG = "x" * 1001


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (score(), "inputs: must not be empty"),
        (score(*[TEXT] * 5), "inputs: has 5 inputs, at most 4 are allowed"),
        (score(TEXT, pb.ScoreInput()), "inputs[1]: has neither text nor token_ids to be scored"),
        (score(pb.ScoreInput(prompt_text="a")), "inputs[0]: has neither text nor token_ids to be scored"),
        (score(TEXT, pb.ScoreInput(text="")), "inputs[1].text: must not be empty"),
        (score(pb.ScoreInput(prompt_text="", text="a")), "inputs[0].prompt_text: must not be empty"),
        (
            score(pb.ScoreInput(text=TOO_LONG)),
            "inputs[0].text: has 1001 bytes, at most 1000 are allowed",
        ),
        (score(pb.ScoreInput(token_ids=ids())), "inputs[0].token_ids: must not be empty"),
        (
            score(pb.ScoreInput(token_ids=ids(1, 100))),
            "inputs[0].token_ids[1]: is 100, but the vocabulary has 100 tokens",
        ),
        (
            score(pb.ScoreInput(prompt_token_ids=ids(2**32 - 1), text="a")),
            "inputs[0].prompt_token_ids[0]: is 4294967295, but the vocabulary has 100 tokens",
        ),
        (
            score(pb.ScoreInput(token_ids=ids(*[1] * 65))),
            "inputs[0].token_ids: has 65 ids, at most 64 are allowed",
        ),
        (
            score(pb.ScoreInput(prompt_messages=pb.Messages(), text="a")),
            "inputs[0].prompt_messages: must not be empty",
        ),
        (
            score(
                pb.ScoreInput(
                    prompt_messages=pb.Messages(messages=[pb.Message(role="?", content="a")]), text="a"
                )
            ),
            "inputs[0].prompt_messages[0].role: must be letters, digits, - and _",
        ),
        (score(TEXT, top_logprobs=6), "top_logprobs: must be within [0, 5], not 6"),
        (score(TEXT, request_id="a b"), "request_id: must be visible ASCII characters"),
        (score(TEXT, cache_salt="s" * 257), "cache_salt: has 257 bytes, at most 256 are allowed"),
        (score(TEXT, labels={"": "b"}), "labels: a label's name must not be empty"),
        (score(TEXT, model="other"), "model: 'other' is not served, 'small' is"),
        (embed(), "inputs: must not be empty"),
        (embed(pb.EmbedInput()), "inputs[0]: has neither text nor token_ids"),
        (embed(VECTOR, pb.EmbedInput(text="")), "inputs[1].text: must not be empty"),
        (embed(VECTOR, dimensions=9), "dimensions: must be within [0, 8], not 9"),
        (embed(VECTOR, pooling=9), "pooling: unknown kind 9"),
        (
            embed(VECTOR, prompt_name="other"),
            "prompt_name: the model has no prompt of this name; it has: 'long', 'query'",
        ),
        (
            embed(pb.EmbedInput(token_ids=ids(1)), prompt_name="query"),
            "prompt_name: precedes texts, and all inputs are token ids",
        ),
        (
            embed(pb.EmbedInput(token_ids=ids(1)), prompt_text=""),
            "prompt_text: precedes texts, and all inputs are token ids",
        ),
        (
            embed(VECTOR, prompt_text="x" * 1000),
            "inputs[0].text: has 1001 bytes with its prompt, at most 1000 are allowed",
        ),
        (rerank(), "documents: must not be empty"),
        (rerank(*"abcde"), "documents: has 5 documents, at most 4 are allowed"),
        (rerank("a", query=""), "query: must not be empty"),
        (rerank("a", query=TOO_LONG), "query: has 1001 bytes, at most 1000 are allowed"),
        (rerank("a", instruction=TOO_LONG), "instruction: has 1001 bytes, at most 1000 are allowed"),
        (rerank("a", method=7), "method: unknown method 7"),
    ],
)
def test_a_bad_field_is_named(task: Callable[[], object], message: str) -> None:
    with pytest.raises(ServiceError) as refused:
        task()
    assert refused.value.message == message


@pytest.mark.parametrize(
    ("make", "request_"),
    [
        (ScoreTask, pb.ScoreRequest(inputs=[TEXT])),
        (EmbedTask, pb.EmbedRequest(inputs=[VECTOR])),
        (RerankTask, pb.RerankRequest(query="q", documents=["a"])),
    ],
)
def test_a_model_that_can_not_do_it_refuses_the_call(make: Any, request_: Any) -> None:
    with pytest.raises(ServiceError) as refused:
        make(request_, MODEL)
    assert refused.value.reason is ErrorReason.UNSUPPORTED


def test_what_follows_a_prompt_gets_no_bos() -> None:
    """Prompt and text are tokenized apart, and joined."""
    inputs = [
        pb.ScoreInput(prompt_text="a", text="b"),
        pb.ScoreInput(prompt_token_ids=ids(1), text="c"),
        TEXT,
    ]
    task = ScoreTask(pb.ScoreRequest(inputs=inputs), ABLE)
    assert [item.begins for item in task.items if isinstance(item, PlainItem)] == [True, False, False, True]
    evaluation = task.evaluation([array("I", [2, 3]), array("I", [4]), array("I", [5]), array("I", [6])], 64)
    assert evaluation is not None
    # The single token after nothing has no score: it needs not be computed.
    assert [(list(one.tokens), one.scored_from) for one in evaluation.inputs] == [([2, 3, 4], 2), ([1, 5], 1)]


def test_an_input_longer_than_the_context_is_named() -> None:
    task = ScoreTask(pb.ScoreRequest(inputs=[TEXT, pb.ScoreInput(prompt_text="a", text="b")]), ABLE)
    with pytest.raises(ServiceError, match=r"^inputs\[1\]: makes 41 tokens; at most 40 fit$"):
        task.evaluation([array("I", [1]), array("I", [1] * 40), array("I", [1])], 40)


def test_a_reply_that_would_be_too_large_is_refused_before_anything_is_queued() -> None:
    most = MAX_REPLY_BYTES // scored_token_bytes(5)
    task = ScoreTask(pb.ScoreRequest(inputs=[TEXT], top_logprobs=5), ABLE)
    assert task.evaluation([array("I", [1]) * most], 1 << 30)
    with pytest.raises(ServiceError, match=r"^inputs: has \d+ bytes of scores, at most \d+ are allowed$"):
        task.evaluation([array("I", [1]) * (most + 2)], 1 << 30)
    wide = replace(ABLE, embedding_size=1 << 20)
    with pytest.raises(ServiceError, match=r"^inputs: has \d+ bytes of vectors, at most \d+ are allowed$"):
        EmbedTask(pb.EmbedRequest(inputs=[VECTOR]), wide)
    EmbedTask(pb.EmbedRequest(inputs=[VECTOR], dimensions=1000), wide)


def test_a_scored_token_takes_no_more_of_a_reply_than_is_counted() -> None:
    top = 2**32 - 1
    scores = ScoredTokens(1, [-1.0] * 10, 5, [top] * 50, [-1.0] * 50)
    message = pb.Score(token_ids=[top] * 10, logprobs=token_logprobs(scores))
    assert message.ByteSize() <= 10 * scored_token_bytes(5) + 64


def test_a_query_beside_each_document_is_bounded_in_all() -> None:
    roomy = replace(ABLE, limits=replace(LIMITS, max_inputs=1024, max_prompt_bytes=1 << 20))
    with pytest.raises(ServiceError, match=r"^documents: has \d+ bytes with the query beside each, at most"):
        RerankTask(pb.RerankRequest(query="q" * 8192, documents=["d"] * 1024), roomy)


def test_answers_that_begin_alike_tell_nothing() -> None:
    task = RerankTask(pb.RerankRequest(query="q", documents=["a"]), ABLE)
    with pytest.raises(ServiceError) as refused:
        task.evaluation([array("I", [1, 2]), array("I", [3, 4]), array("I", [3, 5])], 64)
    assert refused.value.reason is ErrorReason.UNSUPPORTED


def test_documents_are_ranked_best_first_and_ties_by_index() -> None:
    request = pb.RerankRequest(query="q", documents=["a", "b", "c"], top_n=2)
    task = RerankTask(request, ABLE)
    answers = [array("I", [3]), array("I", [4])]
    assert task.evaluation([*(array("I", [n]) for n in (5, 6, 7)), *answers], 64)
    pairs = [(-2.0, -2.0), (-1.0, -3.0), (-2.0, -2.0)]
    results = [EvaluatedInput([ScoredTokens(1, [value])], b"", USAGE) for pair in pairs for value in pair]
    usage = pb.InputUsage()
    reply = pb.RerankResponse.FromString(b"".join(task.response(results, usage)))
    assert [one.index for one in reply.results] == [1, 0]
    assert [one.score for one in reply.results] == pytest.approx([1 / (1 + math.exp(-2)), 0.5])
    assert (reply.usage.prompt_tokens, reply.usage.cached_tokens) == (6, 3)


@pytest.mark.parametrize("method", [pb.RERANK_METHOD_YES_NO, pb.RERANK_METHOD_LIKELIHOOD])
def test_empty_documents_come_last_marked_and_the_others_are_scored_without_them(
    method: pb.RerankMethod.ValueType,
) -> None:
    request = pb.RerankRequest(query="q", documents=["", "a", "", "b"], method=method)
    task, alone = (
        RerankTask(request, ABLE),
        RerankTask(pb.RerankRequest(query="q", documents="ab", method=method), ABLE),
    )
    assert [one.sent() | {"field": ""} for one in task.items] == [
        one.sent() | {"field": ""} for one in alone.items
    ]
    ids = [array("I", [n]) for n in range(len(task.items))]
    assert task.evaluation(ids, 64) == alone.evaluation(ids, 64)
    asked = 4 if method == pb.RERANK_METHOD_YES_NO else 2
    results = [EvaluatedInput([ScoredTokens(1, [-3.0 + n])], b"", USAGE) for n in range(asked)]
    reply = pb.RerankResponse.FromString(b"".join(task.response(results, pb.InputUsage())))
    assert [(one.index, one.empty) for one in reply.results][2:] == [(0, True), (2, True)]
    assert {one.index for one in reply.results[:2]} == {1, 3}
    assert [one.score for one in reply.results][2:] == [0, 0]


def test_a_document_that_is_too_long_is_named_by_its_own_index() -> None:
    task = RerankTask(pb.RerankRequest(query="q", documents=["", "a"]), ABLE)
    with pytest.raises(ServiceError, match=r"^documents\[1\]: makes 65 tokens"):
        task.evaluation([array("I", range(64)), array("I", [1]), array("I", [2])], 64)


def test_empty_documents_alone_are_answered_without_the_model() -> None:
    task = RerankTask(pb.RerankRequest(query="q", documents=["", ""], top_n=1), ABLE)
    assert not task.items
    assert task.evaluation((), 64) is None
    reply = pb.RerankResponse.FromString(b"".join(task.response((), pb.InputUsage())))
    assert [(one.index, one.empty) for one in reply.results] == [(0, True)]


def test_extreme_logprobs_have_a_score() -> None:
    assert perplexity(-1e6, 1) == math.inf
    assert perplexity(0.0, 0) == 1
    assert share_of_yes(-2000.0, 0.0) == 0
    assert share_of_yes(0.0, -2000.0) == 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "Q: a"),
        ({"prompt_name": "query"}, "Q: a"),
        ({"prompt_text": "b "}, "b a"),
        ({"prompt_text": ""}, "a"),
    ],
)
def test_a_text_to_be_embedded_has_its_prompt_and_the_post_processors_tokens(
    fields: dict[str, Any], text: str
) -> None:
    task = EmbedTask(pb.EmbedRequest(inputs=[VECTOR, pb.EmbedInput(token_ids=ids(1, 2))], **fields), ABLE)
    assert task.items == [WholeItem("inputs[0].text", text)]
    evaluation = task.evaluation([array("I", [7, 8, 9])], 64)
    assert evaluation is not None
    assert [list(one.tokens) for one in evaluation.inputs] == [[7, 8, 9], [1, 2]]


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (pb.POOLING_UNSPECIFIED, HiddenPooling.MEAN),
        (pb.POOLING_LAST, HiddenPooling.LAST),
        (pb.POOLING_MEAN, HiddenPooling.MEAN),
    ],
)
def test_an_unset_pooling_is_the_models_own(given: pb.Pooling.ValueType, computed: HiddenPooling) -> None:
    task = EmbedTask(pb.EmbedRequest(inputs=[VECTOR], pooling=given), ABLE)
    evaluation = task.evaluation([array("I", [7])], 64)
    assert evaluation is not None
    assert evaluation.pooling is computed
    values = np.array([3, 4] + [0] * 6, "<f4")
    [(vector, _)] = task.vectors([EvaluatedInput([], values.tobytes(), USAGE)])
    assert vector.tolist() == values.tolist()  # the model's vectors are not normalized


def test_the_first_tokens_vector_is_computed_from_this_token_alone_and_may_not_be_constant() -> None:
    inputs = [VECTOR, pb.EmbedInput(token_ids=ids(1, 2))]
    task = EmbedTask(pb.EmbedRequest(inputs=inputs, pooling=pb.POOLING_CLS), ABLE)
    assert [item.varies for item in task.items] == [True]
    evaluation = task.evaluation([array("I", [7, 8, 9])], 64)
    assert evaluation is not None
    assert evaluation.pooling is HiddenPooling.LAST
    assert [list(one.tokens) for one in evaluation.inputs] == [[7], [1]]
    reply = EvaluatedInput([], np.ones(8, "<f4").tobytes(), USAGE)
    assert [tokens for _, tokens in task.vectors([reply, reply])] == [3, 2]


def test_prompts_before_many_texts_are_bounded_before_they_are_joined() -> None:
    roomy = replace(ABLE, limits=replace(LIMITS, max_inputs=1024, max_prompt_bytes=1 << 20))
    request = pb.EmbedRequest(inputs=[VECTOR] * 1024, prompt_text="x" * 5000)
    with pytest.raises(ServiceError, match=r"^inputs: has 5120000 bytes of prompts before them, at most"):
        EmbedTask(request, roomy)


def test_a_vector_is_cut_before_it_is_normalized() -> None:
    vector = np.array([3, 4, 12], np.float32)
    assert cut_vector(vector, 2, normalize=True).tolist() == pytest.approx([0.6, 0.8])
    assert cut_vector(vector, 2, normalize=False).tolist() == [3, 4]
    assert cut_vector(np.zeros(3, np.float32), 3, normalize=True).tolist() == [0, 0, 0]
