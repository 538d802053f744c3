"""What an executor says of its model is corrected or refused, so that no default fails every request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from paceline.executor.v1 import executor_pb2 as executor_pb
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.link.codec.handshake import decode_facts, decode_tokenizer
from scheduler_service.link.facts import ExecutorFacts, served_model, shortcomings
from scheduler_service.link.handshake import RefusedExecutorError
from scheduler_service.link.pool import ExecutorPool, Served
from scheduler_service.model import (
    EmbeddingDefaults,
    RequestAllowance,
    ServedModel,
    TextPooling,
    TokenizerSource,
)
from scheduler_service.rpc.codec.requests import check_request
from tests.unit.scheduler_shell.models_made_here import DRAFTING, LIMITS

HOLDS = {"total_pages": 8, "page_size": 16, "max_sequences": 4, "max_rows": 4, "max_step_tokens": 64}


def model_of(defaults: dict[str, float] | None = None, ends: tuple[int, ...] = (0,)) -> ServedModel:
    info = executor_pb.GetInfoResponse(
        model=executor_pb.ModelInfo(vocab_size=100, context_length=64, eos_token_ids=ends),
        limits=executor_pb.Limits(**HOLDS, max_stop_token_ids=8, max_logprobs=5, max_logit_bias=4),
    )
    tokenizer = executor_pb.GetTokenizerResponse(generation_defaults=defaults or {}, eos_token_ids=ends)
    return served_model(decode_facts(info), decode_tokenizer(tokenizer), LIMITS)


def embedding_of(given: executor_pb.EmbeddingDefaults | None) -> EmbeddingDefaults:
    info = executor_pb.GetInfoResponse(
        model=executor_pb.ModelInfo(vocab_size=100, context_length=64, embedding=given),
        limits=executor_pb.Limits(**HOLDS),
    )
    return decode_facts(info).embedding


def test_how_vectors_are_made_is_what_the_executor_says() -> None:
    assert embedding_of(None) == EmbeddingDefaults()
    given = executor_pb.EmbeddingDefaults(
        pooling=executor_pb.EMBEDDING_POOLING_CLS, normalize=False, prompts={"q": "Q"}, default_prompt="q"
    )
    assert embedding_of(given) == EmbeddingDefaults(TextPooling.CLS, False, {"q": "Q"}, "q")


@pytest.mark.parametrize(
    "given",
    [
        executor_pb.EmbeddingDefaults(pooling=4),  # type: ignore[arg-type]  # of a later version
        executor_pb.EmbeddingDefaults(prompts={str(n): "" for n in range(65)}),
        executor_pb.EmbeddingDefaults(prompts={"a": "x" * 4097}),
        executor_pb.EmbeddingDefaults(default_prompt="a"),
    ],
)
def test_an_executor_whose_vectors_can_not_be_made_as_it_says_is_refused(
    given: executor_pb.EmbeddingDefaults,
) -> None:
    with pytest.raises(ValueError, match="embedding"):
        embedding_of(given)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 1e9),
        ("temperature", float("nan")),
        ("top_p", 5),
        ("top_p", 0),
        ("top_k", -1),
        ("top_k", float("inf")),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 101),
        ("frequency_penalty", -101),
    ],
)
def test_a_default_that_no_request_may_have_is_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture, key: str, value: float
) -> None:
    with caplog.at_level(logging.WARNING):
        model = model_of({key: value, "repetition_penalty": 1.25} | {key: value})
    assert key not in model.generation_defaults
    [record] = caplog.records
    assert record.fields["key"] == key  # type: ignore[attr-defined]
    silent = check_request(pb.GenerateRequest(text="x"), model, DRAFTING).sampling
    plain = check_request(pb.GenerateRequest(text="x"), replace(model, generation_defaults={}), DRAFTING)
    assert getattr(silent, key) == getattr(plain.sampling, key)


def test_a_default_within_its_range_holds_for_requests_that_do_not_say() -> None:
    model = model_of({"temperature": 0.5, "top_k": 7.0, "top_p": 0.875, "made_up_next_year": -1e9})
    sampling = check_request(pb.GenerateRequest(text="x"), model, DRAFTING).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.875)


def test_more_end_tokens_than_a_row_may_carry_are_refused_at_the_handshake() -> None:
    assert model_of(ends=tuple(range(8))).limits.max_stop_token_ids == 0
    with pytest.raises(ValueError, match="9 end tokens, but its max_stop_token_ids is 8"):
        model_of(ends=tuple(range(9)))


def test_end_tokens_outside_of_the_vocabulary_are_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert model_of(ends=(5, 100, 2**32 - 1)).eos_token_ids == {5}
    [record] = caplog.records
    assert record.fields["ids"] == [100, 2**32 - 1]  # type: ignore[attr-defined]


FULL = {
    "max_stop_token_ids": 8,
    "max_logprobs": 5,
    "max_logit_bias": 4,
    "max_grammar_bytes": 100,
    "max_adapter_slots": 8,
    "max_full_logits_bytes": 49,
}
ALL = (
    executor_pb.CAPABILITY_FORK,
    executor_pb.CAPABILITY_GRAMMAR,
    executor_pb.CAPABILITY_GRAMMAR_BEGIN,
    executor_pb.CAPABILITY_SCORES,
    executor_pb.CAPABILITY_POOLING,
    executor_pb.CAPABILITY_ADAPTERS,
)


def facts_of(
    capabilities: Sequence[Any] = ALL, context: int = 64, hidden: int = 8, **limits: int
) -> ExecutorFacts:
    info = executor_pb.GetInfoResponse(
        model=executor_pb.ModelInfo(
            vocab_size=100, context_length=context, eos_token_ids=[0], hidden_size=hidden
        ),
        limits=executor_pb.Limits(**{**HOLDS, **FULL, **limits}),
        capabilities=capabilities,
    )
    return decode_facts(info)


@pytest.mark.parametrize(
    ("facts", "lacking"),
    [
        (facts_of(), ""),
        (facts_of(context=65, max_logprobs=6), ""),
        (facts_of(max_sequences=1, total_pages=4, max_drafts=0, max_adapter_slots=1), ""),
        (facts_of(ALL[:5]), "adapters: 0, not 1"),
        (facts_of((*ALL[:2], *ALL[3:])), "grammars that begin after a token: 0, not 1"),
        (facts_of((*ALL[:1], *ALL[2:])), "max_grammar_bytes: 0, not 100"),
        (facts_of(ALL[1:]), "forks: 0, not 1"),
        (facts_of(context=63), "context_length: 63, not 64"),
        (facts_of(max_grammar_bytes=99), "max_grammar_bytes: 99, not 100"),
        (facts_of(max_stop_token_ids=4), "max_stop_token_ids: 4, not 5"),
        (facts_of(max_logit_bias=3), "max_logit_bias: 3, not 4"),
        (facts_of(max_logprobs=4), "max_logprobs: 4, not 5"),
        (facts_of((*ALL[:4], ALL[5])), "hidden_size: 0, not 8"),
        (facts_of(hidden=4), "hidden_size: 4, not 8"),
        (facts_of((*ALL[:3], *ALL[4:])), "scores: 0, not 1"),
        (facts_of(max_full_logits_bytes=48), "scores: 0, not 1"),
    ],
)
def test_a_standby_executor_that_can_not_do_what_is_offered_is_refused_at_the_handshake(
    facts: ExecutorFacts, lacking: str
) -> None:
    nothing: Any = None
    pool = ExecutorPool([], nothing, nothing, LIMITS, nothing, lambda: None)
    model = served_model(facts_of(), TokenizerSource(), LIMITS)
    pool.served = Served(model, None, None)
    if not lacking:
        assert not pool.check(facts)
        return
    with pytest.raises(RefusedExecutorError) as caught:
        pool.check(facts)
    assert str(caught.value) == f"it can't do what the service offers ({lacking})"


def test_every_limit_that_clients_are_told_is_asked_of_a_standby_executor() -> None:
    """A field that is added to what is offered belongs into `shortcomings`, or here."""
    speed = {"max_n", "max_draft_tokens"}  # completions that have no place wait; drafts change no token
    own = {"max_stop_strings", "max_stop_string_bytes", "max_prompt_bytes", "max_inputs"}  # the scheduler's
    offered = {field.name for field in fields(RequestAllowance)}
    offered |= {field.name for field in fields(ServedModel) if field.type in ("int", "bool")}
    offered.remove("takes_reasoning")  # the chat template's, which executors of one model have in common
    model = served_model(facts_of(), TokenizerSource(), LIMITS)
    least = facts_of((executor_pb.CAPABILITY_CLASSIFIER,), context=1, hidden=0, **dict.fromkeys(FULL, 0))
    lacking = {line.split(":")[0] for line in shortcomings(least, model)}
    named = {
        "adapters": "has_adapters",
        "forks": "max_n",
        "grammars that begin after a token": "grammars_begin",
        "an output layer": "can_sample",
        "scores": "can_score",
        "hidden_size": "embedding_size",
    }
    assert {named.get(name, name) for name in lacking} | speed | own == offered - {"vocab_size"}
