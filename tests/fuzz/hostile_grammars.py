"""Hostile grammars: valid ones disturbed, and nests of what makes automata explode."""

from __future__ import annotations

import json
import random
from typing import Any

from executor_service.grammar.source import GrammarSource

_REGEXES = [
    r"(ab|a*c)[0-9]{2,4}(x|yy)?",
    r"[^\"\\]*",
    r"(.|\n)*x",
    r"(?i)ümlaut|\p{Greek}+",
    r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}",
]
_LARKS = [
    'start: pair ("," pair)*\npair: /[a-z]+/ "=" NUMBER | "(" start ")"\nNUMBER: /[0-9]+/',
    'start: e\ne: e e | "a" | \n',
    "start: T\nT: /.*/ & ~/.*b.{9}/",
    "start: x[max_tokens=5] y\nx: /[a-z]+/\ny[lazy]: /.*;/",
    '%llguidance {"no_forcing": true}\nstart: %json {"type": "integer"} <|eos|>',
]
_WORDS = [
    "type",
    "properties",
    "items",
    "enum",
    "anyOf",
    "allOf",
    "oneOf",
    "$ref",
    "$defs",
    "pattern",
    "required",
]
_WORDS += ["minimum", "maxLength", "minItems", "additionalProperties", "const", "not", "format", "x-guidance"]
_PIECES = [
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "*",
    "+",
    "?",
    "|",
    "\\",
    "{1000}",
    ".*",
    "&",
    "~",
    "^",
    "$",
    "\x00",
    "ü",
]
_PIECES += [
    "start",
    ":",
    "\n",
    '"',
    "/",
    "<|eos|>",
    "%json",
    "%regex",
    ",",
    "$ref",
    "#",
    "9" * 30,
    "-1",
    "e9999",
]


class HostileGrammars:
    """Draws one grammar after another; the same seed draws the same."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def draw(self) -> GrammarSource:
        """The next one."""
        rng = self._rng
        kind = rng.choice(["json_schema", "regex", "choices", "lark", "structural_tag"])
        match kind:
            case "regex":
                return GrammarSource(
                    "regex", self._disturbed(rng.choice([*_REGEXES, self._nest(rng.randrange(7))]))
                )
            case "choices":
                return GrammarSource(
                    "choices", choices=tuple(self._text() for _ in range(rng.choice([1, 3, 900])))
                )
            case "lark":
                return GrammarSource(
                    "lark", self._disturbed(rng.choice([*_LARKS, f"start: /{self._nest(4)}/"]))
                )
            case "structural_tag":
                begin, end = self._text(), self._text()
                tag = {
                    "structures": [{"begin": begin, "schema": self._schema(2), "end": end}],
                    "triggers": [self._text(), begin[:2]],
                }
                return GrammarSource("structural_tag", self._disturbed(json.dumps(tag)))
        return GrammarSource("json_schema", self._disturbed(json.dumps(self._schema(rng.randrange(6)))))

    def _disturbed(self, text: str) -> str:
        """The text after no, one or some strokes."""
        rng = self._rng
        for _ in range(rng.choice([0, 0, 1, 1, 3, 12])):
            at = rng.randrange(len(text) + 1)
            end = min(len(text), at + rng.randrange(8))
            match rng.randrange(4):
                case 0:
                    text = text[:at] + text[end:]
                case 1:
                    text = text[:at] + rng.choice(_PIECES) + text[at:]
                case 2:
                    text = text[:at] + text[at:end] * rng.choice([2, 40]) + text[end:]
                case _:
                    text = text[:at] + rng.choice(_PIECES) + text[end:]
        return text or "x"

    def _text(self) -> str:
        return "".join(self._rng.choice([*_PIECES, "a", "<", ">"]) for _ in range(self._rng.randrange(1, 5)))

    def _nest(self, depth: int) -> str:
        rng = self._rng
        if not depth:
            return rng.choice(["a", "[a-z]", ".", "(b|c)", r"\w", "a?", "(.|\n)"])
        inner = self._nest(depth - 1)
        low = rng.choice([0, 1, 30, 300])
        return rng.choice(
            [
                f"({inner}){{{low},{low + rng.choice([0, 1, 700])}}}",
                f"({inner})*",
                f"{inner}|.*{inner}",
                f"({inner}){inner}",
            ]
        )

    def _schema(self, depth: int) -> Any:
        rng = self._rng
        if not depth:
            leaves: list[Any] = [
                True,
                {},
                {"type": "string"},
                {"$ref": "#"},
                {"enum": [1, "a", None]},
                {"const": {}},
            ]
            leaves += [{"type": "integer", "minimum": 3, "maximum": rng.choice([1, 3, 10**30])}]
            leaves += [{"type": "string", "pattern": self._nest(3)}, {"$ref": "http://127.0.0.1:1/x"}]
            leaves += [{"type": "string", "format": rng.choice(["date-time", "email", "uuid", "nope"])}]
            leaves += [{"type": "string", "minLength": 9, "maxLength": rng.choice([8, 10**6])}]
            return rng.choice(leaves)
        inner = [self._schema(depth - 1) for _ in range(rng.randrange(1, 4))]
        return rng.choice(
            [
                {
                    "type": "object",
                    "properties": {self._text(): each for each in inner},
                    "required": [self._text()],
                },
                {"type": "array", "items": inner[0], "minItems": rng.choice([0, 3, 10**5])},
                {"anyOf": inner},
                {"allOf": inner},
                {"oneOf": inner},
                {"$defs": {"x": inner[0]}, "anyOf": [{"$ref": "#/$defs/x"}, *inner]},
                {rng.choice(_WORDS): rng.choice([inner, inner[0], 3, "x"]) for _ in range(3)},
            ]
        )
