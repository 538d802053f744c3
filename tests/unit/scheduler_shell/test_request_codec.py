"""Every field of a request has a limit, and a refusal names the field."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.identity import Identity

from scheduler_service.core.request import DraftingWish, DraftSource, OutputGrammar
from scheduler_service.errors import ErrorReason, ServiceError
from scheduler_service.model import DraftingOffer
from scheduler_service.rpc.codec.requests import (
    check_request,
)
from scheduler_service.streams.request import ChatPrompt, CheckedRequest, TextPrompt, TokenPrompt
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.models_made_here import DRAFTING, LIMITS, MODEL

NAN, INF = math.nan, math.inf


def request(**fields: Any) -> pb.GenerateRequest:
    if not {"text", "messages", "token_ids"} & fields.keys():
        fields["text"] = "hello"
    return pb.GenerateRequest(**fields)


def sampling(**fields: Any) -> pb.GenerateRequest:
    return request(sampling=pb.SamplingParams(**fields))


def stop(**fields: Any) -> pb.GenerateRequest:
    return request(stop=pb.StopConditions(**fields))


def chatting(content: str = "x", **options: Any) -> pb.GenerateRequest:
    messages = [pb.Message(role="user", content=content)]
    return request(messages=pb.Messages(messages=messages, **options))


def chat(*turns: tuple[str, str]) -> pb.GenerateRequest:
    messages = [pb.Message(role=role, content=content) for role, content in turns]
    return request(messages=pb.Messages(messages=messages))


def ids(*values: int) -> pb.GenerateRequest:
    return request(token_ids=pb.TokenIds(ids=values))


def speculation(**fields: Any) -> pb.GenerateRequest:
    return request(speculation=pb.Speculation(**fields))


FIXED = pb.SPECULATION_MODE_FIXED
NGRAM, EXECUTOR = frozenset({DraftSource.NGRAM}), frozenset({DraftSource.EXECUTOR})
BOTH = DraftingOffer(NGRAM | EXECUTOR, DraftingWish(NGRAM | EXECUTOR, 5))

BAD: list[tuple[str, pb.GenerateRequest]] = [
    ("prompt", pb.GenerateRequest()),
    ("text", request(text="")),
    ("text", request(text="é" * 501)),
    ("messages.template_arguments.messages", chatting(template_arguments={"messages": []})),
    ("messages.template_arguments", chatting(template_arguments={"x": "y" * 2000})),
    ("messages.template_arguments", chatting(template_arguments={"x": math.inf})),
    ("messages.continue_final_message", chatting(" ", continue_final_message=True)),
    ("messages.omit_opening", chatting(continue_final_message=True, omit_opening=True)),
    ("labels", request(text="x", labels={"": "y"})),
    ("labels", request(text="x", labels={"x" * 65: "y"})),
    ("labels[a]", request(text="x", labels={"a": "y" * 2049})),
    ("labels", request(text="x", labels={str(i): "" for i in range(33)})),
    ("labels", request(text="x", labels={str(i): "y" * 2000 for i in range(9)})),
    ("messages", chat()),
    ("messages", chat(*[("user", "x")] * 1025)),
    ("messages[0].role", chat(("", "x"))),
    ("messages[1].role", chat(("user", "x"), ("r" * 65, "x"))),
    ("messages[1].role", chat(("user", "x"), ("user|>", "x"))),
    ("messages[1].content", chat(("user", "x" * 600), ("user", "x" * 600))),
    ("token_ids", ids()),
    ("token_ids", ids(*[1] * 65)),
    ("token_ids[2]", ids(1, 2, 100)),
    ("token_ids[0]", ids(2**32 - 1)),
    ("request_id", request(request_id="x" * 129)),
    ("request_id", request(request_id="a b")),
    ("request_id", request(request_id="é")),
    ("request_id", request(request_id="a\n")),
    ("cache_salt", request(cache_salt="x" * 257)),
    ("n", request(n=5)),
    ("n", request(n=1_000_000)),
    ("stop.max_tokens", stop(max_tokens=0)),
    ("stop.max_tokens", stop(max_tokens=10**9)),
    ("stop.min_tokens", stop(min_tokens=65)),
    ("stop.min_tokens", stop(min_tokens=9, max_tokens=8)),
    ("stop.strings", stop(strings=["x"] * 10_000)),
    ("stop.strings[1]", stop(strings=["x", ""])),
    ("stop.strings[0]", stop(strings=["x" * 17])),
    ("stop.token_ids", stop(token_ids=[1] * 5)),
    ("stop.token_ids[1]", stop(token_ids=[1, 100])),
    ("sampling.logprobs", sampling(logprobs=6)),
    ("sampling.logit_bias", sampling(logit_bias=dict.fromkeys(range(5), 0.0))),
    ("sampling.logit_bias[100]", sampling(logit_bias={100: 1.0})),
    ("speculation.draft_tokens", speculation(mode=FIXED)),
    ("speculation.draft_tokens", speculation(mode=FIXED, draft_tokens=17)),
    ("speculation.draft_tokens", speculation(mode=FIXED, draft_tokens=2**32 - 1)),
    ("speculation.draft_tokens", speculation(mode=pb.SPECULATION_MODE_AUTO, draft_tokens=1)),
    ("speculation.draft_tokens", speculation(mode=pb.SPECULATION_MODE_OFF, draft_tokens=1)),
    ("speculation.draft_tokens", speculation(draft_tokens=1)),
    ("speculation.mode", speculation(mode=9)),
    ("speculation.drafter", speculation(drafter=pb.DRAFTER_DRAFT_EXECUTOR)),
    ("speculation.drafter", speculation(drafter=pb.DRAFTER_GRAMMAR)),  # there are no grammars
    ("speculation.drafter", speculation(drafter=9)),
    *((f"sampling.logit_bias[{7}]", sampling(logit_bias={7: value})) for value in (NAN, INF, -INF, 1001)),
    *(("sampling.temperature", sampling(temperature=value)) for value in (NAN, INF, -INF, -0.1, 100.1)),
    *(("sampling.top_p", sampling(top_p=value)) for value in (NAN, INF, 0, -1, 1.1)),
    *(("sampling.min_p", sampling(min_p=value)) for value in (NAN, INF, -0.1, 1.1)),
    *(
        ("sampling.repetition_penalty", sampling(repetition_penalty=value))
        for value in (NAN, INF, 0, -1, 101)
    ),
    *(("sampling.presence_penalty", sampling(presence_penalty=value)) for value in (NAN, -INF, 101, -101)),
    *(("sampling.frequency_penalty", sampling(frequency_penalty=value)) for value in (NAN, INF, 101, -101)),
]


@pytest.mark.parametrize(("field", "message"), BAD)
def test_a_bad_field_is_refused_by_its_name(field: str, message: pb.GenerateRequest) -> None:
    with raises(ErrorReason.INVALID_REQUEST) as caught:
        check_request(message, MODEL, DRAFTING)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert len(str(caught.value)) < 300  # says what is wrong without repeating what was sent


def test_unset_fields_take_the_models_defaults_and_then_the_schedulers() -> None:
    checked = check_request(request(), MODEL, DRAFTING)
    assert (checked.sampling.temperature, checked.sampling.top_k, checked.sampling.top_p) == (0.5, 7, 1.0)
    assert (checked.n, checked.max_tokens, checked.min_tokens, checked.priority) == (1, None, 0, 0)
    assert checked.eos_token_ids == {0}
    assert checked.sampling.logprobs is None


def test_a_field_set_to_zero_is_not_unset() -> None:
    checked = check_request(sampling(temperature=0, top_k=0, seed=0, logprobs=0), MODEL, DRAFTING)
    assert checked.sampling.temperature == 0
    assert (checked.sampling.top_k, checked.sampling.seed, checked.sampling.logprobs) == (0, 0, 0)


@pytest.mark.parametrize(
    ("fields", "drafting", "expected"),
    [
        ({}, DRAFTING, DraftingWish(NGRAM)),
        ({}, BOTH, DraftingWish(NGRAM | EXECUTOR, 5)),
        ({}, DraftingOffer(default=DraftingWish()), DraftingWish()),
        ({"drafter": pb.DRAFTER_DRAFT_EXECUTOR}, BOTH, DraftingWish(EXECUTOR, 5)),
        ({"drafter": pb.DRAFTER_NGRAM}, DraftingOffer(default=DraftingWish()), DraftingWish()),
        ({"mode": pb.SPECULATION_MODE_OFF}, BOTH, DraftingWish()),
        ({"mode": pb.SPECULATION_MODE_AUTO}, BOTH, DraftingWish(NGRAM | EXECUTOR)),
        ({"mode": pb.SPECULATION_MODE_AUTO, "drafter": pb.DRAFTER_NGRAM}, BOTH, DraftingWish(NGRAM)),
        ({"mode": FIXED, "draft_tokens": 16}, DraftingOffer(default=DraftingWish()), DraftingWish(NGRAM, 16)),
        (
            {"mode": FIXED, "draft_tokens": 1, "drafter": pb.DRAFTER_DRAFT_EXECUTOR},
            BOTH,
            DraftingWish(EXECUTOR, 1),
        ),
    ],
)
def test_speculation_is_the_requests_choice_of_what_the_server_has(
    fields: dict[str, Any], drafting: DraftingOffer, expected: DraftingWish
) -> None:
    assert check_request(speculation(**fields), MODEL, drafting).speculation == expected


def test_forced_tokens_are_drafted_unless_the_request_names_another_drafter() -> None:
    model, grammar = replace(MODEL, max_grammar_bytes=9), frozenset({DraftSource.GRAMMAR})

    def wished(**fields: Any) -> DraftingWish:
        return check_request(speculation(**fields), model, DRAFTING).speculation

    assert wished() == wished(mode=pb.SPECULATION_MODE_AUTO) == DraftingWish(NGRAM | grammar)
    assert wished(drafter=pb.DRAFTER_GRAMMAR) == DraftingWish(grammar)
    assert wished(drafter=pb.DRAFTER_NGRAM) == DraftingWish(NGRAM)
    assert wished(drafter=pb.DRAFTER_GRAMMAR, mode=pb.SPECULATION_MODE_OFF) == DraftingWish()


def test_a_fixed_number_of_drafts_needs_an_executor_that_verifies() -> None:
    model = replace(MODEL, max_draft_tokens=0)
    with raises(ErrorReason.INVALID_REQUEST, match="verifies no drafts"):
        check_request(speculation(mode=FIXED, draft_tokens=1), model, DRAFTING)


def test_ids_and_seeds_are_drawn_and_differ() -> None:
    checked = [check_request(request(), MODEL, DRAFTING) for _ in range(50)]
    assert len({one.id for one in checked}) == len({one.sampling.seed for one in checked}) == 50


def test_a_filter_as_wide_as_the_vocabulary_is_none() -> None:
    assert check_request(sampling(top_k=2**32 - 1), MODEL, DRAFTING).sampling.top_k == 0
    assert check_request(sampling(top_k=99), MODEL, DRAFTING).sampling.top_k == 99


def test_prompts_keep_their_kind() -> None:
    assert check_request(request(text="hi"), MODEL, DRAFTING).prompt == TextPrompt("hi")
    assert check_request(ids(1, 99), MODEL, DRAFTING).prompt == TokenPrompt(array("I", [1, 99]))
    turn = {"role": "user", "content": ""}
    assert check_request(chat(("user", "")), MODEL, DRAFTING).prompt == ChatPrompt((turn,))


def test_reasoning_is_an_assistants_and_needs_a_template_that_reads_it() -> None:
    def thought(role: str) -> pb.GenerateRequest:
        turns = [pb.Message(role="user", content="x"), pb.Message(role=role, content="y", reasoning="hm")]
        return request(messages=pb.Messages(messages=turns))

    model = replace(MODEL, takes_reasoning=True)
    prompt = check_request(thought("assistant"), model, DRAFTING).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1]["reasoning_content"] == "hm"
    with raises(ErrorReason.INVALID_REQUEST) as caught:
        check_request(thought("user"), model, DRAFTING)
    assert caught.value.field == "messages[1].reasoning"
    with raises(ErrorReason.UNSUPPORTED) as caught:
        check_request(thought("assistant"), MODEL, DRAFTING)
    assert caught.value.field == "messages[1].reasoning"


def test_ignore_eos_takes_the_models_end_tokens_away_and_no_others() -> None:
    checked = check_request(stop(ignore_eos=True, token_ids=[5, 5]), MODEL, DRAFTING)
    assert checked.eos_token_ids == frozenset()
    assert checked.stop_token_ids == {5}


any_float = st.floats(width=32)
any_uint32 = st.integers(0, 2**32 - 1)
small_or_any = st.integers(0, 10) | any_uint32
messages = st.builds(pb.Message, role=st.text(max_size=70), content=st.text(max_size=300))
prompts: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"text": st.text(max_size=1200)}),
    st.fixed_dictionaries({"messages": st.builds(pb.Messages, messages=st.lists(messages, max_size=4))}),
    st.fixed_dictionaries({"token_ids": st.builds(pb.TokenIds, ids=st.lists(small_or_any, max_size=70))}),
)
optional_fields: dict[str, st.SearchStrategy[Any]] = {
    "temperature": any_float,
    "top_k": any_uint32,
    "top_p": any_float,
    "min_p": any_float,
    "repetition_penalty": any_float,
    "presence_penalty": any_float,
    "frequency_penalty": any_float,
    "logit_bias": st.dictionaries(small_or_any, any_float, max_size=6),
    "seed": st.integers(0, 2**64 - 1),
    "logprobs": small_or_any,
}
stops = st.builds(
    pb.StopConditions,
    max_tokens=st.none() | small_or_any,
    min_tokens=small_or_any,
    strings=st.lists(st.text(max_size=20), max_size=6),
    token_ids=st.lists(small_or_any, max_size=6),
    ignore_eos=st.booleans(),
)

speculations = st.builds(
    pb.Speculation, mode=st.integers(0, 5), draft_tokens=small_or_any, drafter=st.integers(0, 4)
)


@given(
    prompts,
    st.fixed_dictionaries({}, optional=optional_fields),
    stops,
    st.text(max_size=10) | st.just("x" * 200),
    small_or_any,
    st.integers(-(2**31), 2**31 - 1),
    st.text(max_size=300),
    st.none() | speculations,
)
def test_any_message_is_taken_within_limits_or_refused_with_one_error(
    prompt: dict[str, Any],
    params: dict[str, Any],
    stop_conditions: pb.StopConditions,
    request_id: str,
    n: int,
    priority: int,
    salt: str,
    speculation: pb.Speculation | None,
) -> None:
    message = pb.GenerateRequest(
        **prompt,
        sampling=pb.SamplingParams(**params),
        stop=stop_conditions,
        request_id=request_id,
        n=n,
        priority=priority,
        cache_salt=salt,
        speculation=speculation,
    )
    try:
        checked = check_request(message, MODEL, DRAFTING)
    except ServiceError:
        return
    _assert_within_limits(checked)


def _assert_within_limits(checked: CheckedRequest) -> None:
    options = checked.sampling
    floats = [options.temperature, options.top_p, options.min_p, options.repetition_penalty]
    floats += [
        options.presence_penalty,
        options.frequency_penalty,
        *(value for _, value in options.logit_bias),
    ]
    assert all(math.isfinite(value) for value in floats)
    assert 1 <= checked.n <= LIMITS.max_n
    assert checked.max_tokens is None or 1 <= checked.max_tokens <= MODEL.context_length
    assert checked.speculation.drafters <= DRAFTING.drafters
    assert checked.speculation.length is None or 1 <= checked.speculation.length <= MODEL.max_draft_tokens
    assert len(checked.stop_strings) <= LIMITS.max_stop_strings
    assert all(checked.stop_strings)
    assert all(id_ < MODEL.vocab_size for id_ in checked.stop_token_ids)
    if isinstance(checked.prompt, TokenPrompt):
        assert all(id_ < MODEL.vocab_size for id_ in checked.prompt.ids)


def test_a_long_prompt_is_not_copied_on_its_way_to_the_core() -> None:
    prompt = array("I", range(1000))
    checked = check_request(request(text="hi"), MODEL, DRAFTING)
    assert checked.to_core(prompt, Identity("a", "token"), arrival=0.0, deadline=None).prompt is prompt


GRAMMARS = replace(MODEL, max_grammar_bytes=50)


def grammar(**fields: Any) -> pb.GenerateRequest:
    return request(grammar=pb.Grammar(**fields))


def test_a_grammar_is_taken_as_it_is_written() -> None:
    taken = check_request(grammar(regex="a+"), GRAMMARS, DRAFTING).sampling.grammar
    assert taken == OutputGrammar("regex", "a+")
    choices = grammar(choices=pb.Choices(choices=["a", ""]))
    assert check_request(choices, GRAMMARS, DRAFTING).sampling.grammar == OutputGrammar(
        "choices", choices=("a", "")
    )
    assert check_request(request(), GRAMMARS, DRAFTING).sampling.grammar is None


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (grammar(), "grammar"),
        (grammar(lark=""), "grammar.lark"),
        (grammar(choices=pb.Choices()), "grammar.choices"),
        (grammar(json_schema="x" * 51), "grammar"),
        (request(grammar=pb.Grammar(regex="a"), stop=pb.StopConditions(ignore_eos=True)), "stop.ignore_eos"),
    ],
)
def test_a_grammar_that_can_not_be_meant_is_refused(message: pb.GenerateRequest, field: str) -> None:
    with raises(ErrorReason.INVALID_REQUEST) as caught:
        check_request(message, GRAMMARS, DRAFTING)
    assert caught.value.field == field


def test_a_grammar_is_refused_by_name_where_the_executor_has_none() -> None:
    with raises(ErrorReason.UNSUPPORTED) as caught:
        check_request(grammar(regex="a"), MODEL, DRAFTING)
    assert caught.value.field == "grammar"
