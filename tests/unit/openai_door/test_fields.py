"""Each field that OpenAI's own types have is done, accepted at its default, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
from paceline_openai.fields import Table
from paceline_openai.refusals import Refusal, from_error
from paceline_openai.routes import ENDPOINTS
from paceline_openai.sampling import grammar_name

from tests.unit.client.test_errors import invalid

TABLES = {endpoint.path: endpoint.table for endpoint in ENDPOINTS if endpoint.table is not None}
OPENAIS = {
    "/v1/chat/completions": (
        "messages model audio frequency_penalty function_call functions logit_bias logprobs"
        " max_completion_tokens max_tokens metadata modalities moderation n parallel_tool_calls prediction"
        " presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort"
        " response_format safety_identifier seed service_tier stop store stream stream_options temperature"
        " tool_choice tools top_logprobs top_p user verbosity web_search_options"
    ),
    "/v1/completions": (
        "model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed"
        " stop stream stream_options suffix temperature top_p user"
    ),
    "/v1/responses": (
        "access_programs background background_options context_management conversation image"
        " include input instructions max_output_tokens"
        " max_tool_calls metadata model moderation parallel_tool_calls previous_response_id prompt"
        " prompt_cache_key prompt_cache_options prompt_cache_retention reasoning safety_identifier"
        " service_tier store stream stream_options temperature text tool_choice tools top_logprobs top_p"
        " truncation user"
    ),
    "/v1/embeddings": "input model dimensions encoding_format user",
}
"""Top-level fields of the requests of OpenAI's SDK 3.57; tests/gateway/test_door.py asks it."""


@pytest.mark.parametrize("path", OPENAIS)
def test_each_field_of_openais_types_is_known(path: str) -> None:
    assert set(OPENAIS[path].split()) <= set(TABLES[path].fields)


@pytest.mark.parametrize("path", TABLES)
def test_a_field_that_is_not_done_is_refused_by_its_name_unless_at_its_default(path: str) -> None:
    table: Table = TABLES[path]
    minimal: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "input": "x",
        "query": "x",
        "documents": ["x"],
        "tokens": [1],
    }
    required = {name: minimal[name] for name, field in table.fields.items() if field.required}
    table.read(required)
    for name, field in table.fields.items():
        assert field.note
        if not field.required:
            table.read({**required, name: None})
        if field.kind is None:
            with pytest.raises(Refusal) as refused:
                table.read({**required, name: {"no": "default"}})
            assert (refused.value.status, refused.value.param) == (400, name)
            assert name in refused.value.message
            for value in field.defaults:
                assert name not in table.read({**required, name: value})


@pytest.mark.parametrize("path", TABLES)
def test_an_unknown_field_and_a_missing_one_are_refused(path: str) -> None:
    with pytest.raises(Refusal) as refused:
        TABLES[path].read({"tempratur": 1})
    assert (refused.value.param, refused.value.code) == ("tempratur", "unknown_parameter")
    meant = "; did you mean temperature?" if "temperature" in TABLES[path].fields else "tempratur"
    assert refused.value.message.endswith(meant)
    required = [name for name, field in TABLES[path].fields.items() if field.required]
    if required:
        with pytest.raises(Refusal) as refused:
            TABLES[path].read({})
        assert (refused.value.param, refused.value.code) == (required[0], "missing_required_parameter")


@pytest.mark.parametrize(
    ("path", "values", "message", "param"),
    [
        ("/v1/completions", {}, "token_ids[3]: is 300, but the vocabulary has 257 tokens", "prompt[3]"),
        ("/v1/chat/completions", {}, "stop.strings[0]: must not be empty", "stop[0]"),
        ("/v1/chat/completions", {}, "sampling.logprobs: must be within [0, 20], not 21", "top_logprobs"),
        ("/v1/completions", {}, "top_logprobs: must be within [0, 20], not 21", "logprobs"),
        ("/v1/chat/completions", {}, "tools[0] has no 'name'", "tools[0]"),
        ("/v1/chat/completions", {}, "messages.tool_choice.name: 'g' is none", "tool_choice.name"),
        ("/v1/chat/completions", {"guided_json": {}}, "grammar.json_schema: Invalid type", "guided_json"),
        ("/v1/responses", {"guided_grammar": "a"}, "grammar.lark: 1(9): Expected token", "guided_grammar"),
        ("/v1/responses", {"text": {}}, "grammar.json_schema: Invalid type: objekt", "text"),
        ("/v1/embeddings", {}, "inputs: has 3 tokens in all, at most 2 are allowed", "input"),
        ("/detokenize", {}, "token_ids[0]: is 300, but the vocabulary has 257 tokens", "tokens"),
        ("/v1/chat/completions", {}, "messages.template_arguments: has a number", "chat_template_kwargs"),
        ("/v1/chat/completions", {}, "model the scheduler does not know", None),
    ],
)
def test_an_error_of_a_scheduler_names_the_field_as_the_request_does(
    path: str, values: dict[str, Any], message: str, param: str | None
) -> None:
    [endpoint] = [one for one in ENDPOINTS if one.path == path]
    error = invalid(message, message.split(":")[0])
    refusal = from_error(error, {**endpoint.names, **grammar_name(values)})
    assert (refusal.status, refusal.param, refusal.message) == (400, param, error.message)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"tools": [{"type": "function"}]}, "tools[0].name"),
        ("/v1/responses", {"tools": [{"type": "function", "name": "x", "strikt": True}]}, "tools[0].strikt"),
        ("/v1/responses", {"tool_choice": {"type": "function"}}, "tool_choice.name"),
        (
            "/v1/responses",
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}},
            "tool_choice.tools[0].name",
        ),
        (
            "/v1/responses",
            {"tool_choice": {"type": "allowed_tools", "mode": "no", "tools": []}},
            "tool_choice.tools",
        ),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (
            "/v1/chat/completions",
            {"tool_choice": {"type": "function", "function": {}}},
            "tool_choice.function.name",
        ),
        (
            "/v1/chat/completions",
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [1]}}},
            "tool_choice.allowed_tools.tools[0]",
        ),
    ],
)
def test_a_wrong_tool_is_named_as_the_request_does(path: str, fields: dict[str, Any], param: str) -> None:
    begin: dict[str, Any] = (
        {"input": "x"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "x"}]}
    )
    with pytest.raises(Refusal) as refused:
        TABLES[path].read({**begin, **fields})
    assert refused.value.param == param
    assert param in refused.value.message


@pytest.mark.parametrize("value", [True, "1", [], {}, 1e400, -1, 2**40])
def test_a_wrong_number_is_refused(value: Any) -> None:
    with pytest.raises(Refusal) as refused:
        TABLES["/v1/completions"].read({"prompt": "x", "max_tokens": value})
    assert refused.value.param == "max_tokens"
