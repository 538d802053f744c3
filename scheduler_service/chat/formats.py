"""How a model writes calls: the formats, and which one a model has.

A format is known by the chat template, which tells the model how to write calls, and by added tokens. What is
not known is not guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from scheduler_service.chat import harmony, hermes, llama_json
from scheduler_service.chat.call_grammar import (
    LarkRules,
    as_lark,
    hermes_calls,
    llama_json_calls,
    pythonic_calls,
)
from scheduler_service.chat.events import CallParser
from scheduler_service.chat.free_grammar import hermes_answer, llama_json_answer
from scheduler_service.chat.harmony import HarmonyParser
from scheduler_service.chat.harmony_grammar import (
    harmony_answer,
    harmony_calls,
    harmony_choices,
    harmony_schema,
)
from scheduler_service.chat.hermes import HermesParser
from scheduler_service.chat.llama_json import LlamaJsonParser
from scheduler_service.chat.pythonic import PythonicParser
from scheduler_service.chat.reasoning import code_of
from scheduler_service.chat.tools import OfferedTool

MARKERS = (
    hermes.BEGIN,
    hermes.END,
    llama_json.TAG,
    *harmony.MARKERS,
    *harmony.OPTIONAL_MARKERS,
)
"""Texts that formats look for among a tokenizer's added tokens."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls, with the tokens of one model."""

    name: str
    parser: Callable[[Container[str]], CallParser]
    """A parser of one completion's text, for tools of these names."""
    rules: Callable[[Sequence[OfferedTool]], LarkRules]
    """The grammar's rules of a call of one of these tools. Raises ToolGrammarError."""
    answer: Callable[[Sequence[OfferedTool], int], str] | None = None
    """A Lark grammar of text and up to a number of calls of these tools (0: any number), if there is one."""
    markers: Mapping[int, str] = field(default_factory=dict)
    """Token ids that are the format's markers, with their texts."""
    around: tuple[str, str] = ("", "")
    """Text before the first call and after the last one."""
    between: str | None = None
    """Text between two calls; None: the model's template knows one call at a time."""
    continued: Callable[[Container[str]], CallParser] | None = None
    """A parser of output that goes on with an answer. With it, the parsers read the whole output of every
    chat: reasoning, text and calls."""
    of_schema: Callable[[Mapping[str, object]], str] | None = None
    """With `continued`: a Lark grammar of an output whose answer is JSON of this schema."""
    of_choices: Callable[[Sequence[str]], str] | None = None
    """With `continued`: a Lark grammar of an output whose answer is one of these texts."""

    def grammar(self, tools: Sequence[OfferedTool], max_calls: int = 0) -> str:
        """A Lark grammar of calls of these tools, at least one and at most `max_calls` (0: any number).

        Raises ToolGrammarError.
        """
        several = "call"
        if self.between is not None and max_calls != 1:
            times = f"{{0,{max_calls - 1}}}" if max_calls else "*"
            several = f"call ({json.dumps(self.between)} call){times}"
        before, behind = (json.dumps(text) if text else "" for text in self.around)
        return as_lark(f"{before} {several} {behind}".strip(), self.rules(tools))


def _hermes(added: Mapping[str, int]) -> ToolFormat:
    begin, end = added.get(hermes.BEGIN), added.get(hermes.END)
    ids = None if begin is None or end is None else (begin, end)
    return ToolFormat(
        "hermes",
        partial(HermesParser, by_id=ids is not None),
        partial(hermes_calls, ids),
        partial(hermes_answer, ids),
        dict(zip(ids, (hermes.BEGIN, hermes.END), strict=True)) if ids is not None else {},
        between="\n",
    )


def _llama_json(added: Mapping[str, int]) -> ToolFormat:
    tag = added.get(llama_json.TAG)
    return ToolFormat(
        "llama3-json",
        partial(LlamaJsonParser, by_id=tag is not None),
        llama_json_calls,
        partial(llama_json_answer, tag),
        {} if tag is None else {tag: llama_json.TAG},
    )


def _pythonic(_added: Mapping[str, int]) -> ToolFormat:
    return ToolFormat("llama3-pythonic", PythonicParser, pythonic_calls, around=("[", "]"), between=", ")


def _harmony(added: Mapping[str, int]) -> ToolFormat | None:
    if any(marker not in added for marker in harmony.MARKERS):
        return None
    return ToolFormat(
        "harmony",
        HarmonyParser,
        partial(harmony_calls, added),
        partial(harmony_answer, added),
        {added[text]: text for text in (*harmony.MARKERS, *harmony.OPTIONAL_MARKERS) if text in added},
        continued=partial(HarmonyParser, continues=True),
        of_schema=partial(harmony_schema, added),
        of_choices=partial(harmony_choices, added),
    )


FORMATS: Mapping[str, Callable[[Mapping[str, int]], ToolFormat | None]] = {
    "harmony": _harmony,
    "hermes": _hermes,
    "llama3-json": _llama_json,
    "llama3-pythonic": _pythonic,
}
"""By name: what makes a format of the ids of those MARKERS that a model has; None: it needs others."""
AUTO, NONE = "auto", "none"

_OTHERS = ("<function=", "<arg_key>", "<tool_calls>", "<|tool_call", "[TOOL_CALLS]")
"""What templates of formats contain that are not known here, though they resemble known ones."""


def takes_tools(template: str) -> bool:
    """Whether a chat template does anything with tools."""
    code = " ".join(code_of(template))
    return re.search(r"\btools\b", re.sub(r"'[^']*'|\"[^\"]*\"", "", code)) is not None


def format_of(template: str, added: Mapping[str, int], setting: str = AUTO) -> ToolFormat | None:
    """The format that `setting` names, or with `auto` the one that a chat template describes; None: none.

    `added`: ids of the tokenizer's added tokens that are among MARKERS. If the template ignores tools, or the
    model lacks the format's tokens: None.
    """
    if setting == NONE or not takes_tools(template):
        return None
    name = _described(template) if setting == AUTO else setting
    return None if name is None else FORMATS[name](added)


def whole_format_of(template: str, added: Mapping[str, int], setting: str = AUTO) -> ToolFormat | None:
    """The format that the whole output of each chat is in, with tools or without; None: there is none."""
    if setting not in (AUTO, NONE, "harmony") or harmony.CHANNEL not in template:
        return None
    return _harmony(added)


def _described(template: str) -> str | None:
    if any(other in template for other in _OTHERS):
        return None
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return "harmony"
    if hermes.BEGIN in template and "arguments" in template:
        return "hermes"
    if re.search(r"\[\s*func\w*\(", template):
        return "llama3-pythonic"
    if re.search(r'\\?"name\\?": function name, \\?"parameters\\?"', template):
        return "llama3-json"
    return None
