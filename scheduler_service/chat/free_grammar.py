"""Grammars of answers with text and calls, for requests that restrict the calls and leave the text free.

A text has nothing that the format's parser would read as a call: neither the marker's token nor its spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from scheduler_service.chat import llama_json
from scheduler_service.chat.call_grammar import LarkRules, as_lark, object_calls
from scheduler_service.chat.call_object import KEYS
from scheduler_service.chat.tools import OfferedTool

_ANY = "(?s:.*)"
_SPACE = r"[ \t\n\r]*"


def marked_answer(marker: str, token: int | None, rules: LarkRules, calls: str, times: str) -> str:
    """Text with calls anywhere in it. `calls`: the rule of one or more, which begin with `marker`.

    `token`: its id; None: it is text. `times`: how often the rule may stand in an answer, as in Lark.
    """
    escaped = re.escape(marker).replace("/", r"\/")
    rules |= {"text": "TEXT |", "TEXT": _without("(?s:.+)", f"{_ANY}{escaped}{_ANY}")}
    if token is not None:
        return as_lark(f"text ({calls} text){times}", rules)
    # The lexer takes the longest terminal that there is: text before a marker is one terminal with it.
    behind_marker = rules[calls].removeprefix(json.dumps(marker))
    rules |= {calls: f"HEAD{behind_marker}", "HEAD": _without(f"{_ANY}{escaped}", f"{_ANY}{escaped}(?s:.+)")}
    return as_lark(f"{calls}{times} text", rules)


def llama_json_answer(tag: int | None, tools: Sequence[OfferedTool], max_calls: int) -> str:
    """Text, or calls where the answer begins or after text and the tag; nothing follows them.

    `tag`: its token id; None: it has none, and is in no answer. `max_calls`: 0: any number.
    """
    following = '("; " call)' + (f"{{0,{max_calls - 1}}}" if max_calls else "*")
    # An object is text if its first key is none of a call's. One with an escape may be any key.
    keys = "|".join(sorted(KEYS))
    of_a_call = rf'{_SPACE}\{{{_SPACE}"(({keys})"|[^"\\]*\\){_ANY}'
    tagged = f"{_ANY}{re.escape(llama_json.TAG)}{_ANY}"
    rules = {"text": "TEXT |", "TEXT": _without("(?s:.+)", f"({of_a_call})|({tagged})")}
    rules["calls"] = f"call {following}" if max_calls != 1 else "call"
    start = "text | calls" if tag is None else f"text | calls | text <[{tag}]> calls"
    return as_lark(start, rules | object_calls(tools, "parameters"))


def _without(regex: str, excluded: str) -> str:
    """A terminal: what one regular expression matches, and another does not."""
    return f"/{regex}/ & ~/{excluded}/"
