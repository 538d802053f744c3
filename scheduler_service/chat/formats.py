"""How a model writes calls: the formats, and which one a model has.

A format is known by the chat template, which tells the model how to write calls, and by added tokens. What is
not known is not guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from scheduler_service.chat import harmony, hermes, listed, llama_json
from scheduler_service.chat.argument_texts import TextArguments
from scheduler_service.chat.call_grammar import (
    LarkRules,
    as_lark,
    hermes_calls,
    mistral_calls,
    object_calls,
    pythonic_calls,
)
from scheduler_service.chat.events import CallParser
from scheduler_service.chat.free_grammar import llama_json_answer, marked_answer
from scheduler_service.chat.harmony import HarmonyParser
from scheduler_service.chat.harmony_grammar import (
    harmony_answer,
    harmony_calls,
    harmony_choices,
    harmony_schema,
)
from scheduler_service.chat.hermes import HermesParser
from scheduler_service.chat.listed import ListedCallParser, MistralParser
from scheduler_service.chat.llama_json import LlamaJsonParser
from scheduler_service.chat.pythonic import PythonicParser
from scheduler_service.chat.reasoning import code_of
from scheduler_service.chat.tagged import GLM, MINIMAX, QWEN_CODER, SEED, TaggedParser, TagSyntax
from scheduler_service.chat.tagged_grammar import tagged_calls
from scheduler_service.chat.tools import OfferedTool

MARKERS = (
    hermes.BEGIN,
    hermes.END,
    llama_json.TAG,
    *listed.MARKERS,
    *dict.fromkeys(marker for syntax in (MINIMAX, SEED) for marker in (syntax.begin, syntax.end)),
    *harmony.MARKERS,
    *harmony.OPTIONAL_MARKERS,
)
"""Texts that formats look for among a tokenizer's added tokens."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls, with the tokens of one model."""

    name: str
    parser: Callable[[Mapping[str, TextArguments]], CallParser]
    """A parser of one completion's text, for tools of these names; of `typed` formats each with its texts."""
    rules: Callable[[Sequence[OfferedTool]], LarkRules]
    """The grammar's rules of a call of one of these tools. Raises ToolGrammarError."""
    answer: Callable[[Sequence[OfferedTool], int], str] | None = None
    """A Lark grammar of text and up to a number of calls of these tools (0: any number), if there is one."""
    markers: Mapping[int, str] = field(default_factory=dict)
    """Token ids that are the format's markers, with their texts."""
    around: tuple[str, str] = ("", "")
    """Lark's expressions of what stands before the first call and after the last one."""
    between: str | None = None
    """Text between two calls; None: the model's template knows one call at a time."""
    typed: bool = False
    """What an argument is depends on its tool's schema: texts have no quotation marks."""
    short_ids: bool = False
    """The model's template takes ids of nine letters and digits alone."""
    continued: Callable[[Mapping[str, TextArguments]], CallParser] | None = None
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
            comma = json.dumps(self.between) if self.between else ""
            several = f"call ({comma} call){times}"
        return as_lark(f"{self.around[0]} {several} {self.around[1]}".strip(), self.rules(tools))


def _times(max_calls: int) -> str:
    return f"{{0,{max_calls}}}" if max_calls > 0 else "*"


def _between(
    name: str,
    syntax: tuple[str, str],
    parser: Callable[..., CallParser],
    rules: Callable[[tuple[int, int] | None, Sequence[OfferedTool]], LarkRules],
    added: Mapping[str, int],
    *,
    typed: bool = False,
) -> ToolFormat:
    """A format with calls between the two markers of `syntax`, which may be tokens of the model or not."""
    begin, end = added.get(syntax[0]), added.get(syntax[1])
    ids = None if begin is None or end is None else (begin, end)

    def answer(tools: Sequence[OfferedTool], max_calls: int) -> str:
        return marked_answer(syntax[0], ids and ids[0], rules(ids, tools), "call", _times(max_calls))

    return ToolFormat(
        name,
        partial(parser, by_id=ids is not None),
        partial(rules, ids),
        answer,
        dict(zip(ids, syntax, strict=True)) if ids is not None else {},
        between="\n",
        typed=typed,
    )


def _hermes(added: Mapping[str, int]) -> ToolFormat:
    return _between("hermes", (hermes.BEGIN, hermes.END), HermesParser, hermes_calls, added)


def _tagged(name: str, syntax: TagSyntax, added: Mapping[str, int]) -> ToolFormat:
    parser, rules = partial(TaggedParser, syntax), partial(tagged_calls, syntax)
    return _between(name, (syntax.begin, syntax.end), parser, rules, added, typed=True)


def _listed(
    name: str, marker: str, parser: Callable[..., CallParser], added: Mapping[str, int]
) -> ToolFormat:
    """A format of a list of objects after a marker."""
    token = added.get(marker)
    begin = json.dumps(marker) if token is None else f"<[{token}]>"

    def answer(tools: Sequence[OfferedTool], max_calls: int) -> str:
        more = f'(", " call){_times(max_calls - 1)}' if max_calls != 1 else ""
        rules = {"calls": f'{begin} "[" call {more} "]"', **object_calls(tools, "arguments")}
        return marked_answer(marker, token, rules, "calls", "{0,1}")

    return ToolFormat(
        name,
        partial(parser, by_id=token is not None),
        partial(object_calls, key="arguments"),
        answer,
        {added[text]: text for text in listed.MARKERS if text in added and token is not None},
        around=(f'{begin} "["', '"]"'),
        between=", ",
    )


def _granite(added: Mapping[str, int]) -> ToolFormat:
    return _listed("granite", listed.GRANITE, ListedCallParser, added)


def _mistral(added: Mapping[str, int]) -> ToolFormat:
    older = replace(_listed("mistral", listed.MISTRAL, MistralParser, added), short_ids=True)
    if not {listed.MISTRAL, listed.ARGUMENTS} <= added.keys():
        return older
    rules = partial(mistral_calls, added)

    def answer(tools: Sequence[OfferedTool], max_calls: int) -> str:
        token = added[listed.MISTRAL]
        return marked_answer(listed.MISTRAL, token, rules(tools), "call", _times(max_calls))

    return replace(older, rules=rules, answer=answer, around=("", ""), between="")


def _llama_json(added: Mapping[str, int]) -> ToolFormat:
    tag = added.get(llama_json.TAG)
    return ToolFormat(
        "llama3-json",
        partial(LlamaJsonParser, by_id=tag is not None),
        partial(object_calls, key="parameters"),
        partial(llama_json_answer, tag),
        {} if tag is None else {tag: llama_json.TAG},
    )


def _pythonic(_added: Mapping[str, int]) -> ToolFormat:
    around = '"["', '"]"'
    return ToolFormat("llama3-pythonic", PythonicParser, pythonic_calls, around=around, between=", ")


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


_TAGGED = {"glm-4.5": GLM, "minimax-m2": MINIMAX, "qwen3-coder": QWEN_CODER, "seed-oss": SEED}
FORMATS: Mapping[str, Callable[[Mapping[str, int]], ToolFormat | None]] = {
    "granite": _granite,
    "harmony": _harmony,
    "hermes": _hermes,
    "mistral": _mistral,
    **{name: partial(_tagged, name, syntax) for name, syntax in _TAGGED.items()},
    "llama3-json": _llama_json,
    "llama3-pythonic": _pythonic,
}
"""By name: what makes a format of the ids of those MARKERS that a model has; None: it needs others."""
AUTO, NONE = "auto", "none"
"""Settings that are no format's name."""

_OTHERS = ("<function=", "<tool_calls>", "<|tool_call")
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


_TELLING: Mapping[str, tuple[str, ...]] = {
    "glm-4.5": (GLM.begin, GLM.key[0], GLM.value[0]),
    "minimax-m2": (MINIMAX.begin, MINIMAX.name[0], MINIMAX.key[0]),
    "seed-oss": (SEED.begin, SEED.name[0], SEED.key[0]),
    "qwen3-coder": (QWEN_CODER.begin, QWEN_CODER.name[0], QWEN_CODER.key[0]),
    "granite": (f"{listed.GRANITE} followed by a JSON list",),
    "mistral": (listed.MISTRAL,),
}
"""Texts that a template has if the model writes this format."""


def _described(template: str) -> str | None:
    for name, texts in _TELLING.items():
        if all(text in template for text in texts):
            return name
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
