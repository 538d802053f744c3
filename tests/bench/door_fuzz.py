"""Requests made from the tables of the OpenAI API's fields, and then spoilt."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from paceline_openai.routes import ENDPOINTS

_VALID: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
    ],
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
    "prompt": ["x", "y"], "query": "x", "documents": ["x", {"text": "y"}], "tokens": [1, 2],
    "text_1": "x", "text_2": ["y"], "stop": ["x"], "logit_bias": {"5": 1.0}, "stream_options": {},
    "metadata": {"a": "b"}, "structured_outputs": {"regex": "a+"}, "guided_json": {"type": "object"},
    "guided_choice": ["a"], "guided_grammar": 'start: "a"', "structural_tag": {"type": "any_text"},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "tools": [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    "text": {"format": {"type": "text"}}, "include": ["message.output_text.logprobs"], "reasoning": {},
    "chat_template_kwargs": {"enable_thinking": False}, "encoding_format": "base64", "model": "oracle",
}  # fmt: skip
_CHEAP = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n": 1}
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1.5, 2**31, 2**32 - 1, 2**64, 10**400, -(2**63) - 1, 1e308, "", "x",
    "a" * 300, "\u0000",
    "\ud800", "\U0001f600", "%s", "../..", [], {}, [[]], [{}], {"": ""}, {"type": []}, {"type": {}}, [None],
    [1, "x"], "NaN", {"type": "function"}, [{"type": "function", "function": None}], [{"role": []}],
    [[1], ["x"]], {"a": {"b": {}}},
)  # fmt: skip


def bodies(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """(path, body) of so many requests, the same for the same seed."""
    chance = random.Random(seed)
    tables = [(one.path, one.table) for one in ENDPOINTS if one.table is not None]
    for _ in range(count):
        path, table = chance.choice(tables)
        names = [name for name, one in table.fields.items() if one.required or chance.random() < 0.1]
        body = {name: _VALID.get(name, chance.choice(_ODD)) for name in names}
        body |= {name: value for name, value in _CHEAP.items() if name in table.fields}
        for _ in range(chance.randint(1, 3)):
            body = _spoilt(body, chance)
        if not isinstance(body, dict):
            body = {"prompt": body}
        content = json.dumps(body).encode()
        if chance.random() < 0.1:
            place = chance.randrange(len(content))
            content = (
                content[:place] + chance.choice((b"", b"\xff", b"}", b'"', b"\x00")) + content[place + 1 :]
            )
        yield path, content


def _spoilt(value: Any, chance: random.Random) -> Any:
    """The value with one place in it replaced, left out or added."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.15:
        return chance.choice(_ODD)
    if isinstance(value, dict):
        key = chance.choice(list(value))
        kind = chance.random()
        if kind < 0.1:
            return {name: inner for name, inner in value.items() if name != key}
        if kind < 0.2:
            return {**value, chance.choice(("nonsense", "", key * 2, "type")): chance.choice(_ODD)}
        return {**value, key: _spoilt(value[key], chance)}
    place = chance.randrange(len(value))
    return [*value[:place], _spoilt(value[place], chance), *value[place + 1 :]]
