"""Requests whose output a grammar constrains, of every kind, for the default model, and for the oracle, too.

Prompts show what is asked for, so that n-grams find something to draft from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline import aio

PERSON: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "born": {"type": "integer", "minimum": 1900, "maximum": 2030},
        "city": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["friend", "colleague"]},
    },
    "required": ["name", "born", "city", "kind"],
    "additionalProperties": False,
}
ORDER: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "order_number": {"type": "integer", "minimum": 1, "maximum": 9999},
        "express_delivery": {"type": "boolean"},
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"article": {"enum": ["tyre", "chain"]}, "count": {"enum": [1, 2, 3]}},
                "required": ["article", "count"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["order_number", "express_delivery", "items"],
    "additionalProperties": False,
}
_PERSON = '{"name": "Anna Berg", "born": 1988, "city": "Oslo", "kind": "friend"}\nAgain: '
_ORDER = '{"order_number": 17, "express_delivery": true, "items": [{"article": "tyre", "count": 2}]}\nAgain: '
_LAPS = "lap 1: 61 s, lap 2: 62 s, lap 3: 61 s\nAgain: "


@dataclass(frozen=True)
class GrammarQuestion:
    """A prompt and the options of its request, but for those that change no token."""

    prompt: str
    options: Mapping[str, Any]

    @property
    def is_object(self) -> bool:
        """The answer is a JSON object."""
        return "schema" in self.options

    def ask(self, client: aio.Client, **more: Any) -> aio.Generation:
        """Start it."""
        return client.generate(self.prompt, **{**self.options, **more})


def _question(prompt: str, seed: int, **options: Any) -> GrammarQuestion:
    return GrammarQuestion(prompt, {"seed": seed, "max_tokens": 56, "logprobs": seed % 3, **options})


QUESTIONS = (
    _question(_PERSON, 1, schema=PERSON, temperature=0.0),
    _question(_LAPS, 2, regex="lap 1: [0-9]{2} s(, lap [2-5]: [0-9]{2} s){2,4}", temperature=1.0, n=2),
    _question(_ORDER, 3, schema=ORDER, temperature=1.0),
    _question(
        "((1, 2), (3, 4), (5, 6))\nAgain: ",
        4,
        grammar='start: "(" item (", " item){1,3} ")"\nitem: start | /[0-9]{1,3}/',
        temperature=1.0,
    ),
    _question(_PERSON, 5, schema=PERSON, temperature=1.0, n=3),
    _question(
        "Answer: yes, but only in the rain\nAnswer: ",
        6,
        choices=["yes, but only in the rain", "yes", "no, never", "no, but maybe tomorrow"],
        temperature=1.0,
        n=2,
    ),
    _question(_ORDER, 7, schema=ORDER, temperature=0.0),
    _question(_LAPS, 8, regex="(lap [0-9]: [0-9]{2} s[,.] ?){3,6}", temperature=0.0),
    _question(_PERSON, 9, schema=PERSON, temperature=1.0, top_p=0.9, repetition_penalty=1.1),
    _question(
        "<b><b>wind and rain</b></b>\nAgain: ",
        10,
        grammar='start: "<b>" start "</b>" | /[a-z ]{6,24}/',
        temperature=0.0,
    ),
    _question(_ORDER, 11, schema=ORDER, temperature=1.0, n=2),
)
