"""Grammars of outputs in the harmony format: first reasoning, and a remark, that the model may leave out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from scheduler_service.chat.call_grammar import LarkRules, argument_rules, as_lark, json_rule
from scheduler_service.chat.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from scheduler_service.chat.tools import OfferedTool

Ids = Mapping[str, int]
"""Token ids of the markers."""


def harmony_calls(ids: Ids, tools: Sequence[OfferedTool]) -> LarkRules:
    """A call, and what may stand before it. Raises ToolGrammarError."""
    rules = _before(ids)
    rules["call"] = "before (" + " | ".join(f"call_{index}" for index in range(len(tools))) + ")"
    for index, tool in enumerate(tools):
        head = json.dumps(f"commentary to=functions.{tool.name} ")
        rules[f"call_{index}"] = (
            f'{_token(ids, CHANNEL)} {head} {_token(ids, CONSTRAIN)} "json" {_token(ids, MESSAGE)} '
            f"arguments_{index}"
        )
    return rules | argument_rules(tools)


def harmony_answer(ids: Ids, tools: Sequence[OfferedTool], _max_calls: int) -> str:
    """An answer, or one call of these tools: the format has no more in an output."""
    return as_lark(f"call | {_final(ids)} text", harmony_calls(ids, tools))


def harmony_schema(ids: Ids, schema: Mapping[str, object]) -> str:
    """An answer that is JSON of this schema."""
    return as_lark(f"{_final(ids)} answer", {"answer": json_rule(schema), **_before(ids)})


def harmony_choices(ids: Ids, choices: Sequence[str]) -> str:
    """An answer that is one of these texts."""
    answer = " | ".join(map(json.dumps, choices))
    return as_lark(f"{_final(ids)} answer", {"answer": answer, **_before(ids)})


def _before(ids: Ids) -> LarkRules:
    channel, message = _token(ids, CHANNEL), _token(ids, MESSAGE)
    ends = f'{_token(ids, END)} {_token(ids, START)} "assistant"'
    return {
        "before": "reasoning remark",
        "reasoning": f'{channel} "analysis" {message} text {ends} |',
        "remark": f'{channel} "commentary" {message} text {ends} |',
        "text": "TEXT |",
        "TEXT": "/(?s:.+)/",
    }


def _final(ids: Ids) -> str:
    return f'before {_token(ids, CHANNEL)} "final" {_token(ids, MESSAGE)}'


def _token(ids: Ids, marker: str) -> str:
    return f"<[{ids[marker]}]>"
