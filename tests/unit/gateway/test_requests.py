"""A request of the gateway is the same request to the public API, and its errors have OpenAI's names."""

from __future__ import annotations

from typing import Any

import pytest
from paceline.scheduler.v1 import scheduler_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2 as worker_pb

from scheduler_service.errors import ErrorReason
from scheduler_service.gateway.codec.requests import in_openai_words, public_request
from scheduler_service.rpc.codec.requests import check_request
from scheduler_service.streams.request import CheckedRequest, TokenPrompt
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.models_made_here import DRAFTING, MODEL


def request(**sampling: Any) -> worker_pb.GenerateRequest:
    tokens = worker_pb.TokenizedInput(input_ids=[1, 2, 3])
    params = worker_pb.SamplingParams(**sampling)
    return worker_pb.GenerateRequest(request_id="r-1", tokenized=tokens, sampling_params=params)


def checked(**sampling: Any) -> CheckedRequest:
    return check_request(public_request(request(**sampling)), MODEL, DRAFTING)


def test_all_that_the_gateway_sends_reaches_the_request() -> None:
    given = checked(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        frequency_penalty=1.5,
        presence_penalty=-0.5,
        repetition_penalty=1.25,
        max_tokens=7,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[4],
        n=2,
        logprobs=2,
        seed=9,
        logit_bias={5: 1.5},
    )
    sampling = given.sampling
    assert given.id == "r-1"
    assert isinstance(given.prompt, TokenPrompt)
    assert list(given.prompt.ids) == [1, 2, 3]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 3, 0.125)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (1.5, -0.5)
    assert (sampling.repetition_penalty, sampling.seed, sampling.logprobs) == (1.25, 9, 2)
    assert sampling.logit_bias == ((5, 1.5),)
    assert (given.max_tokens, given.min_tokens, given.n) == (7, 2, 2)
    assert given.stop_strings == ("a", "b")
    assert given.stop_token_ids == {4}
    assert given.eos_token_ids == MODEL.eos_token_ids
    assert given.output.ids
    assert not given.output.text


def test_unset_numbers_mean_no_filter_and_no_penalty() -> None:
    sampling = checked().sampling
    assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (1.0, 0, 0.0, 1.0)
    assert sampling.temperature == MODEL.generation_defaults["temperature"]
    assert checked(temperature=0.0).sampling.temperature == 0.0


def test_a_negative_seed_is_one_of_64_bits() -> None:
    assert checked(seed=-1).sampling.seed == 2**64 - 1


def test_a_prompt_may_be_text() -> None:
    message = worker_pb.GenerateRequest(
        text="hello", sampling_params=worker_pb.SamplingParams(ignore_eos=True)
    )
    translated = public_request(message)
    assert translated.text == "hello"
    assert translated.stop.ignore_eos


@pytest.mark.parametrize(
    ("constraint", "grammar"),
    [
        ({"json_schema": "{}"}, pb.Grammar(json_schema="{}")),
        ({"json_object": True}, pb.Grammar(json_schema='{"type": "object"}')),
        ({"regex": "a+"}, pb.Grammar(regex="a+")),
        ({"grammar": 'start: "a"'}, pb.Grammar(lark='start: "a"')),
        ({"structural_tag": "{}"}, pb.Grammar(structural_tag="{}")),
        (
            {"choice": worker_pb.ChoiceConstraint(choices=["a", "b"])},
            pb.Grammar(choices=pb.Choices(choices=["a", "b"])),
        ),
    ],
)
def test_a_constraint_is_the_grammar_of_its_kind(constraint: dict[str, Any], grammar: pb.Grammar) -> None:
    assert public_request(request(**constraint)).grammar == grammar


def test_every_constraint_of_the_protocol_is_translated() -> None:
    kinds = worker_pb.SamplingParams.DESCRIPTOR.oneofs_by_name["constraint"].fields
    values = {"json_object": True, "choice": worker_pb.ChoiceConstraint(choices=["x"])}
    for kind in (field.name for field in kinds):
        translated = public_request(request(**{kind: values.get(kind, "x")}))
        assert translated.HasField("grammar"), kind


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"media_refs": worker_pb.MediaRefs()}, "media_refs"),
        ({"mm_inputs": worker_pb.MultimodalInputs()}, "mm_inputs"),
        ({"extra_mm_inputs": [worker_pb.MultimodalInputs()]}, "extra_mm_inputs"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"sampling_params": worker_pb.SamplingParams(prompt_logprobs=0)}, "prompt_logprobs"),
        ({"sampling_params": worker_pb.SamplingParams(truncate_prompt_tokens=3)}, "truncate_prompt_tokens"),
    ],
)
def test_what_is_missing_here_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    message = worker_pb.GenerateRequest(tokenized=worker_pb.TokenizedInput(input_ids=[1]), **fields)
    with raises(ErrorReason.UNSUPPORTED) as caught:
        public_request(message)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"max_tokens": 65}, "max_tokens"),
        ({"max_tokens": 1, "min_tokens": 2}, "min_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"stop": ["a", "x" * 17]}, "stop[1]"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop_token_ids": [100]}, "stop_token_ids[0]"),
        ({"logprobs": 6}, "logprobs"),
        ({"logit_bias": {100: 1.0}}, "logit_bias[100]"),
        ({"n": 5}, "n"),
    ],
)
def test_a_wrong_parameter_is_named_as_openai_names_it(sampling: dict[str, Any], field: str) -> None:
    with raises(ErrorReason.INVALID_REQUEST) as caught:
        checked(**sampling)
    error = in_openai_words(caught.value)
    assert error.field == field
    assert error.message.startswith(f"{field}: ")
    assert error.reason is ErrorReason.INVALID_REQUEST


@pytest.mark.parametrize(
    ("sampling", "field"), [({"logprobs": -1}, "logprobs"), ({"logit_bias": {-1: 1.0}}, "logit_bias")]
)
def test_what_no_public_request_can_say_is_refused_here(sampling: dict[str, Any], field: str) -> None:
    with raises(ErrorReason.INVALID_REQUEST) as caught:
        public_request(request(**sampling))
    assert caught.value.field == field


def test_a_prompt_outside_of_the_vocabulary_is_the_prompts_fault() -> None:
    message = worker_pb.GenerateRequest(tokenized=worker_pb.TokenizedInput(input_ids=[1, 100]))
    with raises(ErrorReason.INVALID_REQUEST) as caught:
        check_request(public_request(message), MODEL, DRAFTING)
    assert in_openai_words(caught.value).field == "prompt[1]"
